"""Weights become groups of 8 or 4 bits on a CPU, as `int_layout.py` describes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.cpu.kernels.int_layout import (
    FACTORS,
    FORMATS,
    GROUP,
    IntFormat,
    quantise_reference,
    quantise_shared,
)
from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel
from nanovllm.cpu.kernels.native import jit


def _make(name: str, dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v
    from nanovllm.cpu.kernels.int_vectors import MAGIC, store_codes

    format = FORMATS[name]
    bits, middle, numbers, code_bytes = format.bits, format.middle, format.numbers, format.code_bytes
    load, load_part, size = v.WHOLE[dtype][0], v.PART[dtype][0], v.SIZES[dtype]
    splat, add, sub, mul, fma = v.splat, v.add, v.sub, v.mul, v.fma
    maximum, minimum, absolute, total, largest = v.maximum, v.minimum, v.absolute, v.total, v.largest
    get_f16, set_f16 = v.get_f16, v.set_f16
    bottom, top = (0.0, 15.0) if bits == 4 else (1.0, 255.0)
    start, step, count = FACTORS[0], FACTORS[1] - FACTORS[0], len(FACTORS) if bits == 4 else 1

    @jit
    def codes_of(x: Any, offset: float, inverse: float) -> Any:
        magic = splat(MAGIC)
        code = sub(add(mul(sub(x, splat(offset)), splat(inverse)), magic), magic)
        return minimum(maximum(add(code, splat(middle)), splat(bottom)), splat(top))

    @jit
    def squares(x: Any, code: Any, offset: float, scale: float) -> Any:
        far = sub(fma(sub(code, splat(middle)), splat(scale), splat(offset)), x)
        return mul(far, far)

    @jit
    def propose(place: int, low: float, high: float, factor: float) -> None:
        """Write the scale and the minimum of a group, with 4 bits for a share of its range."""
        if bits == 8:
            set_f16(place, max(high, -low) / 127.0)
        elif numbers == 2:
            set_f16(place, (high - low) * factor / 15.0)
            set_f16(place + 2, min(low + (high - low) * (1.0 - factor) / 2.0, high))
        else:
            set_f16(place, (high if high > -low else low) * factor / -8.0)

    @jit
    def written(place: int) -> tuple[float, float, float]:
        """The scale of a group as it is stored, its minimum or 0, and what to multiply values by."""
        scale = get_f16(place)
        offset = get_f16(place + 2) if numbers == 2 else scale * 0.0
        return scale, offset, 1.0 / scale if scale != 0.0 else 0.0

    def quantise(
        x: Address, codes: Address, scales: Address, k: int, stride: int, program: int, thread: int
    ) -> None:
        groups = (k + 31) // 32
        x += program * stride * size
        for group in range(groups):
            at, left = x + 32 * size * group, k - 32 * group
            first = load(at) if left >= 16 else load_part(at, left)
            second = splat(0.0)
            if left >= 32:
                second = load(at + 16 * size)
            elif left > 16:
                second = load_part(at + 16 * size, left - 16)
            place = scales + 2 * numbers * (program * groups + group)
            high = largest(maximum(first, second))
            low = -largest(maximum(sub(splat(0.0), first), sub(splat(0.0), second)))
            best, least = 0, 3.4e38
            for each in range(count):
                propose(place, low, high, start + step * each)
                scale, offset, inverse = written(place)
                far = add(
                    squares(first, codes_of(first, offset, inverse), offset, scale),
                    squares(second, codes_of(second, offset, inverse), offset, scale),
                )
                error = total(far)
                if error < least:
                    best, least = each, error
            propose(place, low, high, start + step * best)
            if not total(add(absolute(first), absolute(second))) <= 3.4e38:
                set_f16(place, total(add(first, second)) * 0.0)  # NaN, as a product with the weight would be
            _, offset, inverse = written(place)
            lower, upper = codes_of(first, offset, inverse), codes_of(second, offset, inverse)
            target = codes + code_bytes * (program * groups + group)
            if bits == 8:
                store_codes(target, lower)
                store_codes(target + 16, upper)
            else:
                store_codes(target, fma(upper, splat(16.0), lower))

    return quantise


_KERNEL = Kernel(_make)


def quantise(format: IntFormat, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """values [n, k] -> codes [n, groups, code_bytes] uint8 and scales [n, groups, numbers] float16, or what
    `quantise_shared` gives for formats whose groups share them.

    k is padded with zeros to whole groups. With 4 bits the scale has the least squared error of a few. A
    group with a value that is not finite has the scale NaN.
    """
    if format.shared:
        return quantise_shared(format, values)
    if format.bits == 8 and format.most < 255:
        return quantise_reference(format, values)
    n, k = values.shape
    values = values if values.stride(1) == 1 else values.contiguous()
    groups = -(-k // GROUP)
    codes = torch.empty(n, groups, format.code_bytes, dtype=torch.uint8)
    scales = torch.empty(n, groups, format.numbers, dtype=torch.float16)
    variant = format.name, DTYPES[values.dtype]
    _KERNEL.launch(variant, n, values, codes, scales, k, values.stride(0))
    return codes, scales
