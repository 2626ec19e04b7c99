"""ResidencyCalls: what an engine can do between requests: sleep, take new weights, and be profiled.

Checks the arguments; the executor does it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from time import time_ns
from typing import TYPE_CHECKING

from nanovllm.engine.generate import asleep_error
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.inputs import calls_of_llm
from nanovllm.lifecycle import held_interrupts
from nanovllm.residency.core import ResidentCore, ResidentExecutor
from nanovllm.residency.runner import TAGS, WEIGHTS

if TYPE_CHECKING:
    import torch


@calls_of_llm
class ResidencyCalls(LLMEngine):
    """An engine that can sleep, take new weights and be profiled."""

    _executor: ResidentExecutor
    _alone = ResidentCore
    _profile_folder: str | None = None  # of `start_profile` without a folder

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory on every rank: weights, KV cache and CUDA graphs.

        level: 1 keeps a copy of the weights in host memory; 2 drops them, and `wake_up` reads the checkpoint
        again. A second call does nothing, except that level 2 after level 1 drops the copy.
        mode: vLLM's, what becomes of running requests; it changes nothing, because none runs between calls.

        ValueError for another level; RuntimeError while requests of `add_request` are unfinished. Until
        `wake_up`, calls that run the model raise RuntimeError. The prefix cache is empty afterwards.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"level={level!r} must be 1 (weights to host memory) or 2 (drop them)")
        with self._between_requests("sleep()"), held_interrupts():
            self._executor.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Allocate the device's memory again; return whether the engine runs now.

        tags: a list of "weights" and "kv_cache"; None means both. The engine runs when both are awake.

        After `sleep(1)` the answers are the same as before it. After `sleep(2)` the weights are the
        checkpoint's, without the changes of `update_weights`. ValueError for other tags; KVCacheMemoryError
        if a device has too little free memory, ModelLoadError if the checkpoint cannot be read. After these
        two the engine still sleeps.
        """
        chosen = _parse_tags(tags)
        with self._between_requests("wake_up()"), held_interrupts():
            self._executor.wake_up(chosen)
            return not self._executor.asleep

    def is_sleeping(self) -> bool:
        """Whether `wake_up` must come before the engine can run."""
        self._lifecycle.check_open()
        return bool(self._executor.asleep)

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
            if sleeping := self._executor.asleep & {WEIGHTS}:
                raise asleep_error(sleeping, ", at least with tags=['weights']")
            self._executor.update(named_tensors)

    def start_profile(self, folder: str | Path | None = None) -> None:
        """Start torch.profiler on every rank; `stop_profile` ends it.

        folder: receives a Chrome trace of each rank; created if missing. None takes `torch_profiler_dir` of
        the option `profiler_config`, or the environment variable VLLM_TORCH_PROFILER_DIR. ValueError without
        a folder, OSError if it is not writable, RuntimeError if a torch profiler is active in the engine's
        process.
        """
        folder = folder or self._profile_folder or os.environ.get("VLLM_TORCH_PROFILER_DIR")
        if not folder:
            raise ValueError("start_profile() needs a folder; pass one, or set VLLM_TORCH_PROFILER_DIR")
        with self._calling(beside=True):
            path = Path(folder).expanduser().absolute()
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()  # it can be written to
            self._executor.start_profile(str(path), str(time_ns()))

    def stop_profile(self) -> list[Path]:
        """End the profile; return the path of each rank's trace, for chrome://tracing or ui.perfetto.dev.

        RuntimeError if there is no profile. `close` also ends a profile, and writes nothing.
        """
        with self._calling(beside=True):
            return [Path(path) for path in self._executor.stop_profile()]


def _parse_tags(tags: object) -> frozenset[str]:
    """Return the tags of a `wake_up`; ValueError if one is unknown."""
    if tags is None:
        return frozenset(TAGS)
    if isinstance(tags, str) or not isinstance(tags, Collection) or not tags or not set(tags) <= set(TAGS):
        raise ValueError(f"tags={tags!r} must be None or a list of {' and '.join(map(repr, TAGS))}")
    return frozenset(tags)
