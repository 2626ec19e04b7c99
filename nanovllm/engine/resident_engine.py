"""ResidentEngine: an LLMEngine that gives the device's memory back, takes it again, and takes new weights.

Says when that is allowed, and that nothing is cached afterwards; `Residency` does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.residency import parse_tags
from nanovllm.workers.interrupts import held_interrupts

if TYPE_CHECKING:
    import torch


class ResidentEngine(LLMEngine):
    """Calls between requests: `sleep`, `wake_up`, `update_weights`."""

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back: weights, KV cache and CUDA graphs, on every rank.

        level: 1 keeps a copy of the weights in host memory; 2 drops them, for `wake_up` to read the
        checkpoint again. A second call does nothing, but for level 2 after level 1, which drops the copy.

        ValueError for another level; RuntimeError while requests of `add_request` are unfinished. Until
        `wake_up` all that would run is a RuntimeError. The prefix cache is empty afterwards.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"level={level!r} must be 1 (weights to host memory) or 2 (drop them)")
        with self._between_requests("sleep()"), held_interrupts():
            self._residency.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the device's memory again, for all that sleeps or for what `tags` say.

        tags: of "weights" and "kv_cache". The engine runs again when both are awake.

        Answers are then as before `sleep(1)`. After `sleep(2)` the weights are the checkpoint's, without
        what `update_weights` changed. ValueError for other tags; KVCacheMemoryError when a device has too
        little free memory, ModelLoadError when the checkpoint cannot be read: the engine still sleeps then.
        """
        chosen = parse_tags(tags)
        with self._between_requests("wake_up()"), held_interrupts():
            self._residency.wake_up(chosen)

    def is_sleeping(self) -> bool:
        """Whether `wake_up` must come before the engine can run."""
        self._lifecycle.check_open()
        return bool(self._residency.asleep)

    def update_weights(
        self, named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Replace weights, all or some; the result is bit for bit a fresh load of a checkpoint with them.

        named_tensors: tensors by their names in a checkpoint's safetensors files, of any float dtype and on
        any device. A dict or list is checked as a whole before anything changes. Of any other iterable,
        such as a generator of tensors that do not fit in memory together, each is checked before it is
        loaded; after an error, also one of its own, those before it are loaded, and the engine is usable.

        TypeError or ValueError names the tensor and what is expected. RuntimeError while requests of
        `add_request` are unfinished, and while the weights sleep. The prefix cache is empty afterwards.
        """
        with self._between_requests("update_weights()"):
            self._residency.update_weights(named_tensors)

    @contextmanager
    def _between_requests(self, call: str) -> Iterator[None]:
        """Let the block change what answers are made of, while nothing runs; none of it is cached after."""
        with self._calling(asleep=True):
            self._check_idle(call)
            with self._emptied_on_error():
                self._in_flight = None  # surplus rows of requests that have ended
                self._scheduler.block_manager.reset()
                yield
