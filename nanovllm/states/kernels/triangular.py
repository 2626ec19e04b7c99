"""Parts of kernels: a product in float32, and the inverse of a unit lower triangular matrix."""

from __future__ import annotations

from nanovllm.kernels.compat import INTERPRETED, jit, tl


@jit()
def product(a: tl.tensor, b: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """total + a @ b in float32; PRECISION counts for factors of float32."""
    if INTERPRETED:  # the interpreter would multiply bfloat16 as the integers that hold its bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@jit()
def wide_product(a: tl.tensor, b: tl.tensor, total: tl.tensor, HALVES: tl.constexpr) -> tl.tensor:
    """total + a @ b for float32, with 16 bits of each factor (HALVES: sums of two bfloat16), or 24."""
    if not HALVES:
        return product(a, b, total, "ieee")
    a_high = a.to(tl.bfloat16)
    b_high = b.to(tl.bfloat16)
    a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
    b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
    total = product(a_low, b_high, total, "ieee")
    total = product(a_high, b_low, total, "ieee")
    return product(a_high, b_high, total, "ieee")


@jit()
def inverse(lower: tl.tensor, HALVES: tl.constexpr, C: tl.constexpr, B: tl.constexpr) -> tl.tensor:
    """(I + lower)^-1, for `lower` [C, C] float32 that is 0 on its diagonal and above.

    Blocks of B on the diagonal are inverted by substitution, all at once: D. The rest L lies in blocks below,
    so M = D L has M^4 = 0 for C = 4 B, and the inverse is (I - M) (I + M^2) D. Substitution within blocks
    keeps the figures small where keys repeat; powers of `lower` itself would not.
    """
    tl.static_assert(C == 4 * B, "a power of M is missing")
    n: tl.constexpr = C // B
    block = tl.arange(0, n)
    r = tl.arange(0, B)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(lower, (n, B, n, B)), 0.0), axis=2)
    # Transposed, so that sums run along the last axis, which lies within a warp.
    inverted = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, tl.zeros_like(diagonal))
    for i in range(1, B):
        row = tl.sum(tl.where((r == i)[None, :, None], diagonal, 0.0), axis=1)
        more = tl.sum(row[:, None, :] * inverted, axis=2)
        inverted = tl.where((r == i)[None, None, :], inverted - more[:, :, None], inverted)
    inverted = tl.permute(inverted, (0, 2, 1))
    index = tl.arange(0, C)
    is_below = (index // B)[:, None] > (index // B)[None, :]
    d = tl.reshape(tl.where(same, inverted[:, :, None, :], 0.0), (C, C))
    zeros = tl.zeros((C, C), dtype=tl.float32)
    m = wide_product(d, tl.where(is_below, lower, 0.0), zeros, HALVES)
    squared = wide_product(m, m, zeros, HALVES)
    left = tl.where(index[:, None] == index[None, :], 1.0, 0.0) - m
    left = wide_product(left, squared, left, HALVES)
    return wide_product(left, d, zeros, HALVES)
