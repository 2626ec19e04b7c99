"""Which rows belong to which sequence, where its state lies, and its chunks on a fixed grid of positions.

All is on the device and made without waiting for it: the host knows only how many chunks there can be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from nanovllm.batch import PADDING

CHUNK = 64  # positions of a chunk, and of the grid


class Packed(NamedTuple):
    """S sequences whose new tokens lie one after the other in T rows, and their chunks; see `pack`.

    All are int32. A chunk is what a sequence has of new tokens between two multiples of CHUNK *positions*. A
    sequence that is cut at such multiples thus has the same chunks, and so the same bits, as in one piece.
    """

    starts: torch.Tensor  # [S + 1] the first row of each sequence, and the end of the last one
    positions: torch.Tensor  # [S] tokens of each sequence before its first row
    rows: torch.Tensor  # [S] where its state is written in the pool; PADDING: nowhere
    sources: torch.Tensor  # [S] where its state is read, unless its position is 0; PADDING: a state of zeros
    chunk_starts: torch.Tensor  # [S + 1] the first chunk of each sequence, and the number of all chunks
    chunk_seqs: torch.Tensor  # [N] the sequence of each chunk; N is the most chunks there can be
    chunk_tokens: torch.Tensor  # [N] the first row of each chunk
    chunk_counts: torch.Tensor  # [N] its rows, at most CHUNK; 0: there is no such chunk


class Saves(NamedTuple):
    """Where a state is kept besides the end of its sequence; int32 on the device. See `Saves.of`."""

    starts: torch.Tensor  # [S + 1] the first of each sequence's entries
    positions: torch.Tensor  # [M] tokens of the sequence before the state, ascending within a sequence
    rows: torch.Tensor  # [M] where it is written in the pool; PADDING: nowhere

    @classmethod
    def of(cls, wanted: Iterable[tuple[int, int, int]], sequences: int, device: torch.device | str) -> Saves:
        """wanted: (sequence, position, row): the state of this sequence (a number below `sequences`) after
        its first `position` tokens goes to this row of the pool. The position must lie from the sequence's
        first new token to its last one; the kernels write nothing for one outside.

        ValueError if there is no such sequence.
        """
        entries = sorted(wanted)
        starts = [0] * (sequences + 1)
        for sequence, position, row in entries:
            if not 0 <= sequence < sequences or position < 0:
                raise ValueError(
                    f"a state of sequence {sequence} at position {position} cannot go to row {row}: there "
                    f"are sequences 0 to {sequences - 1}, and positions from 0 on"
                )
            starts[sequence + 1] += 1
        for index in range(sequences):
            starts[index + 1] += starts[index]
        columns = (starts, [each[1] for each in entries], [each[2] for each in entries])
        return cls(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))


def most_chunks(num_tokens: int, sequences: int) -> int:
    """The most chunks that `num_tokens` rows of `sequences` sequences can have: a sequence has a part of one
    at either end."""
    return min(num_tokens, num_tokens // CHUNK + 2 * sequences)


def pack(
    starts: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: int,
    sources: torch.Tensor | None = None,
) -> Packed:
    """The chunks of sequences; once for all layers of a step.

    starts: [S + 1], from 0 to at most num_tokens; a sequence may have no row. positions, rows and sources, by
    default the rows: [S], as in `Packed`. A row that is written is no other sequence's source.
    """
    starts, positions, rows = starts.int(), positions.int(), rows.int()
    sequences = len(rows)
    offsets, lengths = positions % CHUNK, starts.diff()
    numbers = torch.where(lengths > 0, (offsets + lengths + CHUNK - 1) // CHUNK, 0)
    chunk_starts = torch.zeros_like(starts)
    chunk_starts[1:] = numbers.cumsum(0)
    index = torch.arange(most_chunks(num_tokens, sequences), dtype=torch.int32, device=starts.device)
    seqs = torch.searchsorted(chunk_starts[1:], index, right=True).clamp_(max=max(0, sequences - 1))
    first, last, grid = starts[:-1][seqs], starts[1:][seqs], index - chunk_starts[seqs]
    base = first + grid * CHUNK - offsets[seqs]
    tokens = torch.maximum(base, first)
    counts = (torch.minimum(base + CHUNK, last) - tokens).clamp_(min=0)
    counts = torch.where(index < chunk_starts[-1], counts, 0)
    return Packed(
        starts,
        positions,
        rows,
        rows if sources is None else sources.int(),
        chunk_starts,
        seqs.int(),
        tokens.int(),
        counts.int(),
    )


class Place(NamedTuple):
    """A sequence on the host, for the twins."""

    start: int
    end: int
    position: int
    row: int
    source: int  # PADDING: its state begins with zeros
    saves: list[tuple[int, int]]  # (rows before it from `start` on, pool row), within this step


def places(packed: Packed, saves: Saves | None) -> list[Place]:
    """Each sequence that has rows; waits for the device."""
    starts, found = packed.starts.tolist(), []
    kept = [each.tolist() for each in saves] if saves is not None else [[0] * len(starts), [], []]
    columns = zip(packed.positions.tolist(), packed.rows.tolist(), packed.sources.tolist(), strict=True)
    for index, (position, row, source) in enumerate(columns):
        start, end = starts[index : index + 2]
        mine = slice(kept[0][index], kept[0][index + 1])
        pairs = zip(kept[1][mine], kept[2][mine], strict=True)
        asked = [
            (at - position, to) for at, to in pairs if to != PADDING and 0 <= at - position <= end - start
        ]
        if end > start:
            found.append(Place(start, end, position, row, source if position else PADDING, asked))
    return found
