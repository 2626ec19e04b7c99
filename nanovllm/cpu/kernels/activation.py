"""The gated activations of an MLP on a CPU. A program is a piece of a row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty
from nanovllm.cpu.kernels.native import jit
from nanovllm.kernels.kinds import Kinds

_PIECE = 1024  # columns of a program
# Of the clamped SwiGLU, and of GELU's approximation by tanh.
_ALPHA, _LIMIT = 1.702, 7.0
_ROOT, _CUBIC = 0.7978845608028654, 0.044715


def make_gated(kind: str) -> Callable[..., object]:
    """(16 values of the gate, 16 of up) -> their product after the activation; for kernels."""
    from numpy import float32

    from nanovllm.cpu.kernels import vector_math as m
    from nanovllm.cpu.kernels import vectors as v

    add, sub, mul, div, splat, minimum, maximum = v.add, v.sub, v.mul, v.div, v.splat, v.minimum, v.maximum
    exp, erfc = v.exp, m.erfc
    alpha, limit, root, cubic = (float32(each) for each in (_ALPHA, _LIMIT, _ROOT, _CUBIC))
    one, half, root_half = float32(1.0), float32(0.5), float32(0.5**0.5)

    def silu(gate: object, up: object) -> object:
        return mul(div(gate, add(splat(one), exp(sub(splat(float32(0.0)), gate)))), up)

    def gelu(gate: object, up: object) -> object:
        return mul(mul(mul(gate, splat(half)), erfc(mul(gate, splat(-root_half)))), up)

    def gelu_tanh(gate: object, up: object) -> object:  # 1 + tanh(x) is 2 / (1 + exp(-2 x))
        inner = add(gate, mul(mul(mul(gate, gate), gate), splat(cubic)))
        return mul(div(gate, add(splat(one), exp(mul(inner, splat(-root - root))))), up)

    def clamped(gate: object, up: object) -> object:
        gate = minimum(splat(limit), gate)
        up = add(minimum(splat(limit), maximum(splat(-limit), up)), splat(one))
        return mul(div(gate, add(splat(one), exp(mul(gate, splat(-alpha))))), up)

    functions = {"": silu, "erf": gelu, "tanh": gelu_tanh, "clamped": clamped}
    gated: Callable[..., object] = jit(Kinds("activation", functions)[kind])
    return gated


def _make(dtype: str, kind: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    (load, store), (load_part, store_part) = v.WHOLE[dtype], v.PART[dtype]
    gated, size, piece = make_gated(kind), v.SIZES[dtype], _PIECE

    def silu_and_mul(
        x: Address, out: Address, x_stride: int, n: int, pieces: int, program: int, thread: int
    ) -> None:
        row, start = program // pieces, piece * (program % pieces)
        count = min(piece, n - start)
        gate = x + size * (row * x_stride + start)
        up = gate + size * n
        out += size * (row * n + start)
        for i in range(count // 16):
            at = 16 * size * i
            store(out + at, gated(load(gate + at), load(up + at)))
        rest = count % 16
        if rest:
            at = size * (count - rest)
            store_part(out + at, gated(load_part(gate + at, rest), load_part(up + at, rest)), rest)

    return silu_and_mul


_KERNEL = Kernel(_make)


def silu_and_mul(x: torch.Tensor, kind: str = "") -> torch.Tensor:
    """`silu_and_mul` of kernels/activation.py."""
    rows, n = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = empty((rows, n), x.dtype)
    pieces = -(-n // _PIECE)
    _KERNEL.launch((DTYPES[x.dtype], kind), rows * pieces, x, out, x.stride(0), n, pieces)
    return out
