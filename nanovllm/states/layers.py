"""GatedDeltaNet: a layer's block that keeps a state of each sequence in place of keys and values.

Owns the layer's part of the pool of states; which rows a step reads and writes is in the step.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.stream import Group, RMSNorm, Step
from nanovllm.layers.weights import WeightLayer, split_evenly
from nanovllm.models.config import ModelConfig
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard
from nanovllm.states.columns import unpacked
from nanovllm.states.kernels.causal_conv import causal_conv, causal_conv_step
from nanovllm.states.kernels.delta_heads import DeltaHeads, Gates
from nanovllm.states.kernels.delta_prefill import delta_prefill
from nanovllm.states.kernels.delta_step import delta_step
from nanovllm.states.kernels.gated_norm import gated_norm
from nanovllm.states.kernels.packed import Packed, Saves, pack
from nanovllm.states.spec import StateSpec, num_rows


class PackedStep:
    """The sequences of a prefill step, packed once for all layers of a model that share this object."""

    def __init__(self) -> None:
        self._of: object = None
        self._packed: tuple[Packed, Saves | None] | None = None

    def of(self, step: Step) -> tuple[Packed, Saves | None]:
        """The sequences of `step`, and where their states are kept besides."""
        meta = step.meta
        if self._of is not meta or self._packed is None:
            assert meta.cu_seqlens_q is not None and step.slots is not None
            starts, moves = meta.cu_seqlens_q, meta.states
            first = starts[:-1]
            rows, positions = step.slots[first].int(), step.positions[first]
            sources, saves = (None, None) if moves is None else unpacked(moves, len(first))
            self._of, self._packed = meta, (pack(starts, positions, rows, len(step.slots), sources), saves)
        return self._packed


class Convolution(WeightLayer):
    """The weight [C, 1, K] of a causal convolution of each channel, this rank's channels of each part, and
    perhaps a bias [C]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    deterministic_needs_alignment = False  # its rows are no operand of a product

    def __init__(self, parts: dict[str, int], kernel: int, tp: Group, bias: bool = False) -> None:
        """parts: the channels of each part of the files' tensor, by its name."""
        super().__init__()
        shards, offset = [], 0
        for module, total in parts.items():
            own = split_evenly("channels", total, tp.size)
            shards.append(WeightShard("weight", module, (total, 1, kernel), 0, tp.rank * own, own, offset))
            offset += own
        self.declare((offset, 1, kernel), shards)
        self.register_parameter("bias", None)
        if bias:
            self.declare((offset,), [replace(x, param="bias", shape=x.shape[:1]) for x in shards])


class GatedDeltaNet(WeightLayer):
    """Gated DeltaNet with this rank's heads (Gated Delta Networks, Yang, Kautz, Hatamizadeh, 2024): a short
    convolution of q, k and v, the gated delta rule, and a gated norm of each head.

    `A_log` and `dt_bias` are rounded to the model's dtype, as transformers rounds them.
    """

    A_log: torch.Tensor  # [this rank's value heads], as dt_bias
    dt_bias: torch.Tensor

    def __init__(self, config: ModelConfig, spec: StateSpec, tp: Group, packed: PackedStep) -> None:
        super().__init__()
        hidden, keys, values = config.hidden_size, spec.keys, spec.values
        own = split_evenly("linear_num_value_heads", spec.v_heads, tp.size)
        k_heads = split_evenly("linear_num_key_heads", spec.k_heads, tp.size)
        self.heads = DeltaHeads(k_heads, own, spec.k_dim, spec.v_dim)
        self._kernel, self._packed = spec.kernel, [packed]  # in a list, so that layers share it
        self._state_dtype = spec.dtype
        sizes = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
        gates = {"in_proj_b": spec.v_heads, "in_proj_a": spec.v_heads}
        # Two products: files that quantise the first leave the gates' weights as they are.
        self.in_proj = MergedColumnParallelLinear(hidden, sizes, tp)
        self.gates_proj = MergedColumnParallelLinear(hidden, gates, tp)
        self.conv1d = Convolution({"conv_q": keys, "conv_k": keys, "conv_v": values}, spec.kernel, tp)
        self.norm = RMSNorm(spec.v_dim, config.rms_norm_eps)
        self.out_proj = RowParallelLinear(values, hidden, tp)
        for name in ("A_log", "dt_bias"):
            self.declare((own,), [WeightShard(name, None, (spec.v_heads,), 0, tp.rank * own, own, 0)])
        self.conv_pool = self.pool = torch.empty(0)

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        self.allocate_states(0)

    @property
    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Of a row of each pool: the last inputs of the convolution, and the state."""
        inputs = (self._kernel - 1, self.heads.channels), self.options.dtype
        return [inputs, (self.heads.state, self._state_dtype)]

    def state_bytes(self, num_seqs: int) -> int:
        """The memory of the states for so many running sequences."""
        return num_rows(num_seqs) * sum(prod(shape) * dtype.itemsize for shape, dtype in self._shapes)

    def allocate_states(self, num_seqs: int) -> None:
        """Replace the states by new ones, undefined, for so many running sequences; 0 frees them."""
        self.conv_pool = self.pool = torch.empty(0)
        rows, device = num_rows(num_seqs), self.options.device
        self.conv_pool, self.pool = (
            torch.empty((rows, *shape), dtype=dtype, device=device) for shape, dtype in self._shapes
        )

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape. Moves the states of the step's
        sequences on by its tokens."""
        heads, conv = self.heads, self.conv1d.weight.squeeze(1)
        projected = self.in_proj(x)
        assert isinstance(projected, torch.Tensor)
        qkv, z = projected[:, : heads.channels], projected[:, heads.channels :]
        b, a = self.gates_proj(x).chunk(2, dim=1)
        gates = Gates(a, b, self.A_log, self.dt_bias)
        if step.meta.cu_seqlens_q is None:
            assert step.slots is not None
            mixed = causal_conv_step(qkv, conv, None, self.conv_pool, step.slots)
            out = delta_step(mixed, gates, heads, self.pool, step.slots, self.options.deterministic)
        else:
            packed, saves = self._packed[0].of(step)
            mixed = causal_conv(qkv, conv, None, self.conv_pool, packed, saves)
            out = delta_prefill(mixed, gates, heads, self.pool, packed, saves)
        gated = gated_norm(out, z.unflatten(1, (-1, heads.v_dim)), self.norm.weight, self.norm.eps)
        product: Product = self.out_proj(gated.flatten(1))
        return product
