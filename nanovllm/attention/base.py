"""The columns of a step that attention reads, and what it does beyond a causal softmax.

Owns no kernel and no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic

import numpy as np
import torch

from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import NO_SLOT, PADDING, A, Column
from nanovllm.kernels.paged import PLAIN, Variant


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
class GroupColumns(Generic[A]):
    """What the layers of a further `KVGroup` have of their own in `AttentionColumns`."""

    slot_mapping: Annotated[A, Column(np.int32, lambda n: (n.tokens,), NO_SLOT)]
    block_tables: Annotated[A, Column(np.int32, lambda n: (n.seqs, n.blocks), PADDING)]
    copies: Annotated[A, Column(np.int32, lambda n: (n.copies, 4))] | None = None
    longest_copy: int = 0


@dataclass(frozen=True, eq=False)
class AttentionColumns(Generic[A]):
    """The mapping of flat tokens to sequences and cache slots, and the blocks that sequences may read, of the
    layers in the first `KVGroup`.

    A row with context length 0 is padding and attends to nothing.
    """

    slot_mapping: Annotated[A, Column(np.int32, lambda n: (n.tokens,), NO_SLOT)]  # where K/V are stored
    context_lens: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # cached + new tokens
    block_tables: Annotated[A, Column(np.int32, lambda n: (n.seqs, n.blocks), PADDING)]
    max_seqlen_k: int  # an upper bound of the context lengths
    # Only in prefill: prefix sums of the new tokens and of the contexts of S sequences; the most new tokens.
    # None: decode, one new token for each sequence.
    cu_seqlens_q: Annotated[A, Column(np.int32, lambda n: (n.seqs + 1,))] | None = None
    cu_seqlens_k: Annotated[A, Column(np.int32, lambda n: (n.seqs + 1,))] | None = None
    max_seqlen_q: int = 0
    shared: SharedPrefixes[A] | None = None  # only in decode
    # Only in prefill: cached keys and values that each layer copies before it attends, as in `Batch.copies`.
    # None: no prompt parts from another within a block.
    copies: Annotated[A, Column(np.int32, lambda n: (n.copies, 4))] | None = None
    longest_copy: int = 0  # the most cells of a copy
    others: tuple[GroupColumns[A], ...] = ()  # of the groups after the first
    # Only in prefill: where states begin and are kept besides, as `states/columns.py` packs it.
    states: Annotated[A, Column(np.int32, lambda n: (2 * (n.seqs + n.copies) + 1,))] | None = None

    def of_group(self, group: int) -> AttentionColumns[A]:
        """Those for the layers of a group."""
        if group == 0:
            return self
        own = self.others[group - 1]
        return AttentionColumns(
            own.slot_mapping,
            self.context_lens,
            own.block_tables,
            self.max_seqlen_k,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.max_seqlen_q,
            copies=own.copies,
            longest_copy=own.longest_copy,
        )


AttentionMetadata = AttentionColumns[torch.Tensor]


def variant(spec: AttentionSpec, sinks: torch.Tensor | None) -> Variant:
    """What a layer's attention does beyond a causal softmax, for kernels; PLAIN itself if nothing."""
    if spec.window is None and spec.softcap is None and sinks is None:
        return PLAIN
    return Variant(spec.window, spec.softcap, sinks)
