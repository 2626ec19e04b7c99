"""Products of integers on CPUs: against plain torch, packed exactly, and the same bits in any batch."""

from __future__ import annotations

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from cpu_kernel_cases import TESTS, int_linear_reference, threads
from gguf_files import random_blocks

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.int_layout import (
    FORMATS,
    IntFormat,
    IntWeight,
    dequantised,
    from_blocks,
    quantise_reference,
)
from nanovllm.cpu.kernels.int_matmul import int_embed, int_linear
from nanovllm.cpu.kernels.int_quantise import quantise

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")

SIZES = [(16, 32), (1, 64), (100, 576), (33, 1000), (130, 1024), (17, 48)]  # n, k
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Float32 sums, and the result's own rounding.
OF_ALL_DTYPES = ("Q4_1", "Q6_K")
WITHOUT_SHARED = [name for name in FORMATS if not FORMATS[name].shared]  # which the package gguf can make
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def packed(name: str, n: int, k: int, seed: int = 0) -> IntWeight:
    torch.manual_seed(seed)
    weight = IntWeight.zeros(FORMATS[name], n, k)
    weight.store(0, quantise(FORMATS[name], torch.randn(n, k)))
    return weight


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.float(), wanted.float()
    return ((found - wanted).norm(dim=1).max() / wanted.norm(dim=1).mean()).item()


def check_all() -> None:
    """Every format, size and dtype on this CPU's level, or on the one that is forced."""
    for name in FORMATS:
        for n, k in SIZES:
            weight = packed(name, n, k)
            for dtype in DTYPES if name in OF_ALL_DTYPES else DTYPES[:1]:
                for rows in (1, 2, 7, 70):
                    x = torch.randn(rows, k + 3).to(dtype)[:, :k]  # rows that are not contiguous
                    bias, residual = torch.randn(n).to(dtype), torch.randn(rows, n + 5).to(dtype)[:, :n]
                    for extra in ((None, None), (bias, None), (bias, residual)):
                        found, wanted = int_linear(x, weight, *extra), int_linear_reference(x, weight, *extra)
                        assert found.dtype == dtype and found.shape == (rows, n)
                        assert far(found, wanted) < TOLERANCE[dtype], (name, n, k, dtype, rows)
            ids = torch.randint(n, (9,))
            for dtype in DTYPES if name in OF_ALL_DTYPES else DTYPES[:1]:
                assert torch.equal(int_embed(ids, weight, dtype), weight.dense()[ids].to(dtype))


def test_products_and_rows_are_those_of_plain_torch() -> None:
    check_all()


def in_subprocess(code: str, **variables: str) -> str:
    here = os.path.dirname(__file__)
    program = f"import sys; sys.path[:0] = {[here, str(TESTS)]}\n{code}"
    environment = os.environ | variables
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CODE = """
import test_cpu_kernels_int_matmul as t
t.check_all()
print(t.bits())
"""


def largest(name: str) -> int:
    """The largest byte of codes."""
    return FORMATS[name].most if FORMATS[name].bits == 8 else 255


def equal_numbers(format: IntFormat, n: int, groups: int, value: float) -> tuple[torch.Tensor, ...]:
    """Scales and minimums that are all the same, or for K-quants opposite."""
    if not format.shared:
        return (torch.full((n, groups, format.numbers), value, dtype=torch.float16),)
    common = torch.full((n, -(-groups // format.shared), format.numbers), value / 2, dtype=torch.float16)
    return torch.full((n, groups, 2), 2, dtype=torch.int8), common


def bits() -> list[int]:
    """Integer sums of products without float rounding: scales are powers of 2."""
    total = []
    for name in FORMATS:
        weight = IntWeight.zeros(FORMATS[name], 40, 96)
        size = (40, 3, FORMATS[name].code_bytes)
        codes = torch.randint(0, largest(name) + 1, size, dtype=torch.uint8, generator=seeded())
        weight.store(0, (codes, *equal_numbers(FORMATS[name], 40, 3, 0.5)))
        x = torch.randint(-127, 128, (5, 96), generator=seeded()).float()
        x[:, ::16] = 127.0  # so the scales are 1
        total.append(int(int_linear(x, weight).double().mul(2).remainder(1e9).sum()))
        assert torch.equal(int_linear(x, weight), x @ weight.dense().T)
    return total


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.full
@pytest.mark.parametrize("level", [each for each in isa.NEEDS if isa.NEEDS[each] <= isa.cpu_features()])
def test_every_level_that_runs_here(level: str) -> None:
    """The largest codes too: no sum of two products is cut off. With every address checked."""
    found = in_subprocess(CODE, NANOVLLM_CPU_ISA=level, NANOVLLM_CPU_CHECK="1")
    assert found.strip() == str(bits())


def test_extreme_codes_are_exact() -> None:
    for name in FORMATS:
        for byte in (0x00, 0x80, 0xFF, 0xF0, 0x0F):
            weight = IntWeight.zeros(FORMATS[name], 16, 64)
            code = min(byte, largest(name))
            codes = torch.full((16, 2, FORMATS[name].code_bytes), code, dtype=torch.uint8)
            weight.store(0, (codes, *equal_numbers(FORMATS[name], 16, 2, 1.0)))
            for value in (127.0, -127.0):
                x = torch.full((3, 64), value)
                assert torch.equal(int_linear(x, weight), x @ weight.dense().T), (name, byte, value)


CROSS = """
from nanovllm.cpu.kernels import int_matmul, native
print(native.assembly(int_matmul.make_product, ({name!r}, "float32"), "void", {level!r}))
"""


@pytest.mark.parametrize(("level", "cpu"), [("avx512_bf16", "sapphirerapids"), ("avx512", "skylake-avx512")])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_code_for_other_cpus_has_the_dot_product(name: str, level: str, cpu: str) -> None:
    """Nothing of it runs; numba compiles for the other CPU too, which knows the instructions."""
    text = in_subprocess(CROSS.format(name=name, level=level), NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="")
    assert ("vpdpbusd" in text) == (level == "avx512_bf16")
    if level == "avx512":
        assert ("vpmaddubsw" if "4" in name else "vpmaddwd") in text
    assert "zmm" in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_large_value_costs_the_15_beside_it_alone(name: str) -> None:
    """The error is that of int8 with a scale for each 16 values, which is much less than for each 32."""
    weight = packed(name, 64, 512)
    x = torch.rand(32, 512) - 0.5
    x[:, ::32] = 40.0 * torch.randn(32, 16).sign()

    def rounded(count: int) -> torch.Tensor:
        values = x.unflatten(1, (-1, count))
        scale = values.abs().amax(-1, keepdim=True) / 127
        return ((values / scale).round() * scale).flatten(1) @ weight.dense().T

    exact = x @ weight.dense().T
    own, sixteen, thirtytwo = (
        (each - exact).square().mean() for each in (int_linear(x, weight), rounded(16), rounded(32))
    )
    assert own < 1.01 * sixteen < 0.6 * thirtytwo


def test_a_product_can_be_float32() -> None:
    weight, x = packed("Q8_0", 40, 96), torch.randn(5, 96).bfloat16()
    found = int_linear(x, weight, dtype=torch.float32)
    assert torch.equal(found, int_linear(x.float(), weight)) and torch.equal(
        found.bfloat16(), int_linear(x, weight)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_bits_depend_on_no_other_row_and_no_thread(name: str) -> None:
    weight = packed(name, 200, 576)
    x = torch.randn(75, 576)
    whole = int_linear(x, weight)
    for row in (0, 9, 63, 64, 74):
        assert torch.equal(int_linear(x[row : row + 1], weight)[0], whole[row])
    assert torch.equal(int_linear(x[3:40], weight), whole[3:40])
    for number in (1, 2, 3):
        with threads(number):
            assert torch.equal(int_linear(x, weight), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_quantising_a_row_depends_neither_on_others_nor_on_threads(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    values = torch.randn(150, 333).to(dtype)
    with threads(1):
        whole = quantise(FORMATS[name], values)
    for number in (1, 2, 3):
        with threads(number):
            for first, last in ((0, 150), (7, 8), (31, 150)):
                found = quantise(FORMATS[name], values[first:last])
                assert all(torch.equal(a, b[first:last]) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_packing_keeps_what_is_stored(name: str) -> None:
    """Blocks as the package gguf writes them, or random ones, at any row, through packing and back; and in
    another order, those of `HALVES` in halves."""
    format, stored_as = FORMATS[name], name.removesuffix(" in halves")
    k = 768 if format.shared else 320
    values = np.random.default_rng(0).normal(size=(53, k)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[stored_as]
    raw = random_blocks(stored_as)("", values)[0] if format.shared else gguf.quants.quantize(values, kind)
    blocks = torch.from_numpy(raw).view(53, k // FORMATS[stored_as].block, -1)
    exact = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
    assert torch.equal(dequantised(format, *from_blocks(format, blocks)), exact)
    order = torch.randperm(k // format.block)
    parts = from_blocks(format, blocks, order)
    exact = exact.unflatten(1, (-1, format.block))[:, order].flatten(1)
    assert torch.equal(dequantised(format, *parts), exact)
    weight = IntWeight.zeros(format, 70, k)
    weight.store(5, tuple(each[:30] for each in parts))
    weight.store(35, tuple(each[30:] for each in parts))
    assert torch.equal(weight.dense()[5:58], exact)
    assert not weight.dense()[:5].any() and not weight.dense()[58:].any()
    for found, wanted in zip(weight.stored(5, 53), parts, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(weight.first_rows(40).dense(), weight.dense()[:40])


@pytest.mark.parametrize(
    ("name", "other", "ratio"), [("Q4_K", "Q4_1", 1.01), ("Q5_K", "Q5_1", 1.1), ("Q6_K", "Q8_0", 16)]
)
def test_quantising_with_shared_numbers_is_near_formats_of_as_many_bits(
    name: str, other: str, ratio: float
) -> None:
    """Squared errors beside gguf's of another format; with two bits less they are 16 times as large."""
    values = np.random.default_rng(1).normal(size=(64, 500)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[other]
    padded = np.pad(values, ((0, 0), (0, 12)))
    theirs = gguf.quants.dequantize(gguf.quants.quantize(padded, kind), kind)[:, :500]
    ours = dequantised(FORMATS[name], *quantise(FORMATS[name], torch.from_numpy(values))).numpy()[:, :500]
    assert np.square(ours - values).sum() < ratio * np.square(theirs - values).sum()


@pytest.mark.parametrize("name", WITHOUT_SHARED)
def test_quantising_is_at_least_as_exact_as_ggufs(name: str) -> None:
    values = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    ours = dequantised(FORMATS[name], *quantise(FORMATS[name], torch.from_numpy(values))).numpy()
    limit = 1.01 if name == "Q8_0" else 0.97 if FORMATS[name].bits == 4 else 1.0
    assert np.square(ours - values).sum() < limit * np.square(theirs - values).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])  # by a kernel
def test_quantising_is_that_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    """Also of zeros, of values so small that their scale is 0, and of groups that are not whole."""
    torch.manual_seed(2)
    for n, k in ((37, 100), (5, 32), (3, 17), (200, 640)):
        values = (torch.randn(n, k + 3) * torch.logspace(-9, 3, n)[:, None]).to(dtype)[:, :k]
        values[1], values[2, :9] = 0.0, 0.0
        found, wanted = quantise(FORMATS[name], values), quantise_reference(FORMATS[name], values)
        assert [each.shape for each in found] == [each.shape for each in wanted]
        errors = []
        for codes, scales in (found, wanted):
            far = dequantised(FORMATS[name], codes, scales)[:, :k] - values.float()
            errors.append(far.square().sum(1))
        assert (errors[0] <= 1.001 * errors[1] + 1e-30).all()
        same = [torch.equal(*each) for each in zip(found, wanted, strict=True)]
        assert all(same) or name != "Q8_0"


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_that_is_not_finite_is_seen_in_its_output(name: str) -> None:
    values = torch.randn(20, 64)
    values[3, 40], values[5, 7] = float("nan"), float("inf")
    weight = IntWeight.zeros(FORMATS[name], 20, 64)
    weight.store(0, quantise(FORMATS[name], values))
    spoilt = int_linear(torch.randn(2, 64), weight).isfinite().logical_not()
    assert spoilt.all(0).nonzero().flatten().tolist() == [3, 5] and spoilt.sum() == 4


def test_values_that_are_not_finite_and_rows_of_zeros() -> None:
    weight = packed("Q8_0", 20, 64)
    x = torch.randn(4, 64)
    x[1, 40], x[2, 3], x[3] = float("nan"), float("inf"), 0.0
    found = int_linear(x, weight)
    assert found[0].isfinite().all() and not found[1].isfinite().any() and not found[2].isfinite().any()
    assert torch.equal(found[3], torch.zeros(20))
    assert torch.equal(int_linear(torch.full((1, 64), 1e-38), weight), torch.zeros(1, 20))
    assert int_linear(torch.empty(0, 64), weight).shape == (0, 20)


def test_columns_of_a_tensor_can_be_the_output() -> None:
    """Of modules that are multiplied one after the other; what is beside them stays."""
    weights = [packed("Q4_K", 40, 256), packed("Q6_K", 24, 256, seed=1)]
    for dtype in DTYPES:
        x = torch.randn(7, 256).to(dtype)
        out = torch.full((7, 70), 5.0, dtype=dtype)
        for weight, first in zip(weights, (0, 40), strict=True):
            part = out[:, first : first + weight.n]
            assert int_linear(x, weight, out=part).data_ptr() == part.data_ptr()
            assert torch.equal(part, int_linear(x, weight))
        assert (out[:, 64:] == 5).all()
