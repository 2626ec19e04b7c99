"""PeerMemory: memory that the GPUs of a group can write to directly, and the sums that use it.

ExchangedRows turns logits from some columns of all rows on each rank to whole rows on each rank, so that the
ranks share the work of drawing tokens. PeerCopies are sums of many rows, which copy engines transfer while
kernels compute: each rank sums, adds and normalises a part of the rows, and sends the result to all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _register_process_group, _SymmetricMemory

from nanovllm.batch import NOT_FINITE
from nanovllm.device import Device
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.parallel.kernels.all_reduce import (
    EMPTY,
    TURNS,
    Peers,
    all_reduce_add_rms_norm_triton,
    all_reduce_triton,
    all_to_all_triton,
)
from nanovllm.parallel.kernels.copied_sum import (
    CALLS,
    Arrival,
    await_copies_triton,
    copied_sum_add_rms_norm_triton,
)
from nanovllm.parallel.rendezvous import UNLIMITED, LeavableStore, Rendezvous

logger = logging.getLogger("nanovllm")

_TWO_SHOT_ROWS = 48  # minimum rows for a two-shot sum, over more than two GPUs
_FLAGS = (2, 8)  # int32 at the very end of the buffer: [parts or results, rank], at most 8 ranks


@dataclass(frozen=True, slots=True)
class PeerMemorySizes:
    """The capacity of peer memory; rows have `dtype`."""

    dtype: torch.dtype
    max_rows: int  # of a sum in one kernel
    n: int  # elements of a row
    copied_rows: int = 0  # of a sum with copy engines
    logit_rows: int = 0  # of all ranks together
    vocab_size: int = 0

    def numels(self, size: int) -> tuple[int, int, int]:
        """Elements of a rank's buffer: for sums in one kernel, for logits, for sums with copy engines."""
        itemsize = self.dtype.itemsize
        sums = PeerMemory.numel(self.max_rows, self.n, size, itemsize)
        logits = ExchangedRows.numel(self.logit_rows, self.vocab_size, size)
        copies = PeerCopies.numel(self.copied_rows, self.n, size, itemsize) if self.copied_rows else 0
        return sums, logits, copies


class PeerMemory:
    """Memory that every GPU of the group writes to directly, for sums of few rows in one kernel.

    Allocated by torch's symmetric memory, which exchanges the addresses. `Peers` describes its layout.
    """

    def __init__(
        self, rank: int, size: int, device: Device, buffer: torch.Tensor, handle: Any, max_rows: int, n: int
    ) -> None:
        """buffer: this rank's, `numel(...)` elements. handle: torch's handle of all ranks' buffers."""
        self.copies: PeerCopies | None = None  # for sums of many rows, at the buffer's end
        self.logits: ExchangedRows | None = None
        self.group_name = ""  # for torch's own operations on the buffer
        self._store: Store | None = None
        self._buffer = buffer
        self._handle = handle  # keeps the other ranks' memory mapped
        self._device = device
        self._side_stream = device.side_stream()
        self._one = device.host_buffer(1, torch.int32).fill_(1)
        row_bytes = self._row_bytes(n, buffer.element_size())
        slots = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=buffer.device)
        self.peers = Peers(
            rank,
            size,
            slots,
            slots + TURNS * (size - 1) * max_rows * row_bytes if size > 2 else None,
            turns=torch.zeros(max_rows, dtype=torch.int32, device=buffer.device),
            aborted=torch.zeros(1, dtype=torch.int32, device=buffer.device),
            row_bytes=row_bytes,
        )
        buffer.view(torch.int16).fill_(EMPTY)

    @staticmethod
    def _row_bytes(n: int, itemsize: int) -> int:
        return -(-n * itemsize // 16) * 16

    @staticmethod
    def numel(max_rows: int, n: int, size: int, itemsize: int) -> int:
        """The number of elements of `itemsize` bytes of a buffer, without copied rows."""
        slots = size - 1 + (size > 2)  # two ranks never need two shots
        return TURNS * slots * max_rows * PeerMemory._row_bytes(n, itemsize) // itemsize

    @classmethod
    def make(
        cls, rank: int, size: int, rendezvous: Rendezvous, sizes: PeerMemorySizes, device: Device
    ) -> PeerMemory | None:
        """Allocate and exchange the buffers; None on failure. No rank may sum before all ranks are done."""
        try:
            # torch keeps the name and the store for the life of the process, so the name must be new. Some
            # versions also look up the name in the registered process groups.
            if rank == 0:
                rendezvous.store.set("peer memory", f"nanovllm-{uuid4().hex}")
            name: Any = rendezvous.store.get("peer memory").decode()
            store = _FreshStore(rendezvous.store)
            named_group = dist.ProcessGroup(store, rank, size)
            named_group._set_group_name(name)
            _register_process_group(name, named_group)
            _SymmetricMemory.set_group_info(name, rank, size, store)
            sums, logits, copies = sizes.numels(size)
            shape = (sums + logits + copies,)
            buffer = _SymmetricMemory.empty_strided_p2p(shape, (1,), sizes.dtype, device.torch, name)
            handle = _SymmetricMemory.rendezvous(buffer, name)
            made = cls(rank, size, device, buffer, handle, sizes.max_rows, sizes.n)
            if logits and sizes.vocab_size <= _LARGEST_ID:
                starts = made.peers.slots + sums * sizes.dtype.itemsize
                own = buffer[sums : sums + logits]
                made.logits = ExchangedRows(
                    rank, starts, own, sizes.logit_rows, sizes.vocab_size, made.all_reduce
                )
            if copies:
                made.copies = PeerCopies(
                    rank, device, buffer, handle, made.peers.aborted, sizes.copied_rows, sizes.n
                )
            made.group_name = name
            made._store = store
            return made
        except RuntimeError as error:
            logger.info("GPUs cannot access each other's memory (%s); all-reduce uses NCCL", error)
            return None

    def fits(self, rows: int, n: int, dtype: torch.dtype) -> bool:
        """Whether there is room for rows [rows, n]."""
        return rows <= len(self.peers.turns) and n * dtype.itemsize <= self.peers.row_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` [T, n] over the ranks as a new tensor."""
        return all_reduce_triton(self.peers, x, self._two_shot(x))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `add_rms_norm` of the sum of `x` [T, n] over the ranks, as new tensors."""
        return all_reduce_add_rms_norm_triton(self.peers, x, residual, weight, eps, self._two_shot(x))

    def release_waiters(self) -> None:
        """Release kernels that wait for dead ranks.

        This uses a copy, not a kernel: the first load of a kernel can wait for the waiting kernels.
        """
        self._device.run_on_stream(
            self._side_stream, lambda: self.peers.aborted.copy_(self._one, non_blocking=True)
        )

    def _two_shot(self, x: torch.Tensor) -> bool:
        """Whether to sum `x` in two shots. They do not pay for two ranks, or for few or short rows."""
        long = x.shape[1] * x.element_size() > self.peers.row_bytes // 2
        return long and self.peers.size > 2 and x.shape[0] >= _TWO_SHOT_ROWS


class _FreshStore(Store):
    """A store that numbers the exchanges of a group from 0.

    torch numbers a process's exchanges through symmetric memory over all groups, and puts the number into
    the keys. Rank 0 may have had earlier groups, so its numbers would differ from those of a new worker.
    """

    def __init__(self, store: LeavableStore) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _renumbered(self, key: str) -> str:
        exchange, _, rank = key.rpartition("/")
        return f"{self._numbers.setdefault(exchange, len(self._numbers))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], timeout: timedelta = UNLIMITED) -> None:
        self._store.wait([self._renumbered(key) for key in keys])


_LARGEST_ID = 2**24 - 2  # ids are summed in float32, which is exact for integers up to 2**24


class ExchangedRows:
    """Rank `rank`'s buffer for its share of at most `max_rows` rows [vocab_size], and the others' addresses.

    No rank overwrites a row that is still read: once a rank has the ids of a step, all ranks have read their
    rows.
    """

    def __init__(
        self,
        rank: int,
        buffer_ptrs: torch.Tensor,
        own: torch.Tensor,
        max_rows: int,
        vocab_size: int,
        all_reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """buffer_ptrs: [ranks] int64, the buffers' addresses. own: this rank's, `numel(...)` elements."""
        self._rank, self._size = rank, len(buffer_ptrs)
        self._buffer_ptrs = buffer_ptrs
        self._own = own.view(-1, self._stride(vocab_size))
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._all_reduce = all_reduce
        self._sent = torch.zeros(max_rows, dtype=torch.int32, device=own.device)
        self._nothing = torch.zeros(max_rows, 1, device=own.device)

    @staticmethod
    def _stride(vocab_size: int) -> int:
        """Elements from one row to the next: each starts at a multiple of 16 bytes."""
        return -(-vocab_size // 8) * 8

    @classmethod
    def numel(cls, max_rows: int, vocab_size: int, size: int) -> int:
        """The number of elements of a buffer."""
        return -(-max_rows // size) * cls._stride(vocab_size)

    def fits(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether there is room for `rows` rows."""
        return rows <= self._max_rows and dtype == self._own.dtype

    def whole_rows(self, x: torch.Tensor) -> tuple[slice, torch.Tensor]:
        """Return the range of this rank's rows, and these rows with all columns.

        x: [S, n], this rank's columns of all rows; rank r has the columns from r * n on. The result is valid
        until `join` returns the ids of these rows.
        """
        rows, n = x.shape
        share = -(-rows // self._size)
        first = self._rank * n
        columns = max(0, min(n, self._vocab_size - first))
        all_to_all_triton(x[:, :columns], self._buffer_ptrs, self._sent, self._own.shape[1], first, share)
        self._all_reduce(self._nothing[:rows])  # a barrier: a rank contributes after it sent its columns
        mine = slice(min(self._rank * share, rows), min((self._rank + 1) * share, rows))
        return mine, self._own[: mine.stop - mine.start, : self._vocab_size]

    def join(self, ids: torch.Tensor, mine: slice, rows: int) -> torch.Tensor:
        """Return the ids [rows] int64 of all rows, from each rank's ids of its rows."""
        whole = torch.zeros(rows, 1, device=ids.device)
        whole[mine, 0] = (ids - NOT_FINITE).float()
        return self._all_reduce(whole)[:, 0].long() + NOT_FINITE


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
                copied_sum_add_rms_norm_triton(
                    x[part(rank)], mine, weight, eps, slots, arrivals[0], normed, total
                )
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
