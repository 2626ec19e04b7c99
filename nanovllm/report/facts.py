"""The facts of a report: the model, its devices, and the devices' speed.

Reads only options and configurations, so it works for open and closed engines.
"""

from __future__ import annotations

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.stats import counted
from nanovllm.report.gpu import devices_of
from nanovllm.report.roofline import KNOWN_DEVICES, Cost, Speed


def model_facts(llm: LLMEngine) -> dict[str, object]:
    """Model, shape, devices and lengths, by name, as readable text."""
    model, devices = llm.model_config, devices_of(llm.config)
    dtype = str(devices[0].resolve_dtype(llm.config.dtype, model.dtype)).removeprefix("torch.")
    layers = counted(model.num_layers, "layer")
    kv_cache = dtype if llm.config.kv_cache_dtype == "auto" else llm.config.kv_cache_dtype
    return {
        "Model": llm.config.model,
        "Architecture": f"{model.architecture}, {layers}, hidden size {model.hidden_size:,}",
        "Dtype": f"{dtype}; KV cache: {kv_cache}",
        "Devices": f"{len(devices)} x {devices[0].name}",
        "Longest sequence": f"{model.max_model_len or model.longest:,} tokens",
    }


def roofline_of(llm: LLMEngine) -> tuple[Cost, Speed] | None:
    """The costs of the engine's steps, and the speed of its devices; None if the speed is not known."""
    devices = devices_of(llm.config)
    known = KNOWN_DEVICES.get(devices[0].name)
    if known is None:
        return None
    itemsize = devices[0].resolve_dtype(llm.config.dtype, llm.model_config.dtype).itemsize
    kv_itemsize = 1 if llm.config.kv_cache_dtype == "fp8" else itemsize
    cost = Cost.of(llm.model_config, itemsize, kv_itemsize)
    return cost, Speed(known[0] * len(devices), known[1] * len(devices))
