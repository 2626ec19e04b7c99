"""Sequence: the mutable state of one completion, private to the engine process. Never pickled, never on a
device. SamplingTable: the sampling parameters of those that run, as columns; they were checked before. Room:
which sequences fit into the KV cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

import numpy as np

from nanovllm.batch import FILTERS, NO_SLOT, SAMPLING_PARAMETERS, Column, SamplingColumns
from nanovllm.kv_group import ONE_GROUP, KVGroup, longest_in
from nanovllm.params import SamplingParams
from nanovllm.plan.prefix_tree import ROOT


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()  # all its steps are planned
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A prompt and the tokens generated from it.

    Computed tokens have K/V in the cache, or a launched step computes it. Known tokens have a value on the
    host. Pending tokens are drawn by a step that was launched but not read yet.
    """

    seq_id: int
    prompt_ids: array[int]  # int32, the request's own: no sequence changes it
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    num_prompt_tokens: int = 0  # of the prompt, those to compute: all, unless the last is only scored
    extras: Any = None  # what it asks for besides tokens, `SequenceExtras` in `extras/planned.py`
    output_ids: array[int] = field(init=False)  # int32
    num_known_tokens: int = field(init=False)  # of prompt and output
    max_tokens_total: int = 0  # of prompt and output; the scheduler sets it
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = NO_SLOT
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # at first admission
    num_preemptions: int = 0
    tables: list[list[int]] = field(default_factory=list)  # the blocks of each `KVGroup`; empty: it owns none
    capacity: int = 0  # tokens that its blocks have room for
    num_hashed_blocks: int = 0  # leading blocks that are registered in the prefix cache
    root: int = ROOT  # the chain id of the empty prefix: sequences with different ones share no K/V
    chain: int | None = field(init=False)  # the chain id of these blocks; None if a collision prevents more
    finish_reason: str | None = None
    stop_reason: int | None = None

    def __post_init__(self) -> None:
        self.num_known_tokens = self.num_prompt_tokens = self.num_prompt_tokens or len(self.prompt_ids)
        self.output_ids = array("i")
        self.chain = self.root

    def append(self, token_id: int) -> None:
        """Add a token of the output, which is known from now on."""
        self.output_ids.append(token_id)
        self.num_known_tokens += 1

    def end_with(self, token_ids: tuple[int, ...]) -> None:
        """Add the last tokens of the output."""
        self.output_ids.extend(token_ids)
        self.num_known_tokens += len(token_ids)
        if token_ids[-1] in self.stop_ids:
            self.stop_reason = token_ids[-1]

    def token_bytes(self, start: int, end: int) -> bytes:
        """The known tokens [start, end) as int32."""
        of_prompt = self.num_prompt_tokens
        if end <= of_prompt:
            return self.prompt_ids[start:end].tobytes()
        own = self.output_ids[max(start - of_prompt, 0) : end - of_prompt]
        return (self.prompt_ids[start:of_prompt] + own).tobytes()

    @property
    def token_ids(self) -> array[int]:
        """A copy of the known tokens, int32."""
        return self.prompt_ids[: self.num_prompt_tokens] + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.output_ids.tolist()


# One row for each slot, so that one lookup finds all columns of a step.
_ROW = np.dtype(
    [("seeds", np.int64), *((name, each.dtype) for name, each in SAMPLING_PARAMETERS.items())], align=True
)
_GREEDY: list[float] = [column.neutral for column in SAMPLING_PARAMETERS.values()]


class SamplingTable:
    """The sampling parameters of every slot, so that each column of a step is a NumPy lookup."""

    def __init__(self, num_slots: int) -> None:
        self._rows = np.zeros(num_slots, _ROW)
        self._last: tuple[SamplingParams | None, list[float]] = None, []  # the next one mostly has the same

    def set(self, seq: Sequence) -> None:
        """Store the parameters of a sequence in its slot."""
        params, values = seq.params, self._last[1]
        if self._last[0] is not params:
            values = _GREEDY
            if params.temperature:
                values = [fitting(each, getattr(params, name)) for name, each in SAMPLING_PARAMETERS.items()]
            self._last = params, values
        self._rows[seq.slot] = (seq.seed, *values)

    def take(self, slots: np.ndarray, positions: np.ndarray) -> SamplingColumns[np.ndarray]:
        """The columns of `slots` [S], which draw the tokens at `positions` [S]."""
        rows = self._rows.take(slots)
        return SamplingColumns(
            rows["temperature"], rows["seeds"], positions, *[rows[name] for name in FILTERS]
        )


def fitting(column: Column, value: float) -> float:
    """A parameter as its column holds it. Integers below the neutral value are other names of it; those above
    int32 act like its largest."""
    return min(max(value, column.neutral), 2**31 - 1) if column.dtype is np.int32 else value


@dataclass(frozen=True)
class Room:
    """Which sequences fit: the size of the KV cache, and the longest sequence."""

    num_blocks: int  # blocks of a lone group, or slabs, which groups share
    block_size: int
    asked: int  # max_model_len before the size of the KV cache lowers it
    longest: int | None = None  # up to which the user can raise max_model_len; None: its current value
    cache_options: str = "num_kvcache_blocks or gpu_memory_utilization"  # to make the cache larger, in errors
    groups: tuple[KVGroup, ...] = ONE_GROUP
    chunk: int = 1  # most new tokens of a step

    @cached_property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together."""
        return longest_in(self.groups, self.asked, self.num_blocks, self.block_size, self.chunk)

    def check_fits(self, length: int, more: int = 1) -> None:
        """Raise ValueError, with the fix, if there is no room for a prompt of `length` tokens and `more`
        drawn ones. -1: the prompt's last token is scored and not computed, so it needs no room."""
        limit, longest = self.max_model_len, self.asked if self.longest is None else self.longest
        if length + more <= limit:
            return
        why, raises = f"max_model_len={limit}", []
        if limit < self.asked:
            why = f"the KV cache has {self.num_blocks} blocks of {self.block_size} tokens"
            raises.append(self.cache_options)
        if length + more > self.asked:
            raises.append(f"max_model_len (up to {longest})")
        can_be_raised = length + more <= longest
        if not can_be_raised:
            why += f", and the model's own limit is {longest}"
        fix = f", or raise {' and '.join(raises)}" if can_be_raised else ""
        raise ValueError(
            f"the prompt has {length} tokens, and at most {limit - more} "
            f"{'leave room for one more' if more > 0 else 'fit'} ({why}); shorten it{fix}"
        )
