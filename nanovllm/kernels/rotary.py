"""The steps between projection and attention in one kernel: an optional RMSNorm per head (Qwen3), the rotary
position embedding, and the store of keys and values in the paged cache. Owns no table and no cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.batch import NO_SLOT
from nanovllm.kernels.compat import (
    INTERPRETED,
    await_inputs,
    by_device,
    jit,
    next_power_of_2,
    pdl_options,
    tl,
    wide,
)
from nanovllm.kernels.paged import FP8, KVCache
from nanovllm.kernels.rms_norm import rms_norm_reference

_FP8_MAX = 448.0
_KV_TILE = 2  # KV heads per program, with all their query heads: more are slower in decode on an H200 (log)


class Rotation(NamedTuple):
    """The rotation of queries and keys, and the norms of a head.

    Element i of the first half of a head is rotated with element i of the second half (the "neox" layout of
    RoFormer's rotary embedding). With weights, an RMSNorm over each head comes first. rotary: only so many
    first elements are rotated, and the rest of the table has angle 0; 0: all. interleaved: elements 2 i and
    2 i + 1 are rotated together. v_norm: values are divided by the root mean square of their head (Gemma 4).
    """

    positions: torch.Tensor  # [T] int32 or int64
    cos_sin: torch.Tensor  # [max_positions, head_dim] float32: head_dim / 2 cosines, then the sines
    q_weight: torch.Tensor | None = None  # [head_dim] of the queries' dtype
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    rotary: int = 0
    interleaved: bool = False
    v_norm: bool = False

    def options(self) -> dict[str, int | bool]:
        """The arguments of the kernel that are not those of whole heads in halves."""
        options: dict[str, int | bool] = {"ROTARY": self.rotary} if self.rotary else {}
        return options | ({"INTERLEAVED": True} if self.interleaved else {})

    def normed(self, v: torch.Tensor) -> torch.Tensor:
        """v [T, heads, head_dim] with its norm, if it has one, in plain torch."""
        return F.rms_norm(wide(v), v.shape[-1:], None, self.eps).to(v.dtype) if self.v_norm else v


@jit()
def _partner(
    pairs: tl.tensor, HALF: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The two elements of a head in each of its HALF pairs. Pairs past ROTARY // 2 are
    of the other elements."""
    TURNED: tl.constexpr = ROTARY // 2 if ROTARY > 0 else HALF
    first = pairs
    if INTERLEAVED:
        first = 2 * pairs
    second = pairs + TURNED
    if INTERLEAVED:
        second = 2 * pairs + 1
    if TURNED != HALF:
        first = tl.where(pairs < TURNED, first, pairs + TURNED)
        second = tl.where(pairs < TURNED, second, pairs + HALF)
    return first, second


@jit()
def _load_pairs(ptr: tl.tensor, pair: tl.tuple, mask: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The two elements of each pair of the rows at `ptr`, in float32."""
    return (
        tl.load(ptr + pair[0], mask=mask, other=0.0).to(tl.float32),
        tl.load(ptr + pair[1], mask=mask, other=0.0).to(tl.float32),
    )


@jit()
def _rotated(
    halves: tl.tuple, weight: tl.tuple, angle: tl.tuple, eps: tl.tensor, dtype: tl.constexpr, N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Normalise and rotate the two halves of some heads [n, dims] float32; round once. The angle is (cosine,
    sine)."""
    first, second = halves
    cos, sin = angle
    if weight is not None:
        variance = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / N
        scale = tl.rsqrt(variance + eps)[:, None]
        first = first * scale * weight[0]
        second = second * scale * weight[1]
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@jit()
def _quantised(x: tl.tensor, scale: tl.tensor, FP8_MAX: tl.constexpr = _FP8_MAX) -> tl.tensor:
    """x [heads, dims] / scale [heads, 1] in float32, clamped to the range of FP8."""
    x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
    x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)  # NaN stays NaN
    if INTERPRETED:  # its cast rounds wrongly, so round here: to 3 bits of mantissa, 2**-9 at least
        exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        shift = (exponent + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
        x = (x + shift) - shift
    return x


@jit("positions_ptr", "slots_ptr")
def _qk_norm_rope_store_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    q_stride_t: int,
    q_stride_h: int,
    k_stride_t: int,
    k_stride_h: int,
    v_stride_t: int,
    v_stride_h: int,
    eps: float,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_TILE: tl.constexpr,
    Q_TILE_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    V_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
    NO_SLOT: tl.constexpr = NO_SLOT,
    ROTARY: tl.constexpr = 0,
    INTERLEAVED: tl.constexpr = False,
) -> None:
    """One program per (token, KV_TILE KV heads with their query heads), so rows are independent."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_TILE: tl.constexpr = Q_HEADS // KV_HEADS * KV_TILE
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    members = tl.arange(0, Q_TILE_PADDED)[:, None]
    heads = tile * Q_TILE + members
    live = (members < Q_TILE) & (heads < Q_HEADS)
    kv_heads = tile * KV_TILE + tl.arange(0, KV_TILE)[:, None]
    kv_live = kv_heads < KV_HEADS
    halves = tl.arange(0, HALF_PADDED)[None, :]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    v_live = kv_live & (dims < HEAD_DIM)

    # All loads come before the first store, because the compiler cannot move loads across a store. So their
    # latencies overlap.
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    await_inputs(USE_PDL)
    inside = halves < HALF
    pair = _partner(halves, HALF, ROTARY, INTERLEAVED)
    q_row = q_ptr + token * q_stride_t + heads * q_stride_h
    q_first, q_second = _load_pairs(q_row, pair, live & inside)
    k_row = k_ptr + token * k_stride_t + kv_heads * k_stride_h
    k_first, k_second = _load_pairs(k_row, pair, kv_live & inside)
    v_row = v_ptr + token * v_stride_t + kv_heads * v_stride_h
    value = tl.load(v_row + dims, mask=v_live, other=0.0)
    q_weight = None
    k_weight = None
    if q_weight_ptr is not None:
        q_weight = _load_pairs(q_weight_ptr, pair, inside)
    if k_weight_ptr is not None:
        k_weight = _load_pairs(k_weight_ptr, pair, inside)
    angle = _load_pairs(cos_sin_ptr + position * HEAD_DIM, (halves, halves + HALF), inside)

    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    q_first, q_second = _rotated((q_first, q_second), q_weight, angle, eps, dtype, HEAD_DIM)
    k_first, k_second = _rotated((k_first, k_second), k_weight, angle, eps, dtype, HEAD_DIM)
    if V_NORM:
        plain = value.to(tl.float32)
        variance = tl.sum(plain * plain, axis=1) / HEAD_DIM
        value = (plain * tl.rsqrt(variance + eps)[:, None]).to(dtype)
    # A masked token's weight is 0, but 0 * NaN is NaN. A key that is NaN has no effect where it is masked.
    nothing = value.to(tl.float32) * 0.0
    spoilt = tl.sum(nothing, axis=1)[:, None]
    k_first, k_second = (k_first + spoilt).to(dtype), (k_second + spoilt).to(dtype)
    value = tl.where(nothing == 0.0, value, 0.0)
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + kv_heads, mask=kv_live, other=1.0)
        v_scale = tl.load(v_scale_ptr + kv_heads, mask=kv_live, other=1.0)
        k_first = _quantised(k_first, k_scale)
        k_second = _quantised(k_second, k_scale)
        value = _quantised(value, v_scale)

    out_ptrs = q_out_ptr + token * (Q_HEADS * HEAD_DIM) + heads * HEAD_DIM
    tl.store(out_ptrs + pair[0], q_first, mask=live & inside)
    tl.store(out_ptrs + pair[1], q_second, mask=live & inside)
    if slot == NO_SLOT:
        return
    stored: tl.constexpr = k_cache_ptr.dtype.element_ty
    cells = slot * (KV_HEADS * HEAD_DIM) + kv_heads * HEAD_DIM
    tl.store(k_cache_ptr + cells + pair[0], k_first.to(stored), mask=kv_live & inside)
    tl.store(k_cache_ptr + cells + pair[1], k_second.to(stored), mask=kv_live & inside)
    tl.store(v_cache_ptr + cells + dims, value.to(stored), mask=v_live)


def qk_norm_rope_store_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    cache: KVCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k by their tokens' positions, store k and v in the cache, return the new contiguous q.

    q: [T, q_heads, head_dim]. k, v: [T, kv_heads, head_dim]. Only the last dimension must be contiguous.
    slot_mapping: [T] int32, block * block_size + offset; a negative slot stores nothing. For an FP8 cache,
    values are rounded to q's dtype, divided by the head's scale, clamped to +-448 and rounded to nearest
    even. An element of v that is not finite is stored as 0, and the head's key as NaN, so that only tokens
    that attend to it have NaN.
    """
    positions, cos_sin, q_weight, k_weight, eps = rotation[:5]
    k_cache, v_cache, k_scale, v_scale = cache
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return q_out
    assert q.stride(2) == 1 and k.stride(2) == 1 and v.stride(2) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32 and cos_sin.shape[1] == head_dim
    cache.check()
    kv_tile = min(_KV_TILE, next_power_of_2(kv_heads))
    q_tile_padded = next_power_of_2(q_heads // kv_heads * kv_tile)
    half_padded = next_power_of_2(head_dim // 2)
    warps = max(q_tile_padded * half_padded // 512, 1)
    _qk_norm_rope_store_kernel[(tokens, -(-kv_heads // kv_tile))](
        q,
        k,
        v,
        positions,
        cos_sin,
        slot_mapping,
        q_weight,
        k_weight,
        k_scale,
        v_scale,
        q_out,
        k_cache,
        v_cache,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        KV_TILE=kv_tile,
        Q_TILE_PADDED=q_tile_padded,
        HEAD_DIM=head_dim,
        HALF_PADDED=half_padded,
        DIM_PADDED=next_power_of_2(head_dim),
        V_NORM=rotation.v_norm,
        num_warps=min(8, next_power_of_2(warps)),
        **rotation.options(),
        **pdl_options(q),
    )
    return q_out


def _rotate_reference(
    x: torch.Tensor, weight: torch.Tensor | None, cos_sin: torch.Tensor, rotation: Rotation
) -> torch.Tensor:
    """x [T, heads, head_dim], normalised if there is a weight, and rotated; rounded once."""
    whole = wide(x)
    if weight is not None:
        whole = rms_norm_reference(whole, weight, rotation.eps)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    if not rotation.options():
        first, second = whole.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    order = _order(x.shape[-1], rotation.rotary or x.shape[-1], rotation.interleaved)
    first, second = whole[..., order].chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., order] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return out


@lru_cache
def _order(head_dim: int, rotary: int, interleaved: bool) -> list[int]:
    """The first elements of all pairs of a head, then the second ones; first the pairs that are rotated."""
    turned, half = rotary // 2, head_dim // 2
    step = 2 if interleaved else 1
    first = [step * pair for pair in range(turned)] + [turned + pair for pair in range(turned, half)]
    second = [step * pair + (1 if interleaved else turned) for pair in range(turned)]
    return first + second + [half + pair for pair in range(turned, half)]


def quantise_reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] / scale [heads] in FP8, clamped to +-448 and rounded to nearest even."""
    return (x.float() / scale[:, None]).clamp(-_FP8_MAX, _FP8_MAX).to(FP8)


def q_norm_rope_reference(q: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """The queries that `qk_norm_rope_store` returns, in plain torch, where no keys and values are new."""
    angles = rotation.cos_sin.index_select(0, rotation.positions)
    return _rotate_reference(q, rotation.q_weight, angles, rotation)


def qk_norm_rope_store_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    cache: KVCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """`qk_norm_rope_store` in plain torch."""
    cache.check()
    angles = rotation.cos_sin.index_select(0, rotation.positions)
    q = _rotate_reference(q, rotation.q_weight, angles, rotation)
    k, v = _rotate_reference(k, rotation.k_weight, angles, rotation), rotation.normed(v)
    if not v.sum().isfinite():
        nothing = v * 0  # NaN where v is not finite
        k, v = k + nothing.sum(dim=2, keepdim=True), v.masked_fill(nothing != 0, 0)
    stored = slot_mapping != NO_SLOT
    if not stored.all():
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    slots = slot_mapping.long()
    for x, cells, factor in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        if factor is not None:  # as bytes, because torch cannot index 8-bit floats
            x, cells = quantise_reference(x, factor).view(torch.uint8), cells.view(torch.uint8)
        if cells.is_contiguous():
            cells.flatten(0, 1).index_copy_(0, slots, x)
        else:  # heads come first in memory
            cells[slots // cells.shape[1], slots % cells.shape[1]] = x
    return q


qk_norm_rope_store = by_device(
    qk_norm_rope_store_triton, qk_norm_rope_store_reference, "rotary.qk_norm_rope_store"
)
