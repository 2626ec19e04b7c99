"""Recording: the launches of a step, recorded once and run again in one call, without the interpreter: what a
CUDA graph is on a GPU.

Its results have the same addresses in every run. Memory of tensors that died while it was recorded is used
again within it, and by nothing else.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from nanovllm.kernels.cpu.launch import Argument, recorder, run_now
from nanovllm.kernels.cpu.team import LAUNCH, LINE, SYNC_BYTES, aligned, team


class Arena:
    """Memory for results of recorded kernels; recordings that never run at once can share it."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self.ranges: set[int] = set()  # first addresses

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory, taken back when the last tensor over it dies.

        The smallest free block that holds it. A new one has one of few sizes, so that steps of other sizes
        can use it; memory that is never written costs nothing.
        """
        size = _rounded(prod(shape) * dtype.itemsize)
        fitting = [index for index, each in enumerate(self._free) if each.nbytes >= size]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        else:
            block = aligned_bytes(size)
        free = self._free
        self.ranges.add(block.ctypes.data)
        own = block[:]  # a new object, which dies with the tensor's storage
        weakref.finalize(own, free.append, block).atexit = False
        tensor = torch.from_numpy(own)[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)
        return tensor


def _rounded(size: int) -> int:
    """At least `size` and a page: a power of 2, or it times 1.25, 1.5 or 1.75."""
    step = 1 << max(12, (size - 1).bit_length() - 3)
    return -(-max(size, 1) // step) * step


def aligned_bytes(size: int) -> np.ndarray:
    memory, first = aligned(size)
    start = first - memory.ctypes.data
    return memory[start : start + size]


class Recording:
    """The launches of one call of `record`, with their arguments."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._launches: list[tuple[int, np.ndarray, int]] = []  # function, argument block, programs
        self._keep: list[torch.Tensor] = []
        self.result: Any = None

    @classmethod
    def record(cls, step: Callable[[], Any], arena: Arena) -> Recording:
        """Run `step` and record its launches; `result` is what it returned."""
        recording = cls(arena)
        token = recorder.set(recording)
        try:
            recording.result = step()
        finally:
            recorder.reset(token)
        recording._finish()
        return recording

    def launch(
        self,
        name: str,
        function: int,
        programs: int,
        pack: struct.Struct,
        values: tuple[Any, ...],
        arguments: Sequence[Argument],
    ) -> None:
        """Run a launch now, and in every replay."""
        block = aligned_bytes(-(-pack.size // LINE) * LINE)
        pack.pack_into(block, 0, *values)
        self._launches.append((function, block, programs))
        self._keep += [
            each
            for each in arguments
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self._arena.ranges
        ]
        run_now(name, function, programs, pack, values, arguments)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.empty(shape, dtype)

    def _finish(self) -> None:
        self._array = aligned_bytes(max(LINE, -(-len(self._launches) * LAUNCH.size // LINE) * LINE))
        for index, (function, block, programs) in enumerate(self._launches):
            LAUNCH.pack_into(self._array, index * LAUNCH.size, function, block.ctypes.data, programs)
        self._sync = [aligned_bytes(SYNC_BYTES * max(1, len(self._launches))) for _ in range(2)]
        self._last = [0, 0]  # the runs that used them last
        self._turn = 0
        self._places = self._array.ctypes.data, [each.ctypes.data for each in self._sync]

    def replay(self) -> Any:
        """Run the launches on the current content of their tensors; return the result of the recording."""
        launches, syncs = self._places
        turn = self._turn = 1 - self._turn
        self._last[turn] = team().run(launches, len(self._launches), syncs[turn], self._last[turn])
        return self.result
