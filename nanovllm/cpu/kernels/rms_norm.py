"""RMSNorm of rows on a CPU, with the residual add before it. A program is one row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty


def _make(dtype: str, weight_dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    (load, store), (load_part, store_part) = v.WHOLE[dtype], v.PART[dtype]
    load_weight, load_weight_part = v.WHOLE[weight_dtype][0], v.PART[weight_dtype][0]
    rounded = v.ROUND[dtype]
    size, weight_size = v.SIZES[dtype], v.SIZES[weight_dtype]
    add, mul, fma, splat, total_of = v.add, v.mul, v.fma, v.splat, v.total
    square_root = v.sqrt

    def rms_norm(
        x: Address,
        residual: Address,
        weight: Address,
        out: Address,
        summed: Address,
        n: int,
        x_stride: int,
        residual_stride: int,
        eps: float,
        program: int,
        thread: int,
    ) -> None:
        x += program * x_stride * size
        residual_row = residual + program * residual_stride * size
        out += program * n * size
        summed += program * n * size
        whole, rest = n // 16, n % 16
        squares = splat(0.0)
        for i in range(whole):
            value = load(x + 16 * size * i)
            if residual:
                value = rounded(add(value, load(residual_row + 16 * size * i)))
                store(summed + 16 * size * i, value)
            squares = fma(value, value, squares)
        end = 16 * size * whole
        if rest:
            value = load_part(x + end, rest)
            if residual:
                value = rounded(add(value, load_part(residual_row + end, rest)))
                store_part(summed + end, value, rest)
            squares = fma(value, value, squares)
        factor = splat(1.0 / square_root(total_of(squares) / n + eps))
        source = summed if residual else x
        for i in range(whole):
            value = mul(load(source + 16 * size * i), factor)
            store(out + 16 * size * i, mul(value, load_weight(weight + 16 * weight_size * i)))
        if rest:
            value = mul(load_part(source + end, rest), factor)
            w = load_weight_part(weight + 16 * weight_size * whole, rest)
            store_part(out + end, mul(value, w), rest)

    return rms_norm


_KERNEL = Kernel(_make)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of kernels/rms_norm.py."""
    rows, n = x.shape
    out = empty((rows, n), x.dtype)
    total = x if residual is None else empty((rows, n), x.dtype)
    other = x if residual is None else residual
    variant = DTYPES[x.dtype], DTYPES[weight.dtype]
    summed = None if residual is None else total
    stride, other_stride = x.stride(0), other.stride(0)
    _KERNEL.launch(variant, rows, x, residual, weight, out, summed, n, stride, other_stride, eps)
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of kernels/rms_norm.py."""
    return add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)
