"""What a workload costs at least: bytes read and floating-point operations, and the device's speed at both.

Counts what the answers need whatever engine computes them, and measures nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.models.config import ModelConfig
from tools.benchmark.workloads import Sharing, Workload
from tools.measure_device import device_name, measure_speed

# Bytes/s that a pure read reaches, bf16 FLOP/s that a large matrix product reaches; measured, torch 2.11.
# tools/measure_device.py prints such a line. A device that is not here is measured in each run.
KNOWN_DEVICES = {"NVIDIA H200": (4.58e12, 720e12), "NVIDIA H100 80GB HBM3": (3.13e12, 792e12)}


@dataclass(frozen=True)
class Speed:
    """Of all devices that share the model: each reads its part of the weights and of the K/V."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Cost:
    """The sizes of a model that decide how long a step must take."""

    layer_params: int  # of the matrices of all layers
    head_params: int  # of the matrix that makes logits
    kv_bytes: int  # of one token's K and V in all layers
    pair_flops: int  # of attention between one query token and one key token, in all layers
    itemsize: int  # bytes of a weight

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int, kv_itemsize: int) -> Cost:
        c = config
        qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
        per_layer = qkv + c.num_heads * c.head_dim * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
        return cls(
            layer_params=c.num_layers * per_layer,
            head_params=c.vocab_size * c.hidden_size,
            kv_bytes=2 * c.num_layers * c.num_kv_heads * c.head_dim * kv_itemsize,
            pair_flops=4 * c.num_layers * c.num_heads * c.head_dim,
            itemsize=itemsize,
        )

    def prefill_flops(self, query_lens: np.ndarray, context_lens: np.ndarray) -> float:
        """Of chunks of `query_lens` new tokens at the end of `context_lens`; logits of last rows only."""
        q, c = query_lens.astype(np.int64), context_lens.astype(np.int64)
        pairs = int((q * c - q * (q - 1) // 2).sum())
        return (
            2.0 * self.layer_params * int(q.sum()) + 2.0 * self.head_params * len(q) + self.pair_flops * pairs
        )

    def decode_bytes(self, num_steps: int, num_contexts: int) -> float:
        """Of `num_steps` decode steps that read the K/V of `num_contexts` tokens in all."""
        weights = self.layer_params + self.head_params
        return float(weights * self.itemsize * num_steps + self.kv_bytes * num_contexts)

    def decode_flops(self, num_tokens: int) -> float:
        return 2.0 * (self.layer_params + self.head_params) * num_tokens


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
