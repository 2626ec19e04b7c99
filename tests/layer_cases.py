"""Checks of the kernels of layers for any device: norms, products, activations, rotation with the KV cache.

A check compares the Triton launcher and the torch reference with a computation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import inside
import torch
from attention_cases import Heads
from tensors import BF16, F16, F32, assert_near, randn

from nanovllm.families.kernels.joined_norms import (
    added_norm_reference,
    added_norm_triton,
    sum_of_norms_reference,
    sum_of_norms_triton,
    two_norms_reference,
    two_norms_triton,
)
from nanovllm.kernels.activation import silu_and_mul_reference, silu_and_mul_triton
from nanovllm.kernels.compat import INTERPRET
from nanovllm.kernels.gemv import gemv_reference, gemv_triton
from nanovllm.kernels.matmul import Tile, linear_reference, linear_triton
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from nanovllm.kernels.rotary import (
    Rotation,
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
    qk_norm_rope_store_triton,
    quantise_reference,
)

TILES = (None, *inside.matmul_tiles())  # None: the tile that `choose_tile` returns
GEMVS = (gemv_triton, gemv_reference)
STORES = (qk_norm_rope_store_triton, qk_norm_rope_store_reference)


# ---- norms ----


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_rms_norm(rows: int, n: int, dtype: torch.dtype, device: str) -> None:
    """For a strided matrix and a 3-d tensor, and fused with the residual add."""
    eps = 1e-6
    weight = 1 + 0.1 * randn(n, dtype=dtype, device=device, seed=1)
    x = randn(rows, 2 * n, dtype=dtype, device=device)[:, n:]
    residual = randn(rows, 3 * n, dtype=dtype, device=device, seed=2)[:, :n]
    for norm in (rms_norm_triton, rms_norm_reference):
        assert_near(norm(x, weight, eps), exact_rms_norm(x, weight, eps))
        deep = x.reshape(rows, 1, n).expand(rows, 2, n).contiguous()
        out = norm(deep, weight, eps)
        assert out.shape == deep.shape
        assert_near(out, exact_rms_norm(deep, weight, eps))
        assert not norm(torch.zeros_like(x), weight, eps).any()
    kept = residual.clone()
    for norm in (add_rms_norm_triton, add_rms_norm_reference):
        out, total = norm(x, residual, weight, eps)
        assert torch.equal(residual, kept)
        assert_near(total, x.double() + residual.double())
        assert_near(out, exact_rms_norm(total, weight, eps))


def check_joined_norms(rows: int, n: int, dtype: torch.dtype, device: str) -> None:
    """Gemma 4's norms of strided rows: near the exact ones, in 16 bits the bits of one after the other."""
    eps = 1e-6
    x, y, total = (randn(rows, 2 * n, dtype=dtype, device=device, seed=each)[:, n:] for each in range(3))
    first = 1 + 0.1 * randn(n, dtype=dtype, device=device, seed=3)
    second = 1 + 0.1 * randn(n, dtype=F32, device=device, seed=4)
    scalar = torch.tensor([0.7], dtype=dtype, device=device)
    # float32 may fuse a product with a sum, and the interpreter truncates to bfloat16.
    same_bits = dtype == F16 or (dtype == BF16 and not INTERPRET)
    a, b = (rms_norm_triton(each, weight, eps) for each, weight in ((x, first), (y, second)))
    other = rms_norm_triton(x, second, eps)
    joined = (
        (two_norms_triton(x, first, second, eps), (a, other)),
        ((sum_of_norms_triton(x, y, first, second, eps),), (a + b,)),
        ((added_norm_triton(x, total, first, scalar[0], eps),), ((total + a) * scalar[0],)),
    )
    for found, expected in joined:
        for ours, apart in zip(found, expected, strict=True):
            assert ours.is_contiguous() and (not same_bits or torch.equal(ours, apart))
    exact = exact_rms_norm(x, first, eps), exact_rms_norm(y, second, eps)
    for joined_sum in (sum_of_norms_triton, sum_of_norms_reference):
        assert_near(joined_sum(x, y, first, second, eps), exact[0] + exact[1])
        assert joined_sum(x[:0], y[:0], first, second, eps).shape == (0, n)
    wanted = (total.double() + exact[0]) * scalar.double()
    for added in (added_norm_triton, added_norm_reference):
        assert_near(added(x, total, first, scalar[0], eps), wanted)
        assert added(x[:0], total[:0], first, scalar[0], eps).shape == (0, n)
    for norms in (two_norms_triton, two_norms_reference):
        for ours, weight in zip(norms(x, first, second, eps), (first, second), strict=True):
            assert_near(ours, exact_rms_norm(x, weight, eps))
        assert [each.shape for each in norms(x[:0], first, second, eps)] == [(0, n)] * 2


# ---- products and activations ----


def check_linear(rows: int, n: int, k: int, dtype: torch.dtype, device: str, *, bias: bool) -> None:
    """Kernel and reference, for a strided matrix and every tile."""
    x = randn(rows, 2 * k, dtype=dtype, device=device)[:, k:]
    weight = randn(n, k, dtype=dtype, device=device, seed=1)
    vector = randn(n, dtype=dtype, device=device, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if vector is None else vector.double())
    for out in (linear_reference(x, weight, vector), linear_triton(x, weight, vector)):
        assert out.dtype == dtype and out.shape == (rows, n)
        assert_near(out, exact)
    for tile in TILES if (rows, k) == (130, 104) and dtype != F32 else ():
        assert_near(linear_triton(x, weight, vector, tile=tile), exact)
    residual = randn(rows, n, dtype=dtype, device=device, seed=3)
    for linear in (linear_reference, linear_triton):
        place = residual.clone()
        assert linear(x, weight, vector, place) is place
        assert_near(place, exact + residual.double())


def check_linear_rows_are_independent(
    n: int, k: int, dtype: torch.dtype, device: str, counts: Sequence[int], tiles: Sequence[Tile | None]
) -> None:
    """A row has the same bits beside any number of rows, with any of `tiles`, and beside NaN; compiled, also
    at any place.

    The interpreter adds with BLAS, which depends on a row's place in a tile. The last tile of 32 rows
    overlaps the one before: rows that only the last tile has are compared within a tolerance.
    """

    def check_same(out: torch.Tensor, rows: slice, expected: torch.Tensor) -> None:
        whole = rows.stop if device != "cpu" or rows.stop <= 32 else rows.stop // 32 * 32
        places = torch.arange(len(expected))[rows]
        equal, near = places < whole, places >= whole
        assert torch.equal(out[equal], expected[rows][equal]), rows
        assert_near(out[near], expected[rows][near].double())

    x = randn(max(counts), k, dtype=dtype, device=device)
    weight = randn(n, k, dtype=dtype, device=device, seed=1) * k**-0.5
    spoilt = x.clone()
    spoilt[::3] = math.nan
    full = linear_triton(x, weight)
    residual = randn(max(counts), n, dtype=dtype, device=device, seed=2)
    full_total = linear_triton(x, weight, residual=residual.clone())
    for tile in tiles:
        assert torch.equal(linear_triton(x, weight, tile=tile), full), tile
    for count in counts:
        check_same(linear_triton(x[:count], weight), slice(count), full)
        if device != "cpu":
            assert torch.equal(linear_triton(x[len(x) - count :], weight), full[len(x) - count :]), count
        check_same(
            linear_triton(x[:count], weight, residual=residual[:count].clone()), slice(count), full_total
        )
        beside = linear_triton(spoilt[:count], weight)
        assert beside[::3].isnan().all()
        for first in (1, 2):
            check_same(beside[first::3], slice(first, count, 3), full)


def check_silu(rows: int, n: int, dtype: torch.dtype, device: str) -> None:
    x = randn(rows, 2 * n + 8, dtype=dtype, device=device)[:, : 2 * n]
    x[0, 0], x[-1, n - 1] = 60.0, -60.0
    gate, up = x[:, :n].double(), x[:, n:].double()
    for silu in (silu_and_mul_triton, silu_and_mul_reference):
        assert_near(silu(x), gate * torch.sigmoid(gate) * up)


def check_gemv(rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Every combination that a model uses; behind the last rows of weight and bias is NaN."""
    x = randn(rows, k + 8, dtype=dtype, device=device)[:, :k]
    residual = randn(rows, k, dtype=dtype, device=device, seed=1)
    norm_weight = randn(k, dtype=dtype, device=device, seed=2)
    weight = randn(2 * n + 3, k, dtype=dtype, device=device, seed=3) / math.sqrt(k)
    bias = randn(2 * n + 3, dtype=dtype, device=device, seed=4)
    weight[2 * n :] = bias[2 * n :] = math.nan
    weight, bias = weight[: 2 * n], bias[: 2 * n]
    exact_sum = x.double() + residual.double()
    normed = exact_rms_norm(exact_sum.to(dtype), norm_weight, 1e-6)
    with_norm = {"norm_weight": norm_weight, "eps": 1e-6}
    for gemv in GEMVS:
        out, total = gemv(x, weight)
        assert_near(out, x.double() @ weight.double().T)
        assert torch.equal(total, x)
        for own_bias in (None, bias):
            plus = 0.0 if own_bias is None else own_bias.double()
            out, total = gemv(x, weight, own_bias, **with_norm, residual=residual)
            assert_near(total, exact_sum)
            assert_near(out, normed @ weight.double().T + plus)
            out, _ = gemv(x, weight, own_bias, **with_norm, residual=residual, silu=True)
            gate, up = (normed @ weight.double().T + plus).chunk(2, dim=-1)
            assert_near(out, gate * torch.sigmoid(gate) * up)
        out, total = gemv(x, weight, **with_norm)
        assert_near(out, exact_rms_norm(x, norm_weight, 1e-6) @ weight.double().T)
        assert torch.equal(total, x)
    together = gemv_triton(x, weight, bias, **with_norm, residual=residual, silu=True)[0]
    for row in range(rows):
        one = slice(row, row + 1)
        alone = gemv_triton(x[one], weight, bias, **with_norm, residual=residual[one], silu=True)[0]
        assert torch.equal(together[one], alone)


# ---- rotation, and what it stores in the KV cache ----


def check_rope(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, *, norm: bool
) -> None:
    """Against a rotation of complex numbers in float64, for views of a fused projection."""
    half, eps = head_dim // 2, 1e-6
    angles = torch.outer(torch.arange(50.0), 1 / 100 ** (torch.arange(half) / half)).to(device)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    wide = randn(tokens, q_heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k = wide[:, :q_heads], wide[:, q_heads : q_heads + kv_heads]
    q_weight, k_weight = (
        1 + 0.1 * randn(head_dim, dtype=dtype, device=device, seed=seed) if norm else None for seed in (1, 2)
    )
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)

    def exact(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.double() if weight is None else exact_rms_norm(x, weight, eps)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions][:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    k_exact, v = exact(k, k_weight), wide[:, q_heads + kv_heads :]
    slots = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(4))[:tokens].to(device)
    rotation = Rotation(positions, table, q_weight, k_weight, eps)
    for store in STORES:
        for index_dtype in (torch.int32, torch.int64):
            caches = [torch.zeros(tokens, 2, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv"]
            turn = rotation._replace(positions=positions.to(index_dtype))
            q_out = store(q, k, v, turn, KVCache(*caches), slots.int())
            assert q_out.is_contiguous()
            assert_near(q_out, exact(q, q_weight))
            k_stored, v_stored = (cache.flatten(0, 1)[slots] for cache in caches)
            assert_near(k_stored, k_exact)
            assert torch.equal(v_stored, v)
        turn = rotation._replace(positions=positions[-1:])
        alone = store(q[-1:], k[-1:], v[-1:], turn, KVCache(*caches), slots[-1:].int())
        assert torch.equal(alone, q_out[-1:])
        assert torch.equal(caches[0].flatten(0, 1)[slots], k_stored)

    # In FP8: what a cache of q's dtype would hold, quantised.
    scale = torch.linspace(0.01, 0.02, kv_heads, device=device)
    caches = [torch.zeros_like(cache, dtype=torch.float8_e4m3fn) for cache in caches]
    for store in STORES:
        plain = [torch.zeros(tokens, 2, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv"]
        store(q, k, v, rotation, KVCache(*plain), slots.int())
        store(q, k, v, rotation, KVCache(*caches, scale, scale), slots.int())
        for cache, source in zip(caches, plain, strict=True):
            expected = quantise_reference(source.flatten(0, 1)[slots], scale)
            assert torch.equal(cache.float().flatten(0, 1)[slots], expected.float())


def guarded_bytes(num_blocks: int, heads: Heads, cache_dtype: torch.dtype, device: str) -> torch.Tensor:
    """`guarded` in any dtype: all bits are set, which is NaN in each float format of a cache."""
    size = (num_blocks + 2) * heads.page * heads.kv_heads * heads.head_dim * cache_dtype.itemsize
    return (
        torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
        .view(cache_dtype)
        .view(num_blocks + 2, heads.page, heads.kv_heads, heads.head_dim)
    )


def check_store(tokens: int, heads: Heads, device: str, *, num_blocks: int = 9, fp8: bool = False) -> None:
    """Exactly the given slots change, in the whole cache and around it; negative slots change nothing.

    Position 0 rotates nothing, so the stored bits are known. In FP8 they are the nearest number of the
    format, and of two equally near ones the number with the even code.
    """
    capacity = num_blocks * heads.page
    slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(tokens))[:tokens]
    slots[::3] = -1
    slots[-1:] = capacity - 1 if capacity - 1 not in slots else slots[-1]
    shape = (tokens, heads.q_heads + 2 * heads.kv_heads, heads.head_dim)
    wide = randn(*shape, dtype=heads.dtype, device=device)
    if fp8:  # ties, numbers below the smallest, and some above the largest, which are clamped
        wide *= torch.tensor([1e-3, 0.02, 1.0, 300.0], dtype=heads.dtype, device=device)[
            torch.arange(tokens, device=device) % 4, None, None
        ]
        wide[:, :, ::2] = (wide[:, :, ::2] * 8).round() / 8
    q, k, v = wide.split((heads.q_heads, heads.kv_heads, heads.kv_heads), dim=1)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
    table = torch.cat((torch.ones(1, heads.head_dim // 2), torch.zeros(1, heads.head_dim // 2)), 1).to(device)
    cache_dtype = torch.float8_e4m3fn if fp8 else heads.dtype
    powers = 2.0 ** (torch.arange(heads.kv_heads, device=device) % 3 - 1)
    scales = (powers, 0.7 * powers) if fp8 else (None, None)
    for store in STORES:
        buffers = [guarded_bytes(num_blocks, heads, cache_dtype, device) for _ in range(2)]
        expected = [buffer.clone() for buffer in buffers]
        for target, source, scale in zip(expected, (k, v), scales, strict=True):
            stored = source if scale is None else nearest_fp8(source.float() / scale[:, None])
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    target[1 + slot // heads.page, slot % heads.page] = stored[token]
        cache = KVCache(buffers[0][1:-1], buffers[1][1:-1], *scales)
        out = store(q, k, v, Rotation(zeros, table), cache, slots.to(device, torch.int32))
        assert torch.equal(out, q)
        for buffer, target in zip(buffers, expected, strict=True):
            torch.testing.assert_close(buffer.float(), target.float(), rtol=0, atol=0, equal_nan=True)
        if not tokens:
            continue
        spoilt, kept = v.clone(), int((slots >= 0).nonzero()[0])
        spoilt[kept, -1, 3] = math.nan
        store(q, k, spoilt, Rotation(zeros, table), cache, slots.to(device, torch.int32))
        keys, values = (x.float().flatten(0, 1)[int(slots[kept])] for x in (cache.k, cache.v))
        if not (fp8 and device == "cpu"):  # Triton's interpreter has no NaN in FP8
            assert keys[-1].isnan().all() and keys[:-1].isfinite().all(), "the head's own key"
        assert values[-1, 3] == 0 and values.isfinite().all()


def check_norm_of_values(tokens: int, heads: Heads, device: str) -> None:
    """Values are stored with their norm; those that are the keys' projection too; NaN spoils its own head."""
    shape = (tokens, heads.q_heads + 2 * heads.kv_heads, heads.head_dim)
    wide = 3 * randn(*shape, dtype=heads.dtype, device=device)
    q, k, v = wide.split((heads.q_heads, heads.kv_heads, heads.kv_heads), dim=1)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    angles = randn(tokens, heads.head_dim // 2, device=device, seed=1)
    weight = 1 + 0.1 * randn(heads.head_dim, dtype=heads.dtype, device=device, seed=2)
    rotation = Rotation(positions, torch.cat((angles.cos(), angles.sin()), 1), weight, weight, 1e-5)
    ones = torch.ones(heads.head_dim, device=device)
    for values in (v, k):
        wanted = exact_rms_norm(values, ones, 1e-5)
        for store in (*STORES, qk_norm_rope_store):
            empty = (2, tokens, heads.kv_heads, heads.head_dim)
            cache, other = (
                KVCache(*(torch.zeros(empty, dtype=heads.dtype, device=device) for _ in "kv")) for _ in "12"
            )
            out = store(q, k, values, rotation._replace(v_norm=True), cache, positions)
            assert_near(cache.v[0], wanted)
            assert torch.equal(out, store(q, k, values, rotation, other, positions))
            assert torch.equal(cache.k, other.k) and torch.equal(other.v[0], values)
    spoilt = v.clone()
    spoilt[0, 0, 1] = math.nan
    for store in (*STORES, qk_norm_rope_store):
        cache = KVCache(*(torch.zeros(empty, dtype=heads.dtype, device=device) for _ in "kv"))
        store(q, k, spoilt, rotation._replace(v_norm=True), cache, positions)
        assert not cache.v[0, 0, 0].any() and cache.v.isfinite().all()
        assert heads.kv_heads == 1 or cache.v[0, 0, 1:].any()
        assert cache.k[0, 0, 0].isnan().all() and cache.k[0, 0, 1:].isfinite().all()


def nearest_fp8(x: torch.Tensor) -> torch.Tensor:
    """The float8_e4m3fn number nearest to each x, by comparison with all of them."""
    codes = torch.arange(127, dtype=torch.uint8, device=x.device)  # 0 to 448; 127 is NaN
    table = codes.view(torch.float8_e4m3fn).double()
    above = torch.searchsorted(table, x.double().abs().contiguous()).clamp(1, 126)
    low, high = x.double().abs() - table[above - 1], table[above] - x.double().abs()
    code = torch.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    return (code.to(torch.uint8) | (x.signbit().to(torch.uint8) << 7)).view(torch.float8_e4m3fn)
