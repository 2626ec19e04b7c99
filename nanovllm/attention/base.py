"""What every attention backend is given and must do. Owns no kernel and no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.device import Device
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.decode_attention import SharedPrefixes


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """How one step's flat tokens map to sequences and to cache slots. All tensors are int32 on the model's
    device.

    S sequences, T new tokens, W blocks per table. A row with context length 0 is padding: it attends to
    nothing.
    """

    cu_seqlens_q: torch.Tensor  # [S + 1] prefix sum of new tokens per sequence
    cu_seqlens_k: torch.Tensor  # [S + 1] prefix sum of context lengths
    max_seqlen_q: int
    max_seqlen_k: int
    slot_mapping: torch.Tensor  # [T] block * block_size + offset of each new token; -1 stores nothing
    context_lens: torch.Tensor  # [S] cached + new tokens
    block_tables: torch.Tensor  # [S, W] padded with -1
    is_decode: bool  # every sequence brings exactly one new token
    wanted_rows: torch.Tensor | None = None  # [n] of the T rows those that logits are made from; None: all
    shared: SharedPrefixes | None = None  # what sequences of a decode step have in common, to be read once
    halves: tuple[AttentionMetadata, AttentionMetadata] | None = (
        None  # the same tokens in two parts, in order
    )


class AttentionBackend(ABC):
    """Attends over the paged cache, in which this step's keys and values are stored already.

    Cells that no live token owns may hold NaN. With `deterministic` a row gets the same bits beside any other
    rows.
    """

    name: ClassVar[str]
    block_size_multiple: ClassVar[int]
    default_block_size: ClassVar[int]
    supports_cuda_graph: ClassVar[bool] = True  # a decode step launches kernels and nothing else
    supports_shared_prefixes: ClassVar[bool] = False  # others read what is shared for each sequence

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @classmethod
    @abstractmethod
    def unavailable(
        cls, device: Device, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
    ) -> str | None:
        """Return the reason why this backend cannot run here, or None when it can."""

    @abstractmethod
    def forward(self, q: torch.Tensor, cache: KVCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        """Return the causal attention of q [T, num_heads, head_dim], new, of the same shape.

        Scores are multiplied by `scale`. The keys and values of the step's own tokens are in the cache.
        """
