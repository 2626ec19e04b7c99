"""KVCache: the tensors of one layer's paged cache, as all kernels that read or write it take them.

A kernel unpacks it; whoever owns the memory makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KVCache(NamedTuple):
    """Keys and values of one layer, in blocks.

    k, v: contiguous [num_blocks, block_size, kv_heads, head_dim] of the model's dtype, or of float8_e4m3fn.
    k_scale, v_scale: of an FP8 cache, [kv_heads] float32; values are divided by their head's scale when they
    are stored, and multiplied by it when they are read.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
