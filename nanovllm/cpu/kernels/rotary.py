"""The steps between projection and attention on a CPU: norm of heads, rotation, and the store of keys and
values in the paged cache. A program is one token with all its heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch
from nanovllm.cpu.kernels.native import jit
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store_reference


def _make(dtype: str, q_dtype: str, k_dtype: str) -> Callable[..., None]:
    """q_dtype, k_dtype: of the norms' weights; "" without a norm."""
    from nanovllm.cpu.kernels import vectors as v

    (load, store), (load_part, store_part) = v.WHOLE[dtype], v.PART[dtype]
    size = v.SIZES[dtype]
    has_q, has_k = q_dtype != "", k_dtype != ""
    add, sub, mul, fma, splat, total_of, square_root = v.add, v.sub, v.mul, v.fma, v.splat, v.total, v.sqrt
    load_f32, store_f32, get_f32, set_f32 = v.load_f32, v.store_f32, v.get_f32, v.set_f32
    get_i32, get_i64, prefetch = v.get_i32, v.get_i64, v.prefetch

    @jit
    def read(x: int, row: int, n: int) -> float:
        """Copy a head to `row` in float32; return the sum of its squares."""
        squares = splat(0.0)
        for i in range(n // 16):
            value = load(x + 16 * size * i)
            store_f32(row + 64 * i, value)
            squares = fma(value, value, squares)
        if n % 16:
            value = load_part(x + n // 16 * 16 * size, n % 16)
            store_f32(row + n // 16 * 64, value)
            squares = fma(value, value, squares)
        return total_of(squares)

    def make_norm(weight_dtype: str) -> Callable[[int, int, int, float, float], None]:
        load_weight, load_weight_part = v.WHOLE[weight_dtype][0], v.PART[weight_dtype][0]
        weight_size = v.SIZES[weight_dtype]

        @jit
        def norm(row: int, weight: int, n: int, squares: float, eps: float) -> None:
            """Divide a head by its root mean square, and multiply it by the weight."""
            factor = splat(1.0 / square_root(squares / n + eps))
            whole, rest = n // 16, n % 16
            for i in range(whole):
                x = mul(load_f32(row + 64 * i), factor)
                store_f32(row + 64 * i, mul(x, load_weight(weight + 16 * weight_size * i)))
            if rest:
                x = mul(load_f32(row + 64 * whole), factor)
                w = load_weight_part(weight + 16 * weight_size * whole, rest)
                store_f32(row + 64 * whole, mul(x, w))

        return norm

    q_norm, k_norm = make_norm(q_dtype or dtype), make_norm(k_dtype or dtype)

    @jit
    def write(row: int, out: int, n: int, spoilt: float) -> None:
        for i in range(n // 16):
            store(out + 16 * size * i, add(load_f32(row + 64 * i), splat(spoilt)))
        if n % 16:
            last = add(load_f32(row + n // 16 * 64), splat(spoilt))
            store_part(out + n // 16 * 16 * size, last, n % 16)

    @jit
    def rotate(row: int, cos: int, n: int, turned: int, interleaved: int) -> None:
        half = n // 2
        sin = cos + 4 * half
        if not interleaved and turned % 16 == 0 and half % 16 == 0:
            for i in range(0, half, 16):
                first = row + 4 * (i if i < turned else i + turned)
                second = row + 4 * (i + turned if i < turned else i + half)
                x, y, c, s = load_f32(first), load_f32(second), load_f32(cos + 4 * i), load_f32(sin + 4 * i)
                store_f32(first, sub(mul(x, c), mul(y, s)))
                store_f32(second, add(mul(y, c), mul(x, s)))
            return
        for i in range(turned):  # the other pairs have angle 0
            first = row + (8 * i if interleaved else 4 * i)
            second = row + (8 * i + 4 if interleaved else 4 * (i + turned))
            a, b = get_f32(first), get_f32(second)
            cosine, sine = get_f32(cos + 4 * i), get_f32(sin + 4 * i)
            set_f32(first, a * cosine - b * sine)
            set_f32(second, b * cosine + a * sine)

    def qk_norm_rope_store(
        q: Address,
        k: Address,
        values: Address,
        positions: Address,
        cos_sin: Address,
        slots: Address,
        q_weight: Address,
        k_weight: Address,
        out: Address,
        k_cache: Address,
        v_cache: Address,
        memory: Address,
        scratch_bytes: int,
        q_heads: int,
        kv_heads: int,
        n: int,
        turned: int,
        interleaved: int,
        long_positions: int,
        long_slots: int,
        q_stride: int,
        q_head: int,
        k_stride: int,
        k_head: int,
        v_stride: int,
        v_head: int,
        page: int,
        block_stride: int,
        position_stride: int,
        head_stride: int,
        eps: float,
        program: int,
        thread: int,
    ) -> None:
        row = memory + thread * scratch_bytes
        position = get_i64(positions + 8 * program) if long_positions else get_i32(positions + 4 * program)
        slot = get_i64(slots + 8 * program) if long_slots else get_i32(slots + 4 * program)
        cos = cos_sin + 4 * n * position
        cell = (slot // page * block_stride + slot % page * position_stride) * size
        if slot >= 0:  # the cells come into the cache while queries are computed
            for head in range(kv_heads):
                for line in range(0, n * size, 64):
                    prefetch(k_cache + cell + head * head_stride * size + line)
                    prefetch(v_cache + cell + head * head_stride * size + line)
        for head in range(q_heads):
            squares = read(q + (program * q_stride + head * q_head) * size, row, n)
            if has_q:
                q_norm(row, q_weight, n, squares, eps)
            rotate(row, cos, n, turned, interleaved)
            write(row, out + (program * q_heads + head) * n * size, n, 0.0)
        if slot < 0:
            return
        for head in range(kv_heads):
            x_row = values + (program * v_stride + head * v_head) * size
            target = v_cache + cell + head * head_stride * size
            read(x_row, row, n)
            nothing = splat(0.0)
            for i in range(0, n, 16):  # a scratch row is padded with 0
                nothing = fma(load_f32(row + 4 * i), splat(0.0), nothing)
            spoilt = total_of(nothing)  # NaN, or 0
            if spoilt != spoilt:
                for i in range(n):
                    x = get_f32(row + 4 * i)
                    if x - x != 0.0:
                        set_f32(row + 4 * i, 0.0)
            write(row, target, n, 0.0)
            squares = read(k + (program * k_stride + head * k_head) * size, row, n)
            if has_k:
                k_norm(row, k_weight, n, squares, eps)
            rotate(row, cos, n, turned, interleaved)
            write(row, k_cache + cell + head * head_stride * size, n, spoilt)

    return qk_norm_rope_store


_KERNEL = Kernel(_make)


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    cache: KVCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """`qk_norm_rope_store` of kernels/rotary.py; an FP8 cache is the reference's."""
    if cache.k_scale is not None:
        return qk_norm_rope_store_reference(q, k, v, rotation, cache, slot_mapping)
    positions, cos_sin, q_weight, k_weight, eps = rotation[:5]
    tokens, q_heads, head_dim = q.shape
    v = rotation.normed(v)
    assert q.stride(2) == 1 and k.stride(2) == 1 and v.stride(2) == 1 and cos_sin.is_contiguous()
    assert cache.k.stride(3) == 1 and cache.k.stride() == cache.v.stride()
    if cache.k.dtype != q.dtype:
        raise ValueError(f"keys of {q.dtype} need a KV cache of this dtype here, not {cache.k.dtype}")
    long_positions, long_slots = (int(each.dtype == torch.int64) for each in (positions, slot_mapping))
    out = empty(q.shape, q.dtype)
    scratch_bytes = -(-head_dim // 16) * 64
    memory = scratch(scratch_bytes)
    q_dtype, k_dtype = ("" if weight is None else DTYPES[weight.dtype] for weight in (q_weight, k_weight))
    _KERNEL.launch(
        (DTYPES[q.dtype], q_dtype, k_dtype),
        tokens,
        *(q, k, v, positions, cos_sin, slot_mapping, q_weight, k_weight, out, cache.k, cache.v, memory),
        *(scratch_bytes, q_heads, k.shape[1], head_dim, (rotation.rotary or head_dim) // 2),
        *(int(rotation.interleaved), long_positions, long_slots, *q.stride()[:2], *k.stride()[:2]),
        *(*v.stride()[:2], cache.k.shape[1], *cache.k.stride()[:3], eps),
    )
    return out
