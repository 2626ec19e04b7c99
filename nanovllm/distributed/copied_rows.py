"""Sums over GPUs of many rows, which copy engines transfer while kernels compute.

Each rank sums, adds and normalises a part of the rows, and sends the result to all. Owns the receive buffers
at the end of the memory that `PeerMemory` allocates and exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.device import Device
from nanovllm.kernels.copied_sum import CALLS, Arrival, await_copies_triton, copied_sum_add_rms_norm_triton
from nanovllm.kernels.rms_norm import rms_norm

_FLAGS = (2, 8)  # int32 at the very end of the buffer: [parts or results, rank], at most 8 ranks


@dataclass(frozen=True, slots=True, eq=False)
class PendingSum:
    """`add_rms_norm` of a sum over the ranks, in progress while other kernels run."""

    finish: Callable[[], tuple[torch.Tensor, torch.Tensor]]  # waits for the result
    advance: Callable[[], None] = lambda: None  # first half: sums received parts and sends the results


class PeerCopies:
    """Two alternating sets of buffers, and flags, at the end of the memory that every rank can write to.

    Reduce-scatter and all-gather with the norm in between, as in Megatron-LM's sequence parallelism
    (Korthikanti et al., 2022). Each rank receives the parts of its rows, keeps their sums, and sends the
    results to all. From the first sum to a `whole` one, no rank has the whole residual stream.

    At most two sums are in progress, each with its own buffers. Sum n + 2 can reuse the buffers of sum n: a
    rank sends its parts after it has the results of sum n, for which the others had read their parts. It
    sends its results after it has the others' parts, which they sent after using the results of sum n.
    """

    SETS = 2

    def __init__(
        self,
        rank: int,
        device: Device,
        buffer: torch.Tensor,
        handle: Any,
        aborted: torch.Tensor,
        max_rows: int,
        n: int,
    ) -> None:
        """buffer: this rank's. handle: torch's handle of all ranks' buffers. aborted: as in `Peers`. Rows are
        [max_rows, n].

        No rank may start a sum before all ranks have created theirs.
        """
        self._rank = rank
        self._max_rows = max_rows
        self._n = n
        self._aborted = aborted
        self._device = device
        self._stream = device.side_stream()
        self._numbers = torch.arange(CALLS, dtype=torch.int32, device=device.torch)
        self._call = 0
        size, itemsize = len(handle.buffer_ptrs), buffer.element_size()
        start = buffer.numel() - self.numel(max_rows, n, size, itemsize)

        def of_all(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> list[torch.Tensor]:
            return [handle.get_buffer(peer, shape, dtype, start) for peer in range(size)]

        parts, results = self._shapes(max_rows, n, size)
        self._parts = of_all(parts, buffer.dtype, start)
        self._results = of_all(results, buffer.dtype, start + math.prod(parts))
        self._flags = of_all(_FLAGS, torch.int32, buffer.numel() * itemsize // 4 - math.prod(_FLAGS))
        self._flags[rank].fill_(CALLS - 1)

    @classmethod
    def _shapes(cls, max_rows: int, n: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (cls.SETS, size - 1, -(-max_rows // size), n), (cls.SETS, max_rows, n)

    @classmethod
    def numel(cls, max_rows: int, n: int, size: int, itemsize: int) -> int:
        """The number of elements of `itemsize` bytes that this takes of the buffer."""
        rows = sum(math.prod(shape) for shape in cls._shapes(max_rows, n, size))
        return rows + math.prod(_FLAGS) * 4 // itemsize

    def fits(self, x: torch.Tensor) -> bool:
        """Whether there is room for rows `x` [T, n]."""
        return x.shape[0] <= self._max_rows and x.shape[1] == self._n and x.dtype == self._parts[0].dtype

    def start(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, whole: bool
    ) -> PendingSum:
        """As `TPGroup.start_sum`."""
        rank, size, rows = self._rank, len(self._parts), len(x)
        turn, call = self._call % self.SETS, self._call % CALLS
        self._call += 1

        def part(peer: int) -> slice:
            """The rows that `peer` sums."""
            return slice(rows * peer // size, rows * (peer + 1) // size)

        flags = self._flags[rank][:, :size]
        arrivals = [Arrival(rank, flags[shot], self._aborted, call) for shot in range(2)]
        results = self._results[rank][turn, :rows]
        own = results[part(rank)]
        mine = residual if len(residual) < rows else residual[part(rank)]
        other = torch.empty_like(own)
        normed, total = (other, own) if whole else (own, other)
        self._send(0, call, lambda peer: (self._parts[peer][turn, (rank - peer - 1) % size], x[part(peer)]))
        advanced = False

        def advance() -> None:
            nonlocal advanced
            if not advanced:
                slots = self._parts[rank][turn]
                inputs = (x[part(rank)], mine, weight, eps, slots, arrivals[0])
                copied_sum_add_rms_norm_triton(*inputs, normed, total)
                self._send(1, call, lambda peer: (self._results[peer][turn, part(rank)], own))
            advanced = True

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            advance()
            # A rank sends results after it received its part of x. So after this, x may be overwritten.
            await_copies_triton(arrivals[1])
            return (rms_norm(results, weight, eps), results) if whole else (results, total)

        return PendingSum(finish, advance)

    def _send(self, shot: int, call: int, route: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start copying rows to each peer, then its flag. route: peer -> (destination, rows)."""
        rank, size = self._rank, len(self._parts)

        def copy() -> None:
            for step in range(1, size):
                peer = (rank + step) % size
                place, rows = route(peer)
                place[: len(rows)].copy_(rows, non_blocking=True)
                flag = self._flags[peer][shot, rank : rank + 1]
                flag.copy_(self._numbers[call : call + 1], non_blocking=True)

        self._device.start_on_stream(self._stream, copy)
