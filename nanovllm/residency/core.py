"""ResidentCore: a Core whose model can sleep, take new weights, be profiled and be given to functions.

Checks what is asked of the ranks, which `residency/runner.py` does. Makes no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from nanovllm.engine.core import Core
from nanovllm.engine.executor import Executor
from nanovllm.errors import KVCacheMemoryError
from nanovllm.lifecycle import held_interrupts
from nanovllm.models.weights import check_weights
from nanovllm.residency.runner import WEIGHTS, RankView, ResidentModelRunner
from nanovllm.residency.shared_tensors import load_tensors, raise_first
from nanovllm.residency.updates import UpdateChecker, named_pairs


class ResidentExecutor(Executor, Protocol):
    """An executor with calls between requests that change weights and memory."""

    def sleep(self, level: int) -> None:
        """Free weights, KV cache and CUDA graphs; see `LLM.sleep`."""

    def wake_up(self, tags: frozenset[str]) -> None:
        """Wake those of `tags` that sleep. After KVCacheMemoryError or ModelLoadError they still sleep."""

    def update(self, tensors: Mapping[str, Any] | Iterable[Any]) -> None:
        """Check and load new weights; see `LLM.update_weights`."""

    def start_profile(self, folder: str, name: str) -> None:
        """Start a profile of every rank. name: ends the names of the traces."""

    def stop_profile(self) -> list[str]:
        """End the profile; return the path of each rank's trace."""

    def apply(self, function: Callable[[RankView], Any]) -> list[Any]:
        """Call a function with each rank, rank 0 first, of each replica; return its results, a `FailedCall`
        for an exception. The prefix cache is empty afterwards."""


class ResidentCore(Core):
    """See `ResidentExecutor`."""

    runner_class = ResidentModelRunner

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Run a block in which weights or KV cache change: no step is in flight, and nothing is cached."""
        self._in_flight = None  # surplus rows of requests that have ended
        self.reset_prefix_cache()
        with self._device.current():
            yield

    def sleep(self, level: int) -> None:
        with self._resting():
            try:
                self.ranks.call(ResidentModelRunner.sleep, level)
            finally:
                self.asleep = self.runner.asleep

    def wake_up(self, tags: frozenset[str]) -> None:
        if self.runner.drops_weights and WEIGHTS in tags:
            self._check_checkpoint()
        with self._resting():
            needs = self.ranks.call(ResidentModelRunner.wake_up_need, tags)
            for rank, (need, free, total) in enumerate(needs):
                if need > free:
                    raise KVCacheMemoryError(
                        f"no room to wake up on rank {rank}: {need / 2**30:,.2f} GiB are needed, and "
                        f"{free / 2**30:,.2f} of {total / 2**30:,.2f} GiB are free. Free memory that others "
                        "use (torch.cuda.empty_cache() in their process) and call wake_up() again"
                    )
            try:
                self.ranks.call(ResidentModelRunner.wake_up, tags)
            finally:
                self.asleep = self.runner.asleep

    def update(self, tensors: Mapping[str, Any] | Iterable[Any]) -> None:
        with self._resting():
            pairs, checker = named_pairs(tensors), UpdateChecker(self.runner.model)
            if isinstance(pairs, Collection):
                for _ in checker.accept(pairs):
                    pass
            try:
                load_tensors(self.ranks, checker.accept(pairs))
            finally:
                with held_interrupts():
                    errors = self.ranks.call(ResidentModelRunner.finish_update)
            raise_first(errors)

    def _check_checkpoint(self) -> None:
        if self._config.load_format != "dummy":
            check_weights(self.runner.model_config, self.runner.model_path)

    def apply(self, function: Callable[[RankView], Any]) -> list[Any]:
        with self._resting():
            return self.ranks.call(ResidentModelRunner.apply, function)

    def start_profile(self, folder: str, name: str) -> None:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("a torch profiler is already active in this process; stop it first")
        with self._device.current():
            self.ranks.call(ResidentModelRunner.start_profile, folder, name)

    def stop_profile(self) -> list[str]:
        if self.runner.profile is None:
            raise RuntimeError("no profile is on; call start_profile() first")
        with self._device.current():
            return self.ranks.call(ResidentModelRunner.stop_profile)
