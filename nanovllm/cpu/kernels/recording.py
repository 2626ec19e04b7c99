"""Recording: the launches of a step, recorded once and run again in one call, without the interpreter: what a
CUDA graph is on a GPU.

Its results have the same addresses in every run. Memory of tensors that died while it was recorded is used
again within it, and by nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from nanovllm.cpu.kernels.checking import CHECKED
from nanovllm.cpu.kernels.launch import Launch, profiled, recorder, run_now
from nanovllm.cpu.kernels.team import LAUNCH, LINE, SYNC_BYTES, Team, aligned, team


class Arena:
    """Memory for results of recorded kernels; recordings that never run at once can share it."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

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
        own = block[:]  # a new object, which dies with the tensor's storage
        weakref.finalize(own, self._free.append, block).atexit = False
        return torch.from_numpy(own)[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


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
        self._own: set[int] = set()  # first addresses of its memory in the arena
        self._launches: list[tuple[int, np.ndarray, int]] = []  # function, argument block, programs
        self._keep: list[torch.Tensor] = []
        self._checked: list[Launch] = []  # where addresses are checked
        self._forms: _Forms | None = None
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
        return recording

    def launch(self, launch: Launch) -> None:
        """Run a launch now, and in every replay."""
        block = aligned_bytes(-(-launch.pack.size // LINE) * LINE)
        launch.pack.pack_into(block.data, 0, *launch.values)
        self._launches.append((launch.function, block, launch.programs))
        tensors = [each for each in launch.arguments if isinstance(each, torch.Tensor)]
        self._keep += [each for each in tensors if each.untyped_storage().data_ptr() not in self._own]
        if CHECKED:
            self._checked.append(launch)
        run_now(launch)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = self._arena.empty(shape, dtype)
        self._own.add(tensor.untyped_storage().data_ptr())
        return tensor

    def replay(self) -> Any:
        """Run the launches on the current content of their tensors; return the result of the recording."""
        if CHECKED:
            for each in self._checked:
                run_now(each)
            return self.result
        own = team()
        with profiled("nanovllm.recorded_step"), own.lock:
            forms = self._forms
            if forms is None or forms.team is not own:
                forms = self._forms = _Forms(own, self._launches)
            forms.run()
        return self.result


class _Forms:
    """The launches of a recording as a team reads them. A helper may look at them after the run has ended, so
    the team frees them."""

    def __init__(self, team: Team, launches: list[tuple[int, np.ndarray, int]]) -> None:
        self.team, self._count = team, len(launches)
        array = aligned_bytes(-(-(len(launches) * LAUNCH.size + 1) // LINE) * LINE)
        for index, (function, block, programs) in enumerate(launches):
            LAUNCH.pack_into(array.data, index * LAUNCH.size, function, block.ctypes.data, programs)
        syncs = [aligned_bytes(SYNC_BYTES * max(1, len(launches))) for _ in range(2)]
        self._places = array.ctypes.data, [each.ctypes.data for each in syncs]
        self._last = [0, 0]  # the runs that used `syncs` last
        self._turn = 0
        weakref.finalize(self, _free, team, (array, syncs), self._last).atexit = False

    def run(self) -> None:
        """Run all launches, within the team's lock. Ctrl-C may end it at any line."""
        launches, syncs = self._places
        turn = self._turn = 1 - self._turn
        after, self._last[turn] = self._last[turn], self.team.next_run
        self.team.run(launches, self._count, syncs[turn], after)


def _free(team: Team, memory: object, runs: list[int]) -> None:
    team.free(memory, max(runs))
