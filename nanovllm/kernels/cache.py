"""KVCache: the tensors of one layer's paged cache, an argument of all kernels that read or write it.

The owner of the memory creates it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KVCache(NamedTuple):
    """Keys and values of one layer, in blocks.

    k, v: contiguous [num_blocks, block_size, kv_heads, head_dim] of the model's dtype, or of float8_e4m3fn.
    k_scale, v_scale: of an FP8 cache, [kv_heads] float32. A store divides by the head's scale, a load
    multiplies by it.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
