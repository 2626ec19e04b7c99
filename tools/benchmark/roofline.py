"""The minimum time of a workload, with `nanovllm.report.roofline`; unknown devices are measured.

Counts the work that any engine must do for the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.stats import attention_pairs
from nanovllm.models.config import ModelConfig
from nanovllm.report.roofline import KNOWN_DEVICES, Cost, Speed
from nanovllm.states.spec import stored
from tools.benchmark.workloads import Sharing, Workload
from tools.measure_device import device_name, measure_speed


@dataclass(frozen=True)
class Floor:
    """The minimum seconds of a workload. Prefill computes first tokens, decode steps all others."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def cost_of(config: ModelConfig, itemsize: int, options: Mapping[str, Any]) -> Cost:
    """The costs of a model with weights of `itemsize` bytes and these options of the engine."""
    states = Config("any", mamba_ssm_cache_dtype=options.get("mamba_ssm_cache_dtype", "auto"))
    kv_itemsize = 1 if "fp8" in options.get("kv_cache_dtype", "") else itemsize
    return Cost.of(stored(states, config), itemsize, kv_itemsize)


def floor_of(cost: Cost, work: Workload, speed: Speed, sharing: Sharing | None = None) -> Floor:
    """Prompts at full FLOP/s; then in each step the weights (or their products, if slower) and all K/V once.

    sharing: groups whose common prefix is computed once, and read once in each step.
    """
    lens = np.array([len(prompt) for prompt in work.prompts], np.int64)
    outs = np.array(work.output_lens, np.int64)
    new, steps = lens.copy(), int(outs.max()) - 1
    # Decode step k of a sequence, from 1 to out - 1, reads its prompt and k more tokens.
    places = np.arange(1, steps + 1)
    live = outs[:, None] > places
    contexts = cost.read_tokens(np.where(live, lens[:, None] + places, 0))
    if sharing is not None:
        shared = sharing.tokens[sharing.groups]
        first = np.unique(sharing.groups, return_index=True)[1]
        longest = np.zeros(len(sharing.tokens), np.int64)  # steps with any row of a group
        np.maximum.at(longest, sharing.groups, outs - 1)
        new -= shared
        new[first] = lens[first]
        contexts += int((longest * sharing.tokens).sum() - ((outs - 1) * shared).sum())
    kv_bytes = cost.decode_bytes(0, contexts) + cost.state_bytes * int(live.sum())
    experts = cost.expert_bytes(live.sum(0))  # with all sequences in one batch
    weight_bytes = cost.decode_bytes(steps, 0) + float(experts.sum())
    flops = cost.decode_flops(work.tokens_out - len(outs))
    return Floor(
        prefill=prefill_flops(cost, new, lens) / speed.flops_per_s,
        decode=max(weight_bytes / speed.bytes_per_s, flops / speed.flops_per_s)
        + kv_bytes / speed.bytes_per_s,
    )


def prefill_flops(cost: Cost, query_lens: np.ndarray, context_lens: np.ndarray) -> float:
    """FLOPs of chunks of `query_lens` new tokens at the end of `context_lens`, and last logits."""
    before, after = context_lens - query_lens, context_lens
    pairs = float(attention_pairs(query_lens, context_lens))
    for size, share in cost.windows:  # a token at place p sees p - size tokens less
        first, last = np.maximum(before - size, 0), np.maximum(after - size, 0)
        pairs -= share * float((last * (last + 1) // 2 - first * (first + 1) // 2).sum())
    layers = cost.prompt_flops(int(query_lens.sum()), pairs)
    return layers + 2.0 * cost.head_params * len(query_lens)


def device_speed(device: torch.device, num_devices: int, dtype: torch.dtype) -> Speed:
    """The speed of the devices with products in `dtype`: known for some GPUs in bfloat16, else measured.

    Measuring takes a few seconds, on one device.
    """
    known = KNOWN_DEVICES.get(device_name(device)) if dtype == torch.bfloat16 else None
    bandwidth, flops = known or measure_speed(device, dtype)
    return Speed(bandwidth * num_devices, flops * num_devices)


def broken_floor(result: dict[str, Any]) -> list[str]:
    """The shares above 1 in `result`, a report of bench.py: no engine can be faster than the floor."""
    shares = [("the whole", "the floor", result["share_of_floor"])]
    for name, phase in result.get("phases", {}).items():
        shares.append((name, "the device's speed", phase["share_of_peak"]))
        shares.append((name, "its floor", phase["share_of_floor"]))
    return [f"{what} is at {share:.1%} of {whole}" for what, whole, share in shares if share > 1]
