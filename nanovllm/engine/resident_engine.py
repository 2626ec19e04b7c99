"""ResidentEngine: an LLMEngine that can free the device's memory, allocate it again, and take new weights.

Checks when that is allowed and empties the prefix cache; `Residency` does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests import Deltas
from nanovllm.engine.residency import parse_tags
from nanovllm.lifecycle import held_interrupts

if TYPE_CHECKING:
    import torch


class ResidentEngine(LLMEngine):
    """Calls between requests: `sleep`, `wake_up`, `update_weights`; and `reset_prefix_cache`."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache and return True. While requests hold blocks, do nothing and return False.

        The arguments are vLLM's and change nothing: no request runs between calls, and there is no connector.
        """
        with self._calling(asleep=True, beside=True):
            return self._empty_prefix_cache()

    def _empty_prefix_cache(self) -> bool:
        return self._scheduler.block_manager.reset()

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory on every rank: weights, KV cache and CUDA graphs.

        level: 1 keeps a copy of the weights in host memory; 2 drops them, and `wake_up` reads the checkpoint
        again. A second call does nothing, except that level 2 after level 1 drops the copy.

        ValueError for another level; RuntimeError while requests of `add_request` are unfinished. Until
        `wake_up`, calls that run the model raise RuntimeError. The prefix cache is empty afterwards.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"level={level!r} must be 1 (weights to host memory) or 2 (drop them)")
        with self._between_requests("sleep()"), held_interrupts():
            self._residency.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the device's memory again.

        tags: a list of "weights" and "kv_cache"; None means both. The engine runs when both are awake.

        After `sleep(1)` the answers are the same as before it. After `sleep(2)` the weights are the
        checkpoint's, without the changes of `update_weights`. ValueError for other tags; KVCacheMemoryError
        if a device has too little free memory, ModelLoadError if the checkpoint cannot be read. After these
        two the engine still sleeps.
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
        """Replace all or some weights; the result equals, bit for bit, a fresh load of such a checkpoint.

        named_tensors: tensors by their names in a checkpoint's safetensors files, of any float dtype and on
        any device. A dict or list is checked as a whole before any weight changes. Other iterables, such as a
        generator of tensors that do not fit into memory together, are checked one tensor at a time, each
        before it is loaded. After an error the earlier tensors stay loaded, and the engine is usable. With
        replicas all tensors are checked first, and stay in host memory for replicas that restart.

        TypeError or ValueError names the tensor and what is expected. RuntimeError while requests of
        `add_request` are unfinished, and while the weights sleep. The prefix cache is empty afterwards.
        """
        with self._between_requests("update_weights()"):
            self._residency.update_weights(named_tensors)

    def _yield_deltas(self, deltas: bool) -> None:
        """Whether steps from now on return parts of answers; there are no requests."""
        self._requests.deltas = Deltas(self._processor) if deltas else None

    @contextmanager
    def _between_requests(self, call: str) -> Iterator[None]:
        """Run the block while no request is unfinished, after emptying the prefix cache."""
        with self._calling(asleep=True):
            self._check_idle(call)
            with self._emptied_on_error():
                self._in_flight = None  # surplus rows of requests that have ended
                self._empty_prefix_cache()
                yield
