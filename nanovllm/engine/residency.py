"""Residency: sleep, wake up and new weights, together on all ranks.

Owns no memory: each rank's runner does. Knows no request and no prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from typing import Any

import torch

from nanovllm.errors import KVCacheMemoryError
from nanovllm.models.weights import WeightChecker, check_weights, named_pairs
from nanovllm.runner.residency import TAGS, WEIGHTS, ResidentModelRunner
from nanovllm.workers.interrupts import held_interrupts
from nanovllm.workers.shared_tensors import SharedMemoryBuffer
from nanovllm.workers.worker import Workers

BUFFER_BYTES = 2**27  # of tensors sent to workers at once; a larger tensor is sent alone


def parse_tags(tags: object) -> frozenset[str]:
    """Return the tags of a `wake_up`; ValueError if one is unknown."""
    if tags is None:
        return frozenset(TAGS)
    if isinstance(tags, str) or not isinstance(tags, Collection) or not tags or not set(tags) <= set(TAGS):
        raise ValueError(f"tags={tags!r} must be None or a list of {' and '.join(map(repr, TAGS))}")
    return frozenset(tags)


class Residency:
    """Rank 0's calls to all ranks, one at a time, while no request is unfinished."""

    def __init__(self, workers: Workers, runner: ResidentModelRunner) -> None:
        self._workers = workers
        self._runner = runner

    @property
    def asleep(self) -> frozenset[str]:
        """Which of TAGS sleep."""
        return self._runner.asleep

    def check_awake(self, needed: Collection[str] = TAGS, why: str = "") -> None:
        """Raise RuntimeError if one of `needed` sleeps."""
        sleeping = [tag for tag in TAGS if tag in self.asleep and tag in needed]
        if sleeping:
            raise RuntimeError(f"this engine sleeps ({' and '.join(sleeping)}); call wake_up() first{why}")

    def sleep(self, level: int) -> None:
        """Free weights, KV cache and CUDA graphs."""
        self._workers.call(self._runner.sleep, "sleep", level)

    def wake_up(self, tags: frozenset[str]) -> None:
        """Wake those of `tags` that sleep. After KVCacheMemoryError or ModelLoadError they still sleep."""
        if self._runner.drops_weights and WEIGHTS in tags:
            self._check_checkpoint()
        needs = self._workers.call(self._runner.wake_up_need, "wake_up_need", tags)
        for rank, (need, free, total) in enumerate(needs):
            if need > free:
                raise KVCacheMemoryError(
                    f"no room to wake up on rank {rank}: {need / 2**30:,.2f} GiB are needed, and "
                    f"{free / 2**30:,.2f} of {total / 2**30:,.2f} GiB are free. Free memory that others use "
                    "(torch.cuda.empty_cache() in their process) and call wake_up() again"
                )
        self._workers.call(self._runner.wake_up, "wake_up", tags)

    def update_weights(self, tensors: Mapping[str, Any] | Iterable[Any]) -> None:
        """Check and load tensors on all ranks; see `LLM.update_weights`."""
        self.check_awake((WEIGHTS,), why=", at least with tags=['weights']")
        pairs, checker = named_pairs(tensors), WeightChecker(self._runner.model)
        if isinstance(pairs, Collection):
            for _ in checker.accept(pairs):
                pass
        with closing(_TensorLoader(self._workers, self._runner)) as loader:
            try:
                for name, tensor in checker.accept(pairs):
                    loader.load(name, tensor)
            finally:
                loader.finish()

    def _check_checkpoint(self) -> None:
        if self._runner.config.load_format != "dummy":
            check_weights(self._runner.model_config, self._runner.model_path)


class _TensorLoader:
    """Loads tensors on all ranks: one by one without workers, a buffer at a time with workers."""

    def __init__(self, workers: Workers, runner: ResidentModelRunner) -> None:
        self._workers = workers
        self._runner = runner
        self._buffer = SharedMemoryBuffer(BUFFER_BYTES) if workers.watch.processes else None

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if self._buffer is None:
            with held_interrupts():
                self._runner.load_tensors([(name, tensor)])
                self._workers.watch.progress()
        elif not self._buffer.put(name, tensor):
            self._flush(self._buffer)
            self._buffer.put(name, tensor)

    def finish(self) -> None:
        """Load the remaining tensors, and prepare for the next step."""
        with held_interrupts():
            if self._buffer is not None:
                self._flush(self._buffer)
            self._workers.call(self._runner.finish_update, "finish_update")

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()

    def _flush(self, buffer: SharedMemoryBuffer) -> None:
        with held_interrupts():
            self._workers.call(self._runner.load_tensors, "load_tensors", buffer.take())
