"""How a kernel that writes rows stores them in FP8 (E4M3) with float32 scales. Launches nothing."""

from __future__ import annotations

from nanovllm.kernels.compat import INTERPRETED, jit, tl

FP8_MAX = 448.0
LEAST = 1e-30  # the least maximum of a scale, so that its inverse is finite


@jit()
def fp8_scale(top: tl.tensor, LEAST: tl.constexpr = LEAST, MAX: tl.constexpr = FP8_MAX) -> tl.tensor:
    """The scale of values up to `top`, and the factor that makes codes of them."""
    top = tl.maximum(top, LEAST)
    return tl.div_rn(top, tl.full(top.shape, MAX, tl.float32)), tl.div_rn(
        tl.full(top.shape, MAX, tl.float32), top
    )


@jit()
def fp8_rounded(x: tl.tensor, MAX: tl.constexpr = FP8_MAX) -> tl.tensor:
    """Codes of float32 values; NaN stays NaN."""
    x = tl.clamp(x, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:  # its cast rounds wrongly, so round here: to 3 bits of mantissa, 2**-9 at least
        exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        shift = (exponent + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
        x = (x + shift) - shift
    return x.to(tl.float8e4nv)


@jit()
def store_fp8(
    x: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Quantise and store a row x [padded N] float32, 0 past N. GROUP None: one scale."""
    PADDED: tl.constexpr = x.shape[0]
    columns = tl.arange(0, PADDED)
    if GROUP is None:
        scale, inverse = fp8_scale(tl.max(tl.abs(x), axis=0))
        tl.store(scales_ptr + row, scale)
        codes = fp8_rounded(x * inverse)
    else:
        tiles = tl.reshape(x, (PADDED // GROUP, GROUP))
        scale, inverse = fp8_scale(tl.max(tl.abs(tiles), axis=1))
        index = tl.arange(0, PADDED // GROUP)
        scale_ptrs = scales_ptr + index.to(tl.int64) * num_rows + row
        tl.store(scale_ptrs, scale, mask=index < (N + GROUP - 1) // GROUP)
        codes = tl.reshape(fp8_rounded(tiles * inverse[:, None]), (PADDED,))
    tl.store(codes_ptr + row * N + columns, codes, mask=columns < N)
