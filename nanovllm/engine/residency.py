"""Residency: sleep, wake up and new weights, together on all ranks.

Owns no memory: each rank's runner does. Knows no request and no prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from typing import Any

import torch

from nanovllm.errors import KVCacheMemoryError
from nanovllm.lifecycle import held_interrupts
from nanovllm.models.loader import check_weights
from nanovllm.models.update import WeightUpdate, named_pairs
from nanovllm.runner.residency import TAGS, WEIGHTS
from nanovllm.workers.ranks import Ranks
from nanovllm.workers.shared_tensors import SharedMemoryBuffer

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

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @property
    def asleep(self) -> frozenset[str]:
        """Which of TAGS sleep."""
        return self._ranks.runner.asleep

    def check_awake(self, needed: Collection[str] = TAGS, why: str = "") -> None:
        """Raise RuntimeError if one of `needed` sleeps."""
        sleeping = [tag for tag in TAGS if tag in self.asleep and tag in needed]
        if sleeping:
            raise RuntimeError(f"this engine sleeps ({' and '.join(sleeping)}); call wake_up() first{why}")

    def sleep(self, level: int) -> None:
        """Free weights, KV cache and CUDA graphs."""
        self._ranks.call("sleep", level)

    def wake_up(self, tags: frozenset[str]) -> None:
        """Wake those of `tags` that sleep. After KVCacheMemoryError or ModelLoadError they still sleep."""
        if self._ranks.runner.drops_weights and WEIGHTS in tags:
            self._check_checkpoint()
        needs = self._ranks.call("wake_up_need", tags)
        for rank, (need, free, total) in enumerate(needs):
            if need > free:
                raise KVCacheMemoryError(
                    f"no room to wake up on rank {rank}: {need / 2**30:,.2f} GiB are needed, and "
                    f"{free / 2**30:,.2f} of {total / 2**30:,.2f} GiB are free. Free memory that others use "
                    "(torch.cuda.empty_cache() in their process) and call wake_up() again"
                )
        self._ranks.call("wake_up", tags)

    def update_weights(self, tensors: Mapping[str, Any] | Iterable[Any]) -> None:
        """Check and load tensors on all ranks; see `LLM.update_weights`."""
        self.check_awake((WEIGHTS,), why=", at least with tags=['weights']")
        pairs = named_pairs(tensors)
        if isinstance(pairs, Collection):
            for _ in self._new_update().accept(pairs):
                pass
        update = self._new_update()
        with closing(_TensorLoader(self._ranks)) as loader:
            try:
                for name, tensor in update.accept(pairs):
                    loader.load(name, tensor)
            finally:
                loader.finish(update.reload)

    def _new_update(self) -> WeightUpdate:
        return WeightUpdate(self._ranks.runner.model, self._ranks.runner.updated, self._check_checkpoint)

    def _check_checkpoint(self) -> None:
        if self._ranks.runner.config.load_format != "dummy":
            check_weights(self._ranks.runner.model_config, self._ranks.runner.model_path)


class _TensorLoader:
    """Loads tensors on all ranks: one by one without workers, a buffer at a time with workers."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buffer = SharedMemoryBuffer(BUFFER_BYTES) if ranks.watch.processes else None

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if self._buffer is None:
            with held_interrupts():
                self._ranks.runner.load_tensors([(name, tensor)])
                self._ranks.watch.progress()
        elif not self._buffer.put(name, tensor):
            self._flush(self._buffer)
            self._buffer.put(name, tensor)

    def finish(self, reload: Collection[str]) -> None:
        """Load the remaining tensors, and prepare for the next step."""
        with held_interrupts():
            if self._buffer is not None:
                self._flush(self._buffer)
            self._ranks.call("finish_update", reload)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()

    def _flush(self, buffer: SharedMemoryBuffer) -> None:
        with held_interrupts():
            self._ranks.call("load_tensors", buffer.take())
