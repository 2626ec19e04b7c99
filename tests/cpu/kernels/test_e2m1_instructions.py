"""The instructions that make floats of codes of E2M1, followed in NumPy, for all words.

No GPU is needed, and the interpreter does not run them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from nanovllm.formats.int4.kernels.e2m1 import moves_apart, mxfp4_asm, nvfp4_asm
from nanovllm.formats.int4.kernels.layout import SIGN_BITS, SIZE_BITS
from nanovllm.formats.mxfp4.kernels.values import VALUES

Register = np.ndarray[Any, np.dtype[np.uint32]]
WORDS = np.arange(65536, dtype=np.uint32)
BITS = {"bf16": (8, 7, 127), "f16": (5, 10, 15)}  # of exponent and fraction, and the bias


def floats(halves: Register, kind: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values of floats of 16 bits that are no infinity."""
    wide, fraction_bits, bias = BITS[kind]
    exponent = (halves >> fraction_bits & ((1 << wide) - 1)).astype(np.int64)
    fraction = (halves & ((1 << fraction_bits) - 1)) / 2.0**fraction_bits
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.where(halves >> 15 & 1, -size, size)


def run(asm: Any, words: Register, scales: Register, kind: str) -> list[np.ndarray[Any, Any]]:
    """Both floats of the result. words and scales: what $1 and $2 hold."""
    registers = {"$1": words, "$2": scales, "0": np.zeros_like(words)}
    text = getattr(asm, "value", asm).strip().strip("{}")

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in (each.strip() for each in text.split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        target, *read = (each.strip() for each in rest.split(","))
        values = [value(each) for each in read]
        match name:
            case "shl.b32":
                made = values[0] << values[1]
            case "shr.b32":
                made = values[0] >> values[1]
            case "and.b32":
                made = values[0] & values[1]
            case "mul.lo.u32":
                made = values[0] * values[1]
            case "mov.b32":
                made = values[0] + np.zeros_like(words)
            case "lop3.b32":
                assert values[3] == 0xEA
                made = values[0] & values[1] | values[2]
            case "prmt.b32":
                octets = [pair >> np.uint32(8 * i) & 255 for pair in values[:2] for i in range(4)]
                picks = [int(values[2]) >> 4 * i & 15 for i in range(4)]
                made = sum((octets[pick] << np.uint32(8 * i) for i, pick in enumerate(picks)), registers["0"])
            case "fma.rn.bf16x2" | "mul.rn.f16x2":
                assert target == "$0" and kind == re.search(r"b?f16", name)[0]  # type: ignore[index]
                pairs = [[each >> np.uint32(shift) & 0xFFFF for shift in (0, 16)] for each in values]
                return [floats(a, kind) * floats(b, kind) for a, b in zip(*pairs[:2], strict=True)]
            case _:
                raise AssertionError(line)
        registers[target] = made.astype(np.uint32)
    raise AssertionError("no product")


def expected(words: Register, place: int) -> np.ndarray[Any, Any]:
    codes = (words >> SIGN_BITS[place] & 1) << 3 | words >> SIZE_BITS[place] & 7
    return np.array(VALUES)[codes]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("place", range(4))
def test_nvfp4(place: int, kind: str) -> None:
    """Neighbours in a register do not change each other; each factor comes from its half of $2."""
    others = WORDS[::-1] ^ 0x5A5A
    code = {"bf16": 2.0**-126, "f16": 2.0**-14}[kind]
    for octet in range(88, 232, 5):  # as `pack_nvfp4` makes them
        half = {"bf16": octet << 4 | 0x7000, "f16": octet << 7}[kind]
        pair = half << 16 | 0x3A5B if place > 1 else 0x3A5B << 16 | half
        scale = float(floats(np.array([half], dtype=np.uint32), kind)[0])
        assert scale * code == (1 + octet % 8 / 8) * 2.0 ** (octet // 8 - 29)
        low, high = run(nvfp4_asm(place, kind), WORDS | others << 16, np.full_like(WORDS, pair), kind)
        assert np.array_equal(low, expected(WORDS, place) * code * scale)
        assert np.array_equal(high, expected(others, place) * code * scale)


@pytest.mark.parametrize("place", range(4))
def test_mxfp4(place: int) -> None:
    others = WORDS[::-1] ^ 0x5A5A
    for octet in (1, 2, 118, 126, 127, 128, 253, 254):
        octets = 0x11223344 & ~(255 << 8 * place) | octet << 8 * place
        low, high = run(mxfp4_asm(place), WORDS | others << 16, np.full_like(WORDS, octets), "bf16")
        assert np.array_equal(low, expected(WORDS, place) * 2.0 ** (octet - 253))
        assert np.array_equal(high, expected(others, place) * 2.0 ** (octet - 253))


def test_codes_that_one_product_moves() -> None:
    """Some do, so both ways are tested above."""
    assert [moves_apart(place, 6) for place in range(4)] == [False, False, True, False]
    assert [moves_apart(place, 9) for place in range(4)] == [True, True, True, False]
