"""The quantisations by their names in config.json: one line for each. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.cpu.integers import IntegerConfig, StoredConfig
from nanovllm.formats.compressed_tensors import CompressedTensorsConfig
from nanovllm.formats.fp8.method import Fp8Config
from nanovllm.formats.int4.configs import from_awq, from_gptq
from nanovllm.formats.mxfp4.method import Mxfp4Config
from nanovllm.quantization.unquantized import QuantConfig

# By the `quant_method` of config.json's quantization_config, which a quantisation is made from.
QUANTIZATIONS: dict[str, Callable[[Mapping[str, Any]], QuantConfig]] = {
    "fp8": Fp8Config.of,
    "compressed-tensors": CompressedTensorsConfig.of,
    "awq": from_awq,
    "gptq": from_gptq,
    "mxfp4": Mxfp4Config.of,
    "gguf": StoredConfig.of,
}
# What the option `quantization` makes of a checkpoint without quantization_config, and of GGUF files.
ON_THE_FLY: dict[str, QuantConfig] = {
    "fp8": Fp8Config(ignored=("gate", "shared_expert_gate")),  # routers
    "int8": IntegerConfig("int8", "Q8_0"),
    "int4": IntegerConfig("int4", "Q4_0"),
}
DEQUANTIZE = "dequantize"  # the option for GGUF files


def supported_quantizations() -> str:
    """The names of what is supported, for messages."""
    return ", ".join(map(repr, QUANTIZATIONS))


def quant_config(stated: Any, asked: str | None) -> QuantConfig:
    """What config.json states as quantization_config, or what is `asked` for, the option `quantization`.

    ValueError for what is not supported, and if both differ.
    """
    if stated is None:
        if asked in (None, DEQUANTIZE):
            return QuantConfig()
        if asked not in ON_THE_FLY:
            raise ValueError(
                f"quantization={asked!r}, but config.json has no quantization_config; for weights in 16 or "
                f"32 bits quantization is None or {' or '.join(map(repr, ON_THE_FLY))}"
            )
        return ON_THE_FLY[asked]
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or not isinstance(method, str) or method not in QUANTIZATIONS:
        raise ValueError(
            f"config.json: the weights are quantised (quantization_config: quant_method {method!r}) in a way "
            f"that is not supported; supported: {supported_quantizations()}. Use such a checkpoint, or use "
            "the model's bfloat16, float16 or float32 checkpoint, on the hub usually the one without a "
            "suffix such as bnb-4bit"
        )
    if method == "gguf" and asked == DEQUANTIZE:
        return QuantConfig()
    if method == "gguf" and asked in ON_THE_FLY:
        return ON_THE_FLY[asked]
    if method == "gguf" and asked not in (None, method):
        options = ", ".join(map(repr, (DEQUANTIZE, *ON_THE_FLY)))
        raise ValueError(
            f"quantization={asked!r} is not what a GGUF file holds; leave quantization out to use its "
            f"weights as they are stored, or pass one of {options}"
        )
    if asked not in (None, method):
        raise ValueError(
            f"quantization={asked!r} contradicts config.json, whose quantization_config has quant_method "
            f"{method!r}; leave quantization out"
        )
    return QUANTIZATIONS[method](stated)
