"""RecordedSteps: decode steps on a CPU, recorded at the first step of each number of rows and then replayed:
what `CUDAGraphs` is on a GPU.

A step can be recorded if it computes with kernels alone; this module finds out. Knows no batch and no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.checking import CHECKED
from nanovllm.cpu.kernels.launch import Launch, recorder
from nanovllm.cpu.kernels.recording import Arena, Recording
from nanovllm.cpu.kernels.team import team_size

logger = logging.getLogger("nanovllm")

_MOST = 64  # recordings
_MAKES_MEMORY = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "detach",
}


class _NotRecordableError(Exception):
    """A step calls this operation of torch, which a recording would not repeat."""


class _OnlyKernels(TorchDispatchMode):
    """Within it, operations of torch that compute raise `_NotRecordableError` before they run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it: seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _MAKES_MEMORY and not func.is_view:
            raise _NotRecordableError(name)
        result = func(*args, **(kwargs or {}))
        if name not in _MAKES_MEMORY and not _is_view(result, args[0]):  # a reshape that copies, for example
            raise _NotRecordableError(name)
        return result


class _Rehearsal:
    """Takes launches and runs none, so that a step which cannot be recorded has moved no state."""

    def launch(self, launch: Launch) -> None:
        return

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    @classmethod
    def of(cls, step: Callable[[], Any]) -> None:
        """Let a step call what it calls."""
        token = recorder.set(cls())
        try:
            step()
        finally:
            recorder.reset(token)


def _is_view(result: Any, source: torch.Tensor) -> bool:
    each = result if isinstance(result, torch.Tensor) else next(iter(result), source)
    return each.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def recorded_steps() -> RecordedSteps | None:
    """New recordings; None if nothing is recorded: torch computes here, or addresses are checked."""
    return None if CHECKED or not isa.has_kernels() else RecordedSteps()


class RecordedSteps:
    """Recordings by key and number of rows, of steps with the same input tensors; all share their memory."""

    def __init__(self) -> None:
        self.reason = ""  # the operation for which no step can be recorded
        self._forget()

    def _forget(self) -> None:
        self._arena = Arena()
        self._recordings: dict[object, Recording] = {}  # the one that was used last is at the end
        self._threads = team_size()

    def clear(self) -> None:
        """Forget all recordings: addresses of weights or of the KV cache change."""
        self.reason = ""
        self._forget()

    @property
    def usable(self) -> bool:
        return not self.reason

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, key: object, make_step: Callable[[], Callable[[], Any]]) -> Any:
        """The output of the step: of the recording `key`, or of the step that `make_step` makes, which is
        recorded. Valid until the next run. None if it cannot be recorded; then nothing of it has run.
        """
        if self._threads != team_size():  # scratch memory is for this number of threads
            self._forget()
        found = self._recordings.pop(key, None)
        if found is not None:
            self._recordings[key] = found
            return found.replay()
        step = make_step()
        while len(self._recordings) >= _MOST:
            del self._recordings[next(iter(self._recordings))]
        try:
            with _OnlyKernels():
                _Rehearsal.of(step)
                found = Recording.record(step, self._arena)
        except _NotRecordableError as error:
            self.reason = str(error)
            self._forget()
            logger.info("steps are not recorded, because they call torch's %s", self.reason)
            return None
        self._recordings[key] = found
        return found.result
