"""The gates of hybrid models on a CPU: of a head's output, after its norm, and of what attended. A program is
a token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty
from nanovllm.states.kernels.gated_norm import check_norm, gated_norm_reference


def _make(dtype: str) -> Callable[..., None]:
    from numpy import float32

    from nanovllm.cpu.kernels import vectors as v

    load, store = v.WHOLE[dtype]
    splat, add, sub, mul, div, fma, exp = v.splat, v.add, v.sub, v.mul, v.div, v.fma, v.exp
    rounded, size, total, square_root = v.ROUND[dtype], v.SIZES[dtype], v.total, v.sqrt
    zero, one = float32(0.0), float32(1.0)

    def gated_norm(
        x: Address,
        z: Address,
        weight: Address,
        out: Address,
        heads: int,
        n: int,
        x_stride: int,
        z_stride: int,
        eps: float,
        program: int,
        thread: int,
    ) -> None:
        for head in range(heads):
            own = x + (program * x_stride + head * n) * size
            gates = z + (program * z_stride + head * n) * size
            to = out + (program * heads + head) * n * size
            squares = splat(zero)
            for i in range(n // 16):
                value = load(own + 16 * size * i)
                squares = fma(value, value, squares)
            factor = splat(1.0 / square_root(total(squares) / n + eps))
            for i in range(n // 16):
                at = 16 * size * i
                normed = rounded(mul(rounded(mul(load(own + at), factor)), load(weight + at)))
                gate = load(gates + at)
                gate = div(gate, add(splat(one), exp(sub(splat(zero), gate))))
                store(to + at, mul(normed, gate))

    return gated_norm


def _make_gate(dtype: str) -> Callable[..., None]:
    from numpy import float32

    from nanovllm.cpu.kernels import vectors as v

    (load, store), (load_part, store_part) = v.WHOLE[dtype], v.PART[dtype]
    splat, add, sub, mul, div, exp = v.splat, v.add, v.sub, v.mul, v.div, v.exp
    rounded, size, zero, one = v.ROUND[dtype], v.SIZES[dtype], float32(0.0), float32(1.0)

    def sigmoid_gate(
        x: Address, gate: Address, out: Address, n: int, x_stride: int, stride: int, program: int, thread: int
    ) -> None:
        x += program * x_stride * size
        gate += program * stride * size
        out += program * n * size
        for i in range(n // 16):
            at = 16 * size * i
            share = rounded(div(splat(one), add(splat(one), exp(sub(splat(zero), load(gate + at))))))
            store(out + at, mul(load(x + at), share))
        rest = n % 16
        if rest:
            at = size * (n - rest)
            share = rounded(
                div(splat(one), add(splat(one), exp(sub(splat(zero), load_part(gate + at, rest)))))
            )
            store_part(out + at, mul(load_part(x + at, rest), share), rest)

    return sigmoid_gate


_KERNEL, _GATE = Kernel(_make), Kernel(_make_gate)


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`gated_norm` of states/kernels/gated_norm.py. Sizes that 16 does not divide take the twin."""
    if x.shape[-1] % 16:
        return gated_norm_reference(x, z, weight, eps)
    check_norm(x, z, weight)
    tokens, heads, n = x.shape
    assert all(each.stride(2) == 1 and (heads == 1 or each.stride(1) == n) for each in (x, z))
    out = empty(x.shape, x.dtype)
    _KERNEL.launch((DTYPES[x.dtype],), tokens, x, z, weight, out, heads, n, x.stride(0), z.stride(0), eps)
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`sigmoid_gate` of states/kernels/sigmoid_gate.py."""
    rows, n = x.shape
    assert x.dtype == gate.dtype and x.stride(1) == gate.stride(1) == 1
    out = empty((rows, n), x.dtype)
    _GATE.launch((DTYPES[x.dtype],), rows, x, gate, out, n, x.stride(0), gate.stride(0))
    return out
