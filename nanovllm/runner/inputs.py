"""BatchInputs, all inputs of one step, as NumPy arrays on the host and as tensors on the device.

Computes positions, cache slots and prefix sums from a `Batch`. Staging copies inputs to the device, in one
copy, and outputs to the host; it knows the declared dtype, shape and neutral value of each column, but not
its meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Annotated, Generic

import numpy as np
import torch

from nanovllm.attention.base import AttentionColumns, GroupColumns, SharedPrefixes
from nanovllm.batch import (
    NO_SLOT,
    A,
    Batch,
    Column,
    SamplingColumns,
    StepOutput,
    StepSize,
    all_columns,
    map_columns,
    prefix_sum,
)
from nanovllm.device import Device
from nanovllm.doors import STATES, find


@dataclass(frozen=True, eq=False)
class BatchInputs(Generic[A]):
    """One step of S sequences and T tokens. Token ids and slots are int64, as torch's indexing requires."""

    token_ids: Annotated[A, Column(np.int64, lambda n: (n.tokens,))]  # LAST_SAMPLED: only the device knows it
    token_slots: Annotated[A, Column(np.int64, lambda n: (n.tokens,), NO_SLOT)]  # of each token's sequence
    positions: Annotated[A, Column(np.int32, lambda n: (n.tokens,))]
    sample_slots: Annotated[A, Column(np.int64, lambda n: (n.seqs,), NO_SLOT)]  # where drawn tokens go
    attention: AttentionColumns[A]
    # The tokens whose hidden states are needed, ascending; None: all.
    wanted_rows: Annotated[A, Column(np.int32, lambda n: (n.tokens,))] | None
    halves: tuple[AttentionColumns[A], AttentionColumns[A]] | None  # of `attention`, the same tokens
    sampling: SamplingColumns[A]


Halves = tuple[AttentionColumns[np.ndarray], AttentionColumns[np.ndarray]]  # of a step's tokens
Split = Callable[[Batch, AttentionColumns[np.ndarray]], Halves | None]


def prepare_prefill(batch: Batch, block_size: int, split: Split | None = None) -> BatchInputs[np.ndarray]:
    """The inputs of a prefill step. split: as in `Group`."""
    query_lens, context_lens = batch.query_lens, batch.context_lens
    cu_seqlens_q = prefix_sum(query_lens)
    rows = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)  # [T] the row of each token
    positions = np.arange(len(rows), dtype=np.int32) + (context_lens - query_lens - cu_seqlens_q[:-1])[rows]
    first, *others = _groups(batch, rows, positions, block_size)
    attention = AttentionColumns(
        **vars(first),
        context_lens=context_lens,
        max_seqlen_k=int(context_lens.max()),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=prefix_sum(context_lens),
        max_seqlen_q=int(query_lens.max()),
        states=find(STATES["columns"])(batch) if len(batch.copies) > len(batch.tables) else None,
        others=tuple(others),
    )
    halves = None if split is None else split(batch, attention)
    return _inputs(batch, rows, positions, attention, wanted_rows(batch), halves)


def _groups(
    batch: Batch, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> list[GroupColumns[np.ndarray]]:
    """The columns of each `KVGroup`. rows, positions [T]: each token's row, and its place in its sequence."""
    return [
        GroupColumns(_slot_mapping(table, rows, positions, block_size), table, *cell_copies(copies))
        for table, copies in zip_longest(batch.tables, batch.copies[: len(batch.tables)])
    ]


def cell_copies(cells: np.ndarray | None) -> tuple[np.ndarray | None, int]:
    """cells [C, 4] as in `Batch`, and the most cells of a copy; None and 0 if there are none."""
    return (None, 0) if cells is None or not len(cells) else (cells, int(cells[:, 3].max()))


def prepare_decode(
    batch: Batch,
    block_size: int,
    shared: SharedPrefixes[np.ndarray] | None = None,
    max_seqlen_k: int | None = None,
) -> BatchInputs[np.ndarray]:
    """The inputs of a decode step. max_seqlen_k: an upper bound of context lengths; None: the longest."""
    rows, positions = np.arange(len(batch.slots)), batch.context_lens - np.int32(1)
    first, *others = _groups(batch, rows, positions, block_size)
    attention = AttentionColumns(
        **vars(first),
        context_lens=batch.context_lens,
        max_seqlen_k=int(batch.context_lens.max()) if max_seqlen_k is None else max_seqlen_k,
        shared=shared,
        others=tuple(others),
    )
    return _inputs(batch, rows, positions, attention)


def last_rows(draws: np.ndarray, query_lens: np.ndarray) -> np.ndarray:
    """The indices int32, ascending, of the tokens that precede a drawn one: the last `draws` tokens of each
    sequence; of a sequence that draws none, the last token."""
    counts = np.maximum(draws, 1)
    starts = prefix_sum(query_lens)[1:] - counts
    return np.repeat(starts - prefix_sum(counts)[:-1], counts) + np.arange(counts.sum(), dtype=np.int32)


def wanted_rows(batch: Batch) -> np.ndarray:
    """The indices [W] int32, ascending, of a prefill step's tokens whose hidden states are needed: those of
    `last_rows`, and the tokens of the step's extras."""
    last, more = last_rows(batch.draws, batch.query_lens), batch.extras.places
    return np.unique(np.concatenate([last, *more])) if more else last


def _slot_mapping(tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """The cache slot of each token's K/V: block * block_size + offset."""
    blocks = tables[rows, positions // block_size]
    return blocks * np.int32(block_size) + positions % np.int32(block_size)


def _inputs(
    batch: Batch,
    rows: np.ndarray,
    positions: np.ndarray,
    attention: AttentionColumns[np.ndarray],
    wanted: np.ndarray | None = None,
    halves: Halves | None = None,
) -> BatchInputs[np.ndarray]:
    """rows, positions [T]: the row of each token, and its position in its sequence."""
    return BatchInputs(
        token_ids=batch.token_ids,
        token_slots=batch.slots[rows],
        positions=positions,
        sample_slots=np.where(batch.draws > 0, batch.slots, NO_SLOT),
        attention=attention,
        wanted_rows=wanted,
        halves=halves,
        sampling=batch.sampling,
    )


ALIGN = 16  # bytes; every column starts at a multiple of this
_TORCH_DTYPES: dict[type[np.generic], torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
}


class PendingOutput:
    """The outputs of a launched step, which can be read once the device has computed it."""

    def __init__(self, tensors: StepOutput[torch.Tensor], event: torch.cuda.Event | None) -> None:
        """tensors: on the host, written once `event` has passed; None: they are written."""
        self.tensors, self.event = tensors, event

    def waits_for_host(self) -> bool:
        """Whether a device has computed it, and may idle until the host goes on."""
        return self.event is not None and self.event.query()

    def result(self) -> StepOutput[np.ndarray]:
        """Wait for the step and return a copy of its outputs. Sequences keep them until they end, while later
        steps reuse the pinned memory."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensors.map(lambda column: column.numpy().copy())


class Staging:
    """One input buffer on the device, and two alternating buffers on the host.

    Inputs with the same parts and sizes always have the same addresses, so a CUDA graph can read them. A host
    buffer is written again only after the device has finished its last use.
    """

    def __init__(self, device: Device, size: StepSize, groups: int = 1) -> None:
        """size: of the largest step. The buffer has room for it with all optional parts, for each of so many
        groups of layers."""
        columns = all_columns(BatchInputs)
        words = groups * sum(_end_of(column, 0, column.shape(size)) for column in columns) // 4
        self._device = device
        self._buffer = torch.zeros(words, dtype=torch.int32, device=device.torch)
        self._columns = {dtype: self._buffer.view(other) for dtype, other in _TORCH_DTYPES.items()}
        self._inputs = [device.host_buffer(words, torch.int32) for _ in range(2)]
        self._views = [{each: host.numpy().view(each) for each in _TORCH_DTYPES} for host in self._inputs]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(
        self, inputs: BatchInputs[np.ndarray], size: StepSize | None = None
    ) -> Callable[[], BatchInputs[torch.Tensor]]:
        """Queue one copy of all inputs to the device, padded to `size` if given.

        Return a function that creates the device tensors, which are valid until the next `send`. A CUDA graph
        already has the tensors of its capture and need not call it.
        """
        event, host, views = self._events[self._turn], self._inputs[self._turn], self._views[self._turn]
        if event is not None:
            event.synchronize()
        end = 0

        def put(column: Column, array: np.ndarray) -> None:
            nonlocal end
            shape = array.shape if size is None else column.shape(size)
            first, end = end // views[column.dtype].itemsize, _end_of(column, end, shape)
            cells = views[column.dtype][first : first + prod(shape)].reshape(shape)
            if shape == array.shape:
                cells[...] = array
            else:
                cells[...] = column.neutral
                cells[tuple([slice(length) for length in array.shape])] = array
            places.append((first, shape))

        def tensors() -> BatchInputs[torch.Tensor]:
            rest = iter(places)

            def view(column: Column, _: np.ndarray) -> torch.Tensor:
                start, shape = next(rest)
                return self._columns[column.dtype][start : start + prod(shape)].view(shape)

            return map_columns(inputs, view)

        places: list[tuple[int, tuple[int, ...]]] = []
        map_columns(inputs, put)
        self._buffer[: end // 4].copy_(host[: end // 4], non_blocking=True)
        return tensors

    def receive(self, tensors: StepOutput[torch.Tensor]) -> PendingOutput:
        """Queue the copy of a step's outputs to the host, and switch to the other host buffer."""
        fetched = tensors.map(self._device.fetch)
        event = self._device.record_event()
        self._events[self._turn] = event
        self._turn = 1 - self._turn
        return PendingOutput(fetched, event)


def _end_of(column: Column, start: int, shape: tuple[int, ...]) -> int:
    """The offset of the next column, in bytes."""
    end = start + prod(shape) * _TORCH_DTYPES[column.dtype].itemsize
    return -(-end // ALIGN) * ALIGN
