"""The minimum cost of steps in bytes and floating-point operations, and the device's speed for both.

Pure arithmetic on the sizes of a model, the options of an engine and the counts of a run; measures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanovllm.attention.rotary import AttentionSpec
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.kernels.kinds import Kinds
from nanovllm.models.config import ModelConfig
from nanovllm.moe.layers import MoESpec
from nanovllm.report.gpu import devices_of
from nanovllm.stats.summary import TimelinePoint

# Measured bytes/s of a pure read and bf16 FLOP/s of a large matrix product, torch 2.11.
# tools/measure_device.py prints such a line.
KNOWN_DEVICES = {"NVIDIA H200": (4.58e12, 720e12), "NVIDIA H100 80GB HBM3": (3.13e12, 792e12)}

_GATES: Kinds[str | None, Callable[[AttentionSpec], int]] = Kinds(  # rows of the matrix of a layer's gate
    "gate of attention",
    {
        None: lambda spec: 0,
        "head": lambda spec: spec.num_heads,
        "element": lambda spec: spec.num_heads * spec.head_dim,
    },
)


@dataclass(frozen=True)
class Speed:
    """The speed of all devices that share the model; each reads its part of the weights and of the K/V."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Cost:
    """The sizes of a model that determine the minimum time of a step."""

    layer_params: int  # of the matrices of all layers that a token is multiplied with
    head_params: int  # of the LM head
    kv_bytes: int  # of one token's K and V in all layers
    pair_flops: int  # of attention between one query token and one key token, in all layers
    itemsize: int  # bytes of a weight of the LM head
    expert_params: int = 0  # of one expert, in all layers that have experts
    num_experts: int = 0
    top_k: int = 0  # experts of a token
    layer_itemsize: float | None = None  # bytes of a weight of the layers; None: as that of the LM head
    layer_speed: float = 1.0  # of their products, relative to those of the LM head
    expert_itemsize: float | None = None  # bytes of a weight of the experts; None: as that of the LM head
    windows: tuple[tuple[int, float], ...] = ()  # each with its share of K and V; the rest has none
    state_bytes: int = 0  # of one sequence, read and written in a decode step, in all layers

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int, kv_itemsize: int) -> Cost:
        """The sizes of a model. itemsize, kv_itemsize: bytes of an element of the weights and of K/V."""
        c, moe = config, config.moe
        assert moe is None or isinstance(moe, MoESpec), f"no code here for {moe!r}"
        specs = [c.spec(layer) for layer in range(c.num_layers)]
        states = [spec.state for spec in specs if spec.state is not None]
        specs = [spec for spec in specs if spec.state is None]
        values = [0 if spec.kv_from is not None else 2 * spec.num_kv_heads * spec.head_dim for spec in specs]
        queries = sum(spec.num_heads * spec.head_dim for spec in specs)
        once = sum(each // 2 for each, spec in zip(values, specs, strict=True) if spec.v_from_k)
        gates = sum(_GATES[spec.gate](spec) for spec in specs)
        matrices = (2 * queries + sum(values) - once + gates) * c.hidden_size
        matrices += sum(state.params(c.hidden_size) for state in states)
        kinds = [] if moe is None else moe.kinds(c.num_layers)
        sparse = sum(count for kind, count in kinds if kind.has_experts(0))
        mlps = (c.num_layers - sparse) * 3 * c.hidden_size * c.intermediate_size
        windows: Counter[int | None] = Counter()
        for spec in specs:  # layers weigh as much as their keys and values
            windows[spec.window] += spec.num_kv_heads * spec.head_dim
        each = 0  # parameters of one expert, in all layers
        if moe is not None:
            each = sparse * 3 * c.hidden_size * moe.width
            shared = 0 if moe.shared_width is None else int(moe.shared_gate) + 3 * moe.shared_width
            mlps += moe.top_k * each + sparse * c.hidden_size * (moe.num_experts + shared)
        return cls(
            layer_params=matrices + mlps,
            head_params=c.vocab_size * c.hidden_size,
            kv_bytes=sum(values) * kv_itemsize,
            pair_flops=4 * queries,
            itemsize=itemsize,
            expert_params=each,
            num_experts=0 if moe is None else moe.num_experts,
            top_k=0 if moe is None else moe.top_k,
            layer_itemsize=config.quant.itemsize,
            layer_speed=config.quant.speed,
            expert_itemsize=config.quant.expert_itemsize,
            windows=tuple((size, part / windows.total()) for size, part in windows.items() if size),
            state_bytes=sum(2 * state.row_bytes(itemsize) for state in states),
        )

    def read_tokens(self, contexts: np.ndarray, rows: np.ndarray | int = 1) -> float:
        """Tokens whose K/V is read by `rows` rows with so many `contexts` in total, the mean of all
        layers. It is the most that they can be for rows of several lengths."""
        read = contexts * (1.0 - sum(share for _, share in self.windows))
        for size, share in self.windows:
            read = read + share * np.minimum(contexts, size * rows)
        return float(np.sum(read))

    def prompt_flops(self, num_tokens: int, num_pairs: float) -> float:
        """FLOPs of the layers for `num_tokens` prompt tokens that attend to `num_pairs` tokens in total: as
        many of the model's dtype as take the same time."""
        return 2.0 * self.layer_params / self.layer_speed * num_tokens + float(self.pair_flops * num_pairs)

    def decode_bytes(self, num_steps: int, num_contexts: float) -> float:
        """Bytes of `num_steps` decode steps that read the K/V of `num_contexts` tokens in total, without
        experts."""
        size = self.itemsize if self.layer_itemsize is None else self.layer_itemsize
        layers = (self.layer_params - self.top_k * self.expert_params) * size
        weights = layers + self.head_params * self.itemsize
        return float(weights * num_steps + self.kv_bytes * num_contexts)

    def expert_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of the experts that decode steps of so many `rows` read, if all are equally likely."""
        missed = (1.0 - self.top_k / max(1, self.num_experts)) ** rows
        size = self.itemsize if self.expert_itemsize is None else self.expert_itemsize
        return self.num_experts * (1.0 - missed) * self.expert_params * size

    def decode_flops(self, num_tokens: int) -> float:
        """FLOPs of the products for `num_tokens` tokens, one for each row of a step; see `prompt_flops`."""
        return 2.0 * (self.layer_params / self.layer_speed + self.head_params) * num_tokens

    def floor(self, point: TimelinePoint, speed: Speed) -> float:
        """The minimum seconds of an interval's steps: the layers of its prompt tokens at full FLOP/s; in each
        decode step one read of the weights (or their products, if slower), and the K/V of every row."""
        pairs = self.read_tokens(np.array(point.num_attention_pairs), point.num_computed_tokens)
        flops = self.prompt_flops(point.num_computed_tokens, pairs)
        steps = point.num_decode_steps
        experts = steps * float(self.expert_bytes(np.array(point.num_decode_rows / max(1, steps))))
        weight_seconds = max(
            (self.decode_bytes(steps, 0) + experts) / speed.bytes_per_s,
            self.decode_flops(point.num_decode_rows) / speed.flops_per_s,
        )
        read = self.read_tokens(np.array(point.num_context_tokens), point.num_decode_rows)
        kv_bytes = self.decode_bytes(0, read) + self.state_bytes * point.num_decode_rows
        kv_seconds = kv_bytes / speed.bytes_per_s
        return flops / speed.flops_per_s + weight_seconds + kv_seconds


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
