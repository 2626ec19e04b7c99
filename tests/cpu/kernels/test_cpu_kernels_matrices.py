"""AMX, a level of CPUs: against the level without it, the same bits in any batch, and where it is off."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import Heads, make_cache, variant_of
from cpu_kernel_cases import finish, start, threads
from tensors import BF16, F32, assert_near, randn

from nanovllm.kernels.attention_reference import paged_prefill_attention_reference
from nanovllm.kernels.paged import KVCache

pytest.importorskip("numba")

import llvmlite.binding

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.matmul import copy_rows, matmul, packed_shape
from nanovllm.cpu.kernels.prefill_attention import paged_prefill_attention

needs_amx = pytest.mark.skipif(not isa.has_matrices(), reason="needs a CPU with AMX")
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 255, 256, 257, 300]  # tiles have 16 rows, programs 256
WIDTHS = [(40, 32), (64, 64), (200, 96), (130, 576)]  # n, k: blocks have 64 columns, tiles 32 of K
ODD = [(40, 48), (200, 50), (130, 1000)]  # k is no multiple of 32


def pack(weight: torch.Tensor) -> torch.Tensor:
    packed = torch.zeros(packed_shape(tuple(weight.shape), weight.dtype), dtype=weight.dtype)
    copy_rows(packed, weight, 0, 0)
    return packed


def part(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Random rows in a wider tensor, which is NaN elsewhere."""
    wide = torch.full((rows, columns + 5), math.nan, dtype=BF16)
    wide[:, :columns] = randn(rows, columns, dtype=BF16, seed=seed)
    return wide[:, :columns]


def without_amx(*arguments: Any) -> torch.Tensor:
    with isa.compiling_for("avx512_bf16"):
        return matmul(*arguments)


@needs_amx
@pytest.mark.parametrize(("n", "k"), WIDTHS)
def test_products_are_near_those_without_amx(n: int, k: int) -> None:
    weight, bias = randn(n, k, dtype=BF16), randn(n, dtype=BF16, seed=1)
    packed = pack(weight)
    for rows in ROWS:
        x, residual = part(rows, k, 2), part(rows, n, 3)
        size = x.float().abs() @ weight.float().abs().T + bias.float().abs() + residual.float().abs()
        for extra in ((None, None), (bias, None), (None, residual), (bias, residual)):
            found, expected = matmul(x, packed, n, *extra).float(), without_amx(x, packed, n, *extra).float()
            error = 2 * math.sqrt(k) * 2.0**-23 * size  # of both sums, which are rounded by half an eps each
            rounding = torch.finfo(BF16).eps * (expected.abs() + error)
            assert ((found - expected).abs() <= error + rounding).all()


@needs_amx
@pytest.mark.parametrize(("n", "k"), ODD)
def test_odd_widths_are_those_without_amx(n: int, k: int) -> None:
    packed = pack(randn(n, k, dtype=BF16))
    for rows in (1, 16, 65):
        x = part(rows, k, 2)
        assert matmul(x, packed, n).equal(without_amx(x, packed, n))


@needs_amx
@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_activations_in_float32_are_those_without_amx(weight_dtype: torch.dtype) -> None:
    x, packed = randn(65, 96), pack(randn(130, 96, dtype=weight_dtype, seed=1))
    assert matmul(x, packed, 130).equal(without_amx(x, packed, 130))


@needs_amx
@pytest.mark.parametrize(("n", "k"), WIDTHS)
def test_the_bits_of_a_row_depend_on_no_other_row(n: int, k: int) -> None:
    """So `deterministic=True` and batches of other sizes change nothing: one row takes the same path."""
    packed, bias = pack(randn(n, k, dtype=BF16)), randn(n, dtype=BF16, seed=1)
    x, residual = part(300, k, 2), part(300, n, 3)
    expected = matmul(x, packed, n, bias, residual)
    for number in (1, 2, 3):
        with threads(number):
            for first, last in ((0, 300), (0, 1), (299, 300), (5, 21), (5, 22), (31, 64), (200, 257)):
                own = slice(first, last)
                assert matmul(x[own], packed, n, bias, residual[own]).equal(expected[own])


@needs_amx
def test_values_that_are_not_finite_stay_in_their_row_and_column() -> None:
    x, weight = randn(40, 64, dtype=BF16), randn(70, 64, dtype=BF16, seed=1)
    x[4, 7], weight[66, 47] = math.nan, math.inf
    spoilt = matmul(x, pack(weight), 70).isfinite().logical_not()
    assert spoilt[4].all() and spoilt[:, 66].all() and spoilt.sum() == 70 + 40 - 1


@needs_amx
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (100, 5.0, True)])
@pytest.mark.parametrize("heads", [Heads(3, 3, 32, 16, BF16), Heads(6, 2, 64, 64, BF16)], ids=str)
def test_attention_of_prompts(heads: Heads, window: int | None, softcap: float | None, sinks: bool) -> None:
    """Programs of 1 to 96 rows, tiles of keys whose last 32 are not there, and the same bits for a part."""
    contexts, new = (1, 150, 0, 129, 900, 40), (1, 150, 0, 60, 5, 40)
    cache = make_cache(contexts, heads, "cpu")
    bounds = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    q = randn(int(bounds[-1]), heads.q_heads, heads.head_dim, dtype=BF16, seed=4)
    variant, scale = variant_of(heads, "cpu", window, softcap, sinks), heads.head_dim**-0.5

    def attend(rows: torch.Tensor, tables: torch.Tensor, bounds: torch.Tensor, lens: torch.Tensor) -> Any:
        return paged_prefill_attention(rows, cache.kv, tables, bounds, lens, max(new), scale, variant)

    found = attend(q, cache.tables, bounds, cache.contexts)
    wide = KVCache(cache.kv.k.float(), cache.kv.v.float())
    places = cache.tables, bounds, cache.contexts, max(new)
    assert_near(found, paged_prefill_attention_reference(q.float(), wide, *places, scale, variant))
    for row, count in enumerate(new):
        for few in {min(count, 1), min(count, 3), min(count, 33)} - {0}:
            end, own = int(bounds[row + 1]), slice(row, row + 1)
            ends = torch.tensor([0, few], dtype=torch.int32)
            alone = attend(q[end - few : end], cache.tables[own], ends, cache.contexts[own])
            assert alone.equal(found[end - few : end])


LEVELS = """
from nanovllm.cpu import isa
print(isa.level(), isa.has_matrices(), isa.has_bf16())
"""


@needs_amx
def test_a_lower_level_switches_it_off() -> None:
    lines, _ = finish(start(LEVELS, NANOVLLM_CPU_ISA="avx512_bf16"))
    assert lines == ["avx512_bf16 False True"]
    lines, _ = finish(start(LEVELS, NANOVLLM_CPU_ISA=""))
    assert lines == ["amx True True"]


@pytest.mark.parametrize(("answer", "level"), [(0, "amx"), (-1, "avx512_bf16")])
def test_linux_must_permit_it(answer: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    there = dict.fromkeys(isa.NEEDS["amx"], True)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: there)
    asked: list[tuple[int, ...]] = []

    def syscall(*numbers: int) -> int:
        asked.append(numbers)
        return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(isa.sys, "platform", "linux")
    isa.forget()
    try:
        assert isa.level() == level
        assert asked == [(158, 0x1023, 18)]  # arch_prctl, ARCH_REQ_XCOMP_PERM, the registers of tiles
        monkeypatch.setattr(isa.sys, "platform", "darwin")
        isa.forget()
        assert isa.level() == "avx512_bf16"
    finally:
        monkeypatch.undo()
        isa.forget()


CODE = """
from test_cpu_levels import kernels
found = {each.name: each for each in kernels()}
product = found["nanovllm.cpu.kernels.matmul._make"]
attention = found["nanovllm.cpu.kernels.prefill_attention._make"]
cases = [
    (product, ("matrices", "bfloat16", "bfloat16"), "amx"),
    (product, ("bfloat16", "bfloat16", "bfloat16"), "amx"),
    (product, ("float32", "bfloat16", "float32"), "amx"),
    (attention, ("bfloat16", 3, 64, ""), "amx"),
    (attention, ("bfloat16", 3, 64, ""), "avx512_bf16"),
    (attention, ("float32", 3, 64, ""), "amx"),
]
for kernel, variant, level in cases:
    text = kernel.assembly(variant, level)
    print(level, *variant[:1], "tdpbf16ps" in text, "tilerelease" in text)
"""


@pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")
def test_only_products_of_bfloat16_have_the_instructions() -> None:
    """Nothing of it runs: the code is that of a CPU with AMX on any CPU."""
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    lines, _ = finish(start(path + CODE))
    assert lines == [
        "amx matrices True True",
        "amx bfloat16 False False",
        "amx float32 False False",
        "amx bfloat16 True True",
        "avx512_bf16 bfloat16 False False",
        "amx float32 False False",
    ]
