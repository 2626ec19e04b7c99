"""What a layer's attention computes, the interface of the backends that do, and their metadata.

Owns no kernel and no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Generic, Literal

import numpy as np
import torch

from nanovllm.attention.rotary import RopeConfig
from nanovllm.batch import NO_SLOT, PADDING, A, Column
from nanovllm.device import Device
from nanovllm.kernels.decode_attention import SharedUnit
from nanovllm.kernels.kinds import Kinds
from nanovllm.kernels.paged import KVCache


def cache_dtype(option: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache by the option `kv_cache_dtype`, in a model of `dtype`."""
    return Kinds("kv_cache_dtype", {"auto": dtype, "fp8": torch.float8_e4m3fn})[option]


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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        for name in ("window", "softcap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    def of_rank(self, ranks: int) -> AttentionSpec:
        """The same for one of `ranks` ranks, which split the heads."""
        heads, kv_heads = self.num_heads // ranks, max(1, self.num_kv_heads // ranks)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)


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
class CellCopies(Generic[A]):
    """Cached keys and values that each layer copies before it attends, as in `Batch.copies`."""

    cells: Annotated[A, Column(np.int32, lambda n: (n.copies, 4))]
    longest: int  # the most cells of a copy


@dataclass(frozen=True, eq=False)
class GroupColumns(Generic[A]):
    """What the layers of a further `KVGroup` have of their own in `AttentionColumns`."""

    slot_mapping: Annotated[A, Column(np.int32, lambda n: (n.tokens,), NO_SLOT)]
    block_tables: Annotated[A, Column(np.int32, lambda n: (n.seqs, n.blocks), PADDING)]
    copies: CellCopies[A] | None = None


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
    prefill: PrefillRanges[A] | None = None  # None: decode, one new token for each sequence
    shared: SharedPrefixes[A] | None = None  # only in decode
    copies: CellCopies[A] | None = None  # only in prefill; None: no prompt parts from another within a block
    others: tuple[GroupColumns[A], ...] = ()  # of the groups after the first

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
            self.prefill,
            copies=own.copies,
        )


@dataclass(frozen=True, eq=False)
class StepColumns(AttentionColumns[A]):
    """The attention columns of a whole step, plus the columns that the model needs."""

    # The tokens whose hidden states are needed, ascending; None: all.
    wanted_rows: Annotated[A, Column(np.int32, lambda n: (n.tokens,))] | None = None
    halves: tuple[AttentionColumns[A], AttentionColumns[A]] | None = None  # the same tokens in two parts


FEATURES = ("window", "softcap", "sinks", "kv_from")  # fields of AttentionSpec that a backend may not support
AttentionMetadata = AttentionColumns[torch.Tensor]
StepMetadata = StepColumns[torch.Tensor]


class AttentionBackend(ABC):
    """Attends over the paged cache, which already holds this step's keys and values.

    Cells without a live token may hold NaN. With `deterministic` the bits of a row do not depend on other
    rows. What a backend can do stands in its class: these constants, and `unavailable`.
    """

    name: ClassVar[str]
    block_size_multiple: ClassVar[int]
    default_block_size: ClassVar[int]
    supports_cuda_graph: ClassVar[bool] = True  # a decode step only launches kernels
    head_dims: ClassVar[range] = range(8, 257, 8)
    features: ClassVar[frozenset[str]] = frozenset()  # the fields among FEATURES that it computes
    heads_first: ClassVar[bool] = False  # a block's memory is [KV heads, block_size, head_dim]
    window_tile: ClassVar[int] = 1  # reading begins at a multiple of this, at or before a window's start

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @classmethod
    @abstractmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
        """Return the reason why this backend cannot run here, or None if it can."""

    @classmethod
    def unsupported(cls, specs: Sequence[AttentionSpec]) -> str | None:
        """Return what this backend cannot compute, with the layer; None if it can compute all layers."""
        for layer, spec in enumerate(specs):
            for name in FEATURES:
                value = getattr(spec, name)
                if value is not None and value is not False and name not in cls.features:
                    return f"layer {layer} has {name}={value}, which it does not support"
            if spec.head_dim not in cls.head_dims:
                most, step = cls.head_dims[-1], cls.head_dims.step
                return (
                    f"it supports head_dim up to {most} in steps of {step}, and head_dim is {spec.head_dim} "
                    f"in layer {layer}"
                )
        return None

    def shared_unit(
        self, spec: AttentionSpec, cache_dtype: torch.dtype, device: torch.device
    ) -> SharedUnit | None:
        """How to group sequences with shared prefixes; None: not supported."""
        return None

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the causal attention of q [T, num_heads, head_dim] as a new tensor of the same shape.

        The cache already holds the keys and values of the step's tokens. sinks: [num_heads] of q's dtype, if
        the spec has them.
        """

    def replace(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """As `forward` in a prefill step, but the result overwrites q, which is contiguous."""
        q.copy_(self.forward(q, cache, meta, spec, sinks))
