"""What every attention backend is given and must do. Owns no kernel and no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic

import numpy as np
import torch

from nanovllm.batch import NO_SLOT, PADDING
from nanovllm.columns import A, Column
from nanovllm.device import Device
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.decode_attention import SharedUnit


@dataclass(frozen=True, eq=False)
class PrefillRanges(Generic[A]):
    """Where the new tokens and the contexts of S sequences begin and end, as prefix sums."""

    cu_seqlens_q: Annotated[A, Column(np.int32, lambda n: (n.seqs + 1,))]
    cu_seqlens_k: Annotated[A, Column(np.int32, lambda n: (n.seqs + 1,))]
    max_seqlen_q: int


@dataclass(frozen=True, eq=False)
class SharedPrefixes(Generic[A]):
    """Sequences of a decode step that begin in the same blocks, in units that read them once.

    They change how often shared keys and values are read. What attention returns is the same, with a
    deterministic backend bit for bit.
    """

    members: Annotated[A, Column(np.int32, lambda n: (n.seqs // 2, n.unit), PADDING)]  # rows of the step
    lens: Annotated[A, Column(np.int32, lambda n: (n.seqs // 2,))]  # positions that a unit shares
    skips: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # the same by row; 0 outside all units
    units: Annotated[A, Column(np.int32, lambda n: (1,))]  # how many there are
    chunk: int  # positions, of which each length is a multiple


@dataclass(frozen=True, eq=False)
class AttentionColumns(Generic[A]):
    """How flat tokens map to sequences and to cache slots, and what these sequences may read.

    A row with context length 0 is padding: it attends to nothing.
    """

    slot_mapping: Annotated[A, Column(np.int32, lambda n: (n.tokens,), NO_SLOT)]  # where K/V are stored
    context_lens: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # cached + new tokens
    block_tables: Annotated[A, Column(np.int32, lambda n: (n.seqs, n.blocks), PADDING)]
    max_seqlen_k: int  # the longest context, or more
    prefill: PrefillRanges[A] | None = None  # None: decode, one new token a sequence
    shared: SharedPrefixes[A] | None = None  # of decode


@dataclass(frozen=True, eq=False)
class StepColumns(AttentionColumns[A]):
    """The same of a whole step, with what the model has to know of it."""

    # The tokens whose hidden states are wanted, rising; None: all.
    wanted_rows: Annotated[A, Column(np.int32, lambda n: (n.tokens,))] | None = None
    halves: tuple[AttentionColumns[A], AttentionColumns[A]] | None = None  # the same tokens in two parts


AttentionMetadata = AttentionColumns[torch.Tensor]
StepMetadata = StepColumns[torch.Tensor]


class AttentionBackend(ABC):
    """Attends over the paged cache, in which this step's keys and values are stored already.

    Cells that no live token owns may hold NaN. With `deterministic` a row gets the same bits beside any other
    rows.
    """

    name: ClassVar[str]
    block_size_multiple: ClassVar[int]
    default_block_size: ClassVar[int]
    supports_cuda_graph: ClassVar[bool] = True  # a decode step launches kernels and nothing else

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @classmethod
    @abstractmethod
    def unavailable(
        cls, device: Device, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
    ) -> str | None:
        """Return the reason why this backend cannot run here, or None when it can."""

    def shared_unit(
        self, group: int, head_dim: int, cache_dtype: torch.dtype, device: torch.device
    ) -> SharedUnit | None:
        """How shared prefixes are read, for `group` query heads of each KV head; None: for each sequence."""
        return None

    @abstractmethod
    def forward(self, q: torch.Tensor, cache: KVCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        """Return the causal attention of q [T, num_heads, head_dim], new, of the same shape.

        Scores are multiplied by `scale`. The keys and values of the step's own tokens are in the cache.
        """
