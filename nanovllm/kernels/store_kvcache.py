"""Writes new keys and values into their slots of the paged cache. Owns no cache and never moves a block."""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import jit, tl, triton, use_triton


@jit("slots_ptr")
def _store_kvcache_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    key_stride_t: int,
    key_stride_h: int,
    value_stride_t: int,
    value_stride_h: int,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    """One program per token copies all its heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:  # a padded row
        return
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    mask = (heads < HEADS) & (dims < HEAD_DIM)
    target = slot * (HEADS * HEAD_DIM) + heads * HEAD_DIM + dims
    key = tl.load(key_ptr + token * key_stride_t + heads * key_stride_h + dims, mask=mask)
    value = tl.load(value_ptr + token * value_stride_t + heads * value_stride_h + dims, mask=mask)
    tl.store(k_cache_ptr + target, key, mask=mask)
    tl.store(v_cache_ptr + target, value, mask=mask)


def store_kvcache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`store_kvcache` by Triton."""
    tokens, heads, head_dim = key.shape
    if tokens == 0:
        return
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert key.stride(2) == 1 and value.stride(2) == 1
    _store_kvcache_kernel[(tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEADS_PADDED=triton.next_power_of_2(heads),
        DIM_PADDED=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def store_kvcache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`store_kvcache` in plain torch."""
    stored = slot_mapping >= 0
    if not stored.all():
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    slots = slot_mapping.long()
    k_cache.flatten(0, 1).index_copy_(0, slots, key)
    v_cache.flatten(0, 1).index_copy_(0, slots, value)


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store token t's key and value in cache slot `slot_mapping[t]`, in place.

    key, value: [T, kv_heads, head_dim], any strides but a contiguous last dimension. k_cache, v_cache:
    contiguous [num_blocks, block_size, kv_heads, head_dim] of the same dtype. slot_mapping: [T] int32,
    block * block_size + offset; a negative slot stores nothing.
    """
    store = store_kvcache_triton if use_triton(key) else store_kvcache_reference
    store(key, value, k_cache, v_cache, slot_mapping)
