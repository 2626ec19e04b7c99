"""SharedTensors: tensors that go to other processes through shared memory, not through their channel or pipe:
from rank 0 to the workers, and from the caller to replicas. `load_tensors` has all ranks load them.

Owns that memory, an anonymous file that ends with its processes. Checks no tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from nanovllm.lifecycle import held_interrupts
from nanovllm.residency.runner import ResidentModelRunner
from nanovllm.runner.ranks import OneRank

ALIGNMENT = 64  # bytes
BUFFER_BYTES = 2**27  # of tensors sent to workers at once; a larger tensor is sent alone


class _TensorPlace(NamedTuple):
    """The location of a tensor in the memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # in bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in `memory` [bytes] uint8."""
        return memory[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SharedTensors:
    """An argument of a call: yields (name, tensor) anywhere, until the sender overwrites the memory."""

    path: str
    num_bytes: int
    places: tuple[_TensorPlace, ...]

    @property
    def names(self) -> set[str]:
        return {place.name for place in self.places}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        memory = _mapped(self.path, self.num_bytes)
        for place in self.places:
            yield place.name, place.view(memory)


class SharedMemoryBuffer:
    """The sender's end: stores tensors until it is full, and grows for larger tensors. Linux only."""

    def __init__(self, num_bytes: int, grows: bool = False) -> None:
        """grows: grow for every tensor, so that the buffer is never full."""
        self._grows = grows
        self._file = os.memfd_create("nanovllm tensors")  # not in /dev/shm, which may be small
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._places: list[_TensorPlace] = []
        self._end = 0
        self._reserve(num_bytes)

    def _reserve(self, num_bytes: int) -> None:
        os.posix_fallocate(self._file, 0, num_bytes)  # OSError if there is too little memory
        self._num_bytes = num_bytes
        self._memory = _mapped(self._path, num_bytes)

    def put(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy a tensor from any device. False, without a copy, if the buffer must be emptied first."""
        place = _TensorPlace(name, tensor.dtype, tuple(tensor.shape), self._end)
        end = place.offset + place.num_bytes
        if end > self._num_bytes:
            if self._places and not self._grows:
                return False
            self._reserve(end)
        place.view(self._memory).copy_(tensor)
        self._places.append(place)
        self._end = end + -end % ALIGNMENT
        return True

    def take(self) -> SharedTensors:
        """Return all tensors and empty the buffer; the next `put` reuses its memory."""
        places, self._places, self._end = self._places, [], 0
        return SharedTensors(self._path, self._num_bytes, tuple(places))

    def close(self) -> None:
        os.close(self._file)


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def load_tensors(ranks: OneRank, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load tensors on all ranks: one by one on one rank, a buffer at a time on several."""
    if ranks.size == 1:
        for pair in tensors:
            with held_interrupts():
                error = ranks.runner.load_tensors([pair])
                ranks.progress()
            raise_first([error])
        return
    with closing(SharedMemoryBuffer(BUFFER_BYTES)) as buffer:
        try:
            for name, tensor in tensors:
                if not buffer.put(name, tensor):
                    _flush(ranks, buffer)
                    buffer.put(name, tensor)
        finally:
            _flush(ranks, buffer)


def _flush(ranks: OneRank, buffer: SharedMemoryBuffer) -> None:
    with held_interrupts():
        errors = ranks.call(ResidentModelRunner.load_tensors, buffer.take())
    raise_first(errors)


def raise_first(errors: Iterable[Exception | None]) -> None:
    """Raise the first error of some ranks' results, if there is one."""
    for error in errors:
        if error is not None:
            raise error
