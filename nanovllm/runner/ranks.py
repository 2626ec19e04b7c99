"""The ranks of a model. One rank, in this process; `parallel.ranks.Ranks` has several.

A call to the ranks is a function of the runner and its arguments. Never schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

from nanovllm.device import Device
from nanovllm.layers.stream import Group
from nanovllm.runner.batch_runner import BatchRunner
from nanovllm.runner.model_runner import RankSetup

R = TypeVar("R", bound=BatchRunner)
P = ParamSpec("P")
T = TypeVar("T")


class OneRank:
    """A model on one rank: each call runs here."""

    runner: Any  # rank 0's, of `RankSetup.runner`, once it has loaded
    num_blocks: int  # of every rank's KV cache
    size = 1
    has_ended = False  # whether nothing can run any more

    def __init__(self, setup: RankSetup, device: Device, on_progress: Callable[[], None]) -> None:
        """Arguments as of `start_ranks`, which sets `num_blocks`."""
        self.progress = on_progress
        self._setup, self._device = setup, device

    def memory(self) -> list[tuple[int, int]]:
        """Free and total bytes of each rank's device."""
        return [self._device.memory()]

    def load(self) -> None:
        """Load each rank's part of the model."""
        with self._device.share_of_threads(1, self._setup.config.num_threads):
            self.runner = self._setup.load(self._device, Group(), self.progress)
        self.progress()

    def run(self, call: Callable[Concatenate[R, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Call a method of every rank's runner, with the same positional arguments; return the result of
        rank 0."""
        assert not options, "a message has positional arguments"
        with self._device.share_of_threads(1, self._setup.config.num_threads):
            return called(self.runner, call, args)

    def call(self, call: Callable[Concatenate[R, P], T], *args: P.args, **options: P.kwargs) -> list[T]:
        """As `run`, for a method with an answer: return the results of all ranks, rank 0's first."""
        assert not options, "a message has positional arguments"
        with self._device.share_of_threads(1, self._setup.config.num_threads):
            result = called(self.runner, call, args)
        self.progress()
        return [result]

    def kill_on_error(self, phase: str) -> AbstractContextManager[None]:
        """On an exception in the block, end all other ranks, and raise what is behind it. phase: what the
        block does, for the error of a wait that takes too long."""
        return nullcontext()

    def stop(self) -> None:
        """End the other ranks, and free this rank's memory."""
        self.runner.exit()

    def abandon(self) -> None:
        """Free what a start that failed has taken."""
        if hasattr(self, "runner"):
            self.runner.exit()


def called(runner: BatchRunner, call: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Call the runner's method `call`, which its class may override."""
    method: Callable[..., T] = getattr(runner, call.__name__)
    return method(*args)
