"""Blocks of a decoder, and the two drivers that run a list of them: a step whole, or in two halves.

A new kind of block needs no change here. Owns no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.layers.layernorm import ResidualStream, RMSNorm


class TokenPlaces(NamedTuple):
    """The positions of the T tokens of a step, or of half a step."""

    positions: torch.Tensor  # [T] within their sequences
    meta: AttentionMetadata


# The specific part of a block: attention, or an MLP. Returns the input of the block's output projection,
# computed from norm(stream), and the stream's sum.
Mixer = Callable[[RMSNorm, ResidualStream, TokenPlaces], tuple[torch.Tensor, torch.Tensor]]


class Output(Protocol):
    """The output projection of a block, such as `RowParallelLinear`."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> ResidualStream: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Adds output(mixer(norm(stream))) to the residual stream.

    Only a mixer that `attends` may use the places: after the last such block, rows may be dropped.
    """

    norm: RMSNorm
    mixer: Mixer
    output: Output
    attends: bool

    def mix(self, stream: ResidualStream, places: TokenPlaces) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the output projection, and the stream's sum."""
        return self.mixer(self.norm, stream, places)

    def __call__(self, stream: ResidualStream, places: TokenPlaces) -> ResidualStream:
        mixed, total = self.mix(stream, places)
        return self.output.add_to(total, mixed)


class Blocks:
    """The blocks of a decoder in order. At least one attends."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        last = max(index for index, block in enumerate(blocks) if block.attends)
        self._first, self._last_attention, self._rest = blocks[:last], blocks[last], blocks[last + 1 :]

    def run(self, x: torch.Tensor, places: TokenPlaces, rows: torch.Tensor | None = None) -> ResidualStream:
        """x [T, hidden_size], this rank's part of the embeddings -> the stream after all blocks.

        With `rows` [n] the result has only these rows: all others are dropped after the last attention.
        """
        stream = ResidualStream(x)
        for block in self._first:
            stream = block(stream, places)
        return self._finish(*self._last_attention.mix(stream, places), places, rows)

    def run_halves(
        self,
        xs: Sequence[torch.Tensor],
        halves: Sequence[TokenPlaces],
        places: TokenPlaces,
        rows: torch.Tensor | None = None,
    ) -> ResidualStream:
        """As `run`, but the ranks sum one half of the tokens while they compute the other half.

        xs, halves: of the two halves. places: of the whole step. This is two-batch overlap, as in
        DeepSeek-V3's prefill and SGLang. In each layer the first half's K/V is stored before the second half
        reads it.
        """
        streams = [ResidualStream(x) for x in xs]
        for block, following in pairwise((*self._first, self._last_attention)):
            for half in range(2):
                mixed, total = block.mix(streams[half], halves[half])
                streams[1 - half].advance()
                whole = following is self._last_attention
                streams[half] = following.norm.start(block.output(mixed), total, whole)
        parts = []
        for half in range(2):
            parts.append(self._last_attention.mix(streams[half], halves[half]))
            streams[1 - half].advance()
        mixed, total = (torch.cat(both) for both in zip(*parts, strict=True))
        return self._finish(mixed, total, places, rows)

    def _finish(
        self, mixed: torch.Tensor, total: torch.Tensor, places: TokenPlaces, rows: torch.Tensor | None
    ) -> ResidualStream:
        """Run the rest, from the last attention's output projection on, for the wanted rows."""
        if rows is not None:
            mixed, total = mixed[rows], total[rows]
        stream = self._last_attention.output.add_to(total, mixed)
        for block in self._rest:
            stream = block(stream, places)
        return stream
