"""The experts of one or two rows as matrix-vector products: only the weights of chosen experts are read.

Two launches; the second one also sums a row's experts. Owns no weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.activation import gated
from nanovllm.kernels.compat import (
    await_inputs,
    by_device,
    jit,
    next_power_of_2,
    pdl_options,
    tl,
)
from nanovllm.kernels.gemv import use_gemv
from nanovllm.moe.kernels.reference import experts_reference
from nanovllm.moe.kernels.tiles import PLAIN_MLP, Chosen, ExpertMLP


class GemvChoice(NamedTuple):
    """How many elements of the weights a program loads at once, and its warps, for both products."""

    gate_up: int = 4096
    down: int = 4096  # of each expert
    gate_up_warps: int = 4
    down_warps: int = 4


_CHOICE = GemvChoice()
_BLOCK_K = 4096


@jit()
def _gate_up_kernel(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: int,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASES: tl.constexpr,
    KIND: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per pair and BLOCK_N outputs: silu(gate @ x) * (up @ x) of its expert.

    bias_ptr: None, or the experts' biases [2 * BIASES]. KIND: of the activation.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pair = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    exists = (outputs < N)[:, None]
    await_inputs(USE_PDL)
    expert = tl.load(ids_ptr + pair)
    end = tl.where(expert >= 0, K, 0)
    first = tl.maximum(expert, 0).to(tl.int64) * (2 * N)
    weight_ptrs = weight_ptr + (first + outputs)[:, None] * K + columns[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        mask = start + columns < end
        inside = exists & mask[None, :]
        gate_weight = tl.load(weight_ptrs + start, mask=inside, other=0.0).to(tl.float32)
        up_weight = tl.load(weight_ptrs + N * K + start, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + pair // TOP_K * x_stride + start + columns, mask=mask, other=0.0)
        gate += gate_weight * x.to(tl.float32)[None, :]
        up += up_weight * x.to(tl.float32)[None, :]
    gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + tl.maximum(expert, 0) * (2 * BIASES) + outputs
        gate_sum += tl.load(bias_ptrs, mask=outputs < BIASES, other=0.0).to(tl.float32)
        up_sum += tl.load(bias_ptrs + BIASES, mask=outputs < BIASES, other=0.0).to(tl.float32)
    out = gated(gate_sum.to(dtype).to(tl.float32), up_sum.to(dtype).to(tl.float32), dtype, KIND)
    tl.store(out_ptr + pair * N + outputs, out, mask=outputs < N)


@jit()
def _down_kernel(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row and BLOCK_N outputs: the weighted sum of its experts' products.

    bias_ptr: None, or the experts' biases [N].
    """
    row = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    exists = (outputs < N)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    await_inputs(USE_PDL)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        share = tl.load(weights_ptr + pair)
        end = tl.where(expert >= 0, K, 0)
        first = tl.maximum(expert, 0).to(tl.int64) * N
        weight_ptrs = weight_ptr + (first + outputs)[:, None] * K + columns[None, :]
        for start in tl.static_range(0, K, BLOCK_K):
            mask = start + columns < end
            weight = tl.load(weight_ptrs + start, mask=exists & mask[None, :], other=0.0)
            x = tl.load(x_ptr + pair * K + start + columns, mask=mask, other=0.0)
            total += weight.to(tl.float32) * (share * x.to(tl.float32))[None, :]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + tl.maximum(expert, 0) * N + outputs
            own = outputs < tl.where(expert >= 0, N, 0)
            bias += share * tl.load(bias_ptrs, mask=own, other=0.0).to(tl.float32)
    out = (tl.sum(total, axis=1) + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + outputs, out, mask=outputs < N)


def expert_gemv_triton(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: Chosen,
    mlp: ExpertMLP = PLAIN_MLP,
    choice: GemvChoice = _CHOICE,
) -> torch.Tensor:
    """The sum over a row's experts of weight * down @ (silu(gate @ x) * (up @ x)), [T, H].

    x: [T, H], few rows. gate_up: [E, 2I, H], down: [E, H, I], contiguous and of one dtype. mlp: another
    activation, and biases.
    """
    (num_rows, hidden), width = x.shape, down.shape[2]
    top_k = chosen.ids.shape[1]
    inner, out = x.new_empty(num_rows * top_k, width), x.new_empty(num_rows, hidden)
    if num_rows == 0:
        return out
    assert gate_up.is_contiguous() and down.is_contiguous() and x.stride(1) == 1
    block_k = min(_BLOCK_K, next_power_of_2(hidden))
    block_n = max(1, choice.gate_up // (2 * block_k))
    _gate_up_kernel[(-(-width // block_n), num_rows * top_k)](
        x,
        chosen.ids,
        gate_up,
        mlp.gate_up_bias,
        inner,
        x.stride(0),
        N=width,
        K=hidden,
        TOP_K=top_k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BIASES=mlp.width,
        KIND=mlp.activation.number,
        num_warps=choice.gate_up_warps,
        **pdl_options(x),
    )
    block_k = min(_BLOCK_K, next_power_of_2(width))
    block_n = max(1, choice.down // block_k)
    _down_kernel[(-(-hidden // block_n), num_rows)](
        inner,
        chosen.ids,
        chosen.weights,
        down,
        mlp.down_bias,
        out,
        N=hidden,
        K=width,
        TOP_K=top_k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=choice.down_warps,
        **pdl_options(x),
    )
    return out


expert_gemv = by_device(expert_gemv_triton, experts_reference)


def use_expert_gemv(x: torch.Tensor) -> bool:
    """Whether `expert_gemv` is the fastest for these rows."""
    return use_gemv(x)
