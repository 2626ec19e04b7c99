"""PeerMemory: memory that the GPUs of a group read and write for each other, and the sums through it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore, _register_process_group, _SymmetricMemory

from nanovllm.device import Device
from nanovllm.distributed.copied_rows import PeerCopies
from nanovllm.distributed.exchanged_rows import LARGEST_ID, ExchangedRows
from nanovllm.distributed.rendezvous import CONNECT_TIMEOUT, Rendezvous
from nanovllm.kernels.all_reduce import EMPTY, TURNS, Peers, all_reduce_add_rms_norm_triton, all_reduce_triton

logger = logging.getLogger("nanovllm")

TWO_SHOT_ROWS = 48  # rows from which a sum over more than two GPUs goes in two shots


@dataclass(frozen=True, slots=True)
class PeerRooms:
    """What peer memory is to have room for; rows are of `dtype`."""

    dtype: torch.dtype
    max_rows: int  # of a sum in one kernel
    n: int  # elements of its rows
    copied_rows: int = 0  # of a sum that copy engines bring
    logit_rows: int = 0  # that all ranks together draw from
    vocab_size: int = 0

    def numels(self, size: int) -> tuple[int, int, int]:
        """Elements of a rank's buffer: for sums in one kernel, for logits, for sums by copies."""
        itemsize = self.dtype.itemsize
        sums = PeerMemory.numel(self.max_rows, self.n, size, itemsize)
        logits = ExchangedRows.numel(self.logit_rows, self.vocab_size, size)
        copies = PeerCopies.numel(self.copied_rows, self.n, size, itemsize) if self.copied_rows else 0
        return sums, logits, copies


class PeerMemory:
    """Memory that every GPU of the group writes to directly, for sums of few rows in one kernel.

    Allocated by torch's symmetric memory, which exchanges the addresses. Holds what `Peers` describes.
    """

    def __init__(
        self, rank: int, size: int, device: Device, buffer: torch.Tensor, handle: Any, max_rows: int, n: int
    ) -> None:
        """buffer: this rank's, of `numel(...)` elements of the rows' dtype; handle: torch's, of all."""
        self.copies: PeerCopies | None = None  # of sums of many rows, at the buffer's end
        self.logits: ExchangedRows | None = None
        self.group_name = ""  # torch's own operations on the buffer would need it
        self._store: Store | None = None
        self._buffer = buffer
        self._handle = handle  # keeps the other ranks' memory mapped
        self._device = device
        self._beside = device.side_stream()
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
        """How many elements of `itemsize` bytes a buffer must have, those of copied rows apart."""
        rooms = size - 1 + (size > 2)  # two ranks never need two shots
        return TURNS * rooms * max_rows * PeerMemory._row_bytes(n, itemsize) // itemsize

    @classmethod
    def make(
        cls, rank: int, size: int, rendezvous: Rendezvous, rooms: PeerRooms, device: Device
    ) -> PeerMemory | None:
        """Allocate and exchange the buffers; None if that cannot be. No rank may sum before all came here."""
        try:
            # torch keeps the name and the store for the life of the process, so the name must be new, and
            # the store not the one that holds the port open. Some versions look the name up elsewhere too.
            if rank == 0:
                rendezvous.store.set("peer memory", f"nanovllm-{uuid4().hex}")
            name: Any = rendezvous.store.get("peer memory").decode()
            store = _FreshStore(Rendezvous(rendezvous.port).store)
            named_group = dist.ProcessGroup(store, rank, size)
            named_group._set_group_name(name)
            _register_process_group(name, named_group)
            _SymmetricMemory.set_group_info(name, rank, size, store)
            sums, logits, copies = rooms.numels(size)
            shape = (sums + logits + copies,)
            buffer = _SymmetricMemory.empty_strided_p2p(shape, (1,), rooms.dtype, device.torch, name)
            handle = _SymmetricMemory.rendezvous(buffer, name)
            made = cls(rank, size, device, buffer, handle, rooms.max_rows, rooms.n)
            if logits and rooms.vocab_size <= LARGEST_ID:
                starts = made.peers.slots + sums * rooms.dtype.itemsize
                own = buffer[sums : sums + logits]
                made.logits = ExchangedRows(
                    rank, starts, own, rooms.logit_rows, rooms.vocab_size, made.all_reduce
                )
            if copies:
                made.copies = PeerCopies(
                    rank, device, buffer, handle, made.peers.aborted, rooms.copied_rows, rooms.n
                )
            made.group_name = name
            made._store = store
            return made
        except RuntimeError as error:
            logger.info("GPUs cannot read each other's memory (%s); all-reduce goes through NCCL", error)
            return None

    def fits(self, rows: int, n: int, dtype: torch.dtype) -> bool:
        """Whether there is room for rows [rows, n], of the size that was planned for or shorter ones."""
        return rows <= len(self.peers.turns) and n * dtype.itemsize <= self.peers.row_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` [T, n] over the ranks, new."""
        return all_reduce_triton(self.peers, x, self._two_shot(x))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `add_rms_norm` gives for the sum of `x` [T, n] over the ranks, both new."""
        return all_reduce_add_rms_norm_triton(self.peers, x, residual, weight, eps, self._two_shot(x))

    def release_waiters(self) -> None:
        """Let kernels that wait for dead ranks go on.

        By a copy, not by a kernel: loading one for the first time can wait for the kernels that wait.
        """
        self._device.run_beside(self._beside, lambda: self.peers.aborted.copy_(self._one, non_blocking=True))

    def _two_shot(self, x: torch.Tensor) -> bool:
        """With two ranks one shot moves no more; few rows, or short ones, save less than the second wait."""
        long = x.shape[1] * x.element_size() > self.peers.row_bytes // 2
        return long and self.peers.size > 2 and x.shape[0] >= TWO_SHOT_ROWS


class _FreshStore(Store):
    """A store in which the exchanges of a group are numbered from 0.

    torch numbers a process's exchanges through symmetric memory one after the other, over all groups, and
    puts the number into the keys. Rank 0 may have had groups before, of which a new worker knows nothing.
    """

    def __init__(self, store: TCPStore) -> None:
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

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        self._store.wait([self._renumbered(key) for key in keys], CONNECT_TIMEOUT)
