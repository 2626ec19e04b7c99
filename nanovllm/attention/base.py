"""What a layer's attention computes, and the columns of a step that it reads.

Owns no kernel and no state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, Literal

import numpy as np
import torch

from nanovllm.attention.rotary import RopeConfig
from nanovllm.batch import NO_SLOT, PADDING, A, Column
from nanovllm.kernels.paged import PLAIN, Variant


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention of one layer computes. The defaults are plain causal attention without positions.

    In a `ModelConfig` the heads are those of the model, in a layer those of its rank.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    window: int | None = None  # a token attends to so many tokens, itself included; None: to all before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: bool = False  # a learned score for each head, which takes weight and adds nothing (gpt-oss)
    qk_norm: Literal["head", "all"] | None = None  # RMSNorm over each head (Qwen3), or over all (OLMo 2)
    rope: RopeConfig | None = None  # None: queries and keys are not rotated
    v_from_k: bool = False  # values are the keys' projection, before norm and rope: there is no v_proj
    kv_from: int | None = None  # an earlier layer whose keys and values it reads, with none of its own
    state: Any = None  # of a layer with a state in place of all this, `StateSpec` of `states/spec.py`

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        for name in ("window", "softcap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    def variant(self, sinks: torch.Tensor | None) -> Variant:
        """What it does beyond a causal softmax, for kernels; PLAIN itself if nothing."""
        if self.window is None and self.softcap is None and sinks is None:
            return PLAIN
        return Variant(self.window, self.softcap, sinks)

    def of_rank(self, ranks: int) -> AttentionSpec:
        """The same for one of `ranks` ranks, which split the heads."""
        heads, kv_heads = self.num_heads // ranks, max(1, self.num_kv_heads // ranks)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)


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
