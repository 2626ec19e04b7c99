"""What a workload costs at least, by `nanovllm.report.roofline`; devices that it does not know are measured.

Counts what the answers need whatever engine computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.report.roofline import KNOWN_DEVICES, Cost, Speed
from tools.benchmark.workloads import Sharing, Workload
from tools.measure_device import device_name, measure_speed


@dataclass(frozen=True)
class Floor:
    """The least seconds of a workload. Its prompts make the first tokens, decode steps all others."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def floor_of(cost: Cost, work: Workload, speed: Speed, sharing: Sharing | None = None) -> Floor:
    """Prompts at full FLOP/s; then the weights once a step (or their products, if slower) and every K/V once.

    sharing: whose beginnings are computed once and read once a step for all of a group.
    """
    lens = np.array([len(prompt) for prompt in work.prompts], np.int64)
    outs = np.array(work.output_lens, np.int64)
    new, steps = lens.copy(), int(outs.max()) - 1
    # Decode step k of a sequence, from 1 to out - 1, reads its prompt and k more tokens.
    contexts = int(((outs - 1) * lens + outs * (outs - 1) // 2).sum())
    if sharing is not None:
        shared = sharing.tokens[sharing.groups]
        first = np.unique(sharing.groups, return_index=True)[1]
        longest = np.zeros(len(sharing.tokens), np.int64)  # steps with any row of a group
        np.maximum.at(longest, sharing.groups, outs - 1)
        new -= shared
        new[first] = lens[first]
        contexts += int((longest * sharing.tokens).sum() - ((outs - 1) * shared).sum())
    kv_bytes = cost.decode_bytes(0, contexts)
    weight_bytes = cost.decode_bytes(steps, 0)
    flops = cost.decode_flops(work.tokens_out - len(outs))
    return Floor(
        prefill=cost.prefill_flops(new, lens) / speed.flops_per_s,
        decode=max(weight_bytes / speed.bytes_per_s, flops / speed.flops_per_s)
        + kv_bytes / speed.bytes_per_s,
    )


def device_speed(device: torch.device, num_devices: int) -> Speed:
    """Known for some GPUs, else measured, in some seconds, on one device."""
    known = KNOWN_DEVICES.get(device_name(device))
    bandwidth, flops = known or measure_speed(device)
    return Speed(bandwidth * num_devices, flops * num_devices)


def broken_floor(result: dict[str, Any]) -> list[str]:
    """Which shares of `result`, a report of bench.py, are above 1: what an engine goes below is no floor."""
    shares = [("the whole", "the floor", result["share_of_floor"])]
    for name, phase in result.get("phases", {}).items():
        shares.append((name, "the device's speed", phase["share_of_peak"]))
        shares.append((name, "its floor", phase["share_of_floor"]))
    return [f"{what} is at {share:.1%} of {whole}" for what, whole, share in shares if share > 1]
