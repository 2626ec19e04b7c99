"""The interface of attention backends and their metadata. Owns no kernel and no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic

import numpy as np
import torch

from nanovllm.batch import NO_SLOT, PADDING, A, Column
from nanovllm.device import Device
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.decode_attention import SharedUnit


@dataclass(frozen=True, eq=False)
class PrefillRanges(Generic[A]):
    """The ranges of the new tokens and the contexts of S sequences, as prefix sums."""

    cu_seqlens_q: Annotated[A, Column(np.int32, lambda n: (n.seqs + 1,))]
    cu_seqlens_k: Annotated[A, Column(np.int32, lambda n: (n.seqs + 1,))]
    max_seqlen_q: int


@dataclass(frozen=True, eq=False)
class SharedPrefixes(Generic[A]):
    """Sequences of a decode step that begin with the same blocks, in units that read these blocks once.

    This changes only how often keys and values are read. The result of attention is the same; with a
    deterministic backend, bit for bit.
    """

    members: Annotated[A, Column(np.int32, lambda n: (n.seqs // 2, n.unit), PADDING)]  # rows of the step
    lens: Annotated[A, Column(np.int32, lambda n: (n.seqs // 2,))]  # positions that a unit shares
    skips: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # the same for each row; 0 outside all units
    units: Annotated[A, Column(np.int32, lambda n: (1,))]  # the number of units
    chunk: int  # positions; each length is a multiple of this


@dataclass(frozen=True, eq=False)
class AttentionColumns(Generic[A]):
    """The mapping of flat tokens to sequences and cache slots, and the blocks that sequences may read.

    A row with context length 0 is padding and attends to nothing.
    """

    slot_mapping: Annotated[A, Column(np.int32, lambda n: (n.tokens,), NO_SLOT)]  # where K/V are stored
    context_lens: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # cached + new tokens
    block_tables: Annotated[A, Column(np.int32, lambda n: (n.seqs, n.blocks), PADDING)]
    max_seqlen_k: int  # an upper bound of the context lengths
    prefill: PrefillRanges[A] | None = None  # None: decode, one new token for each sequence
    shared: SharedPrefixes[A] | None = None  # only in decode


@dataclass(frozen=True, eq=False)
class StepColumns(AttentionColumns[A]):
    """The attention columns of a whole step, plus the columns that the model needs."""

    # The tokens whose hidden states are needed, ascending; None: all.
    wanted_rows: Annotated[A, Column(np.int32, lambda n: (n.tokens,))] | None = None
    halves: tuple[AttentionColumns[A], AttentionColumns[A]] | None = None  # the same tokens in two parts


AttentionMetadata = AttentionColumns[torch.Tensor]
StepMetadata = StepColumns[torch.Tensor]


class AttentionBackend(ABC):
    """Attends over the paged cache, which already holds this step's keys and values.

    Cells without a live token may hold NaN. With `deterministic` the bits of a row do not depend on other
    rows.
    """

    name: ClassVar[str]
    block_size_multiple: ClassVar[int]
    default_block_size: ClassVar[int]
    supports_cuda_graph: ClassVar[bool] = True  # a decode step only launches kernels

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @classmethod
    @abstractmethod
    def unavailable(
        cls, device: Device, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
    ) -> str | None:
        """Return the reason why this backend cannot run here, or None if it can."""

    def shared_unit(
        self, group: int, head_dim: int, cache_dtype: torch.dtype, device: torch.device
    ) -> SharedUnit | None:
        """How to group sequences with shared prefixes, for `group` query heads of each KV head; None: not
        supported."""
        return None

    @abstractmethod
    def forward(self, q: torch.Tensor, cache: KVCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        """Return the causal attention of q [T, num_heads, head_dim] as a new tensor of the same shape.

        Scores are multiplied by `scale`. The cache already holds the keys and values of the step's tokens.
        """
