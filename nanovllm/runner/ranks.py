"""The ranks of a model, and their start. One rank, in this process; `parallel.ranks.Ranks` has several.

A call to the ranks is a function of the runner and its arguments. Either all ranks start, with captured CUDA
graphs, or nothing is left. Never schedules.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from nanovllm import doors
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.doors import Table
from nanovllm.errors import KVCacheMemoryError
from nanovllm.kv_group import slabs_of
from nanovllm.layers.stream import Group
from nanovllm.models.config import ModelConfig
from nanovllm.models.weights import weight_bytes
from nanovllm.runner.memory import check_weights_fit, fit_kv_cache
from nanovllm.runner.model_runner import ModelRunner

RANKS: Table[type[OneRank]] = Table(doors.RANKS)  # of more than one
logger = logging.getLogger("nanovllm")

R = TypeVar("R", bound=ModelRunner)
P = ParamSpec("P")
T = TypeVar("T")

_START_TRIES = _KV_CACHE_TRIES = 3
PAUSE_SECONDS = 1.0, 6.0  # between two tries of a start


@dataclass(frozen=True)
class RankSetup:
    """Everything that a process needs to become rank `rank` of `size`."""

    rank: int
    size: int
    device: str
    config: Config
    model_config: ModelConfig
    model_path: Path
    max_model_len: int
    runner: type[ModelRunner] = ModelRunner

    def load(self, device: Device, group: Group, check: Callable[[], None] = lambda: None) -> ModelRunner:
        """Load this rank's part of the model; `check` as in `ModelRunner`."""
        return self.runner(
            self.config, self.model_config, self.model_path, device, group, self.max_model_len, check
        )


class OneRank:
    """A model on one rank: each call runs here."""

    runner: Any  # rank 0's, of `RankSetup.runner`, once it has loaded
    num_blocks: int  # of every rank's KV cache
    size = 1
    has_ended = False  # whether nothing can run any more

    def __init__(self, setup: RankSetup, device: Device, on_progress: Callable[[], None]) -> None:
        """Arguments as of `start_ranks`."""
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
            return bound(self.runner, call)(*args)

    def call(self, call: Callable[Concatenate[R, P], T], *args: P.args, **options: P.kwargs) -> list[T]:
        """As `run`, for a method with an answer: return the results of all ranks, rank 0's first."""
        results = [self.run(call, *args, **options)]
        self.progress()
        return results

    def kill_on_error(self, phase: str) -> AbstractContextManager[None]:
        """On an exception in the block, end all other ranks, and raise what is behind it. phase: what the
        block does, for the error of a wait that takes too long."""
        return nullcontext()

    def allocate_kv_cache(self, reserve: int) -> None:
        """Allocate the KV cache on every rank; all have as many blocks. reserve: bytes of the device to keep.

        Other processes may take memory between the measurement and the allocation; then measure again.
        """
        runner = self.runner
        config, groups, longest = runner.config, runner.layout.groups, runner.max_model_len
        each = slabs_of(groups, longest, runner.block_size, config.max_num_batched_tokens)
        most = config.max_num_seqs * each  # more blocks are of no use
        for _ in range(_KV_CACHE_TRIES):
            spaces = self.call(ModelRunner.measure_kv_cache, reserve)
            self.num_blocks = fit_kv_cache(spaces, runner.config, runner.block_size, most)
            if all(self.call(ModelRunner.try_kv_cache, self.num_blocks)):
                return
            logger.warning(
                "the memory for the KV cache was taken while the engine started; measuring it again"
            )
        allocated = self.call(ModelRunner.allocate_kv_cache, self.num_blocks)
        assert set(allocated) == {self.num_blocks}, "every rank has as many blocks as the scheduler"

    def stop(self) -> None:
        """End the other ranks, and free this rank's memory."""
        self.runner.exit()

    def abandon(self) -> None:
        """Free what a start that failed has taken."""
        if hasattr(self, "runner"):
            self.runner.exit()


def bound(runner: ModelRunner, call: Callable[..., T]) -> Callable[..., T]:
    """The runner's method `call`, which its class may override."""
    method: Callable[..., T] = getattr(runner, call.__name__)
    return method


def start_ranks(setup: RankSetup, on_progress: Callable[[], None] = lambda: None) -> OneRank:
    """Start every rank of a model, each with a KV cache of `num_blocks` blocks. setup: that of rank 0.

    Engines that start on one GPU at the same moment may need its last memory together. So a start that runs
    out of memory is tried again, after a random time.

    on_progress: called by any thread for each tensor that loads, and after each call of all ranks.
    Raises the errors of `LLMEngine`; all ranks are then ended.
    """
    device = Device(setup.device)
    for left in range(_START_TRIES)[::-1]:
        try:
            return _start_ranks(setup, device, on_progress)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            if not left:
                raise KVCacheMemoryError(
                    f"{device.torch} ran out of memory while the engine started ({error}). Close other "
                    "programs on the device, or lower gpu_memory_utilization "
                    f"(now {setup.config.gpu_memory_utilization}), max_num_batched_tokens or max_num_seqs"
                ) from error
        pause = random.uniform(*PAUSE_SECONDS)
        logger.warning(
            "%s ran out of memory while the engine started; other programs may have taken it at the same "
            "moment; trying again in %.1f s",
            *(device.torch, pause),
        )
        device.release_memory()
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device was full; a failed CUDA graph or kernel has torch's error only as its context."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA]: out of memory" in str(error):
            return True
        error = error.__context__
    return False


def _start_ranks(setup: RankSetup, device: Device, on_progress: Callable[[], None]) -> OneRank:
    """One try."""
    config = setup.config
    dtype = device.resolve_dtype(config.dtype, setup.model_config.dtype)
    need = weight_bytes(setup.model_config, Group(0, setup.size), dtype)
    kind = OneRank if setup.size == 1 else RANKS["processes"]
    ranks = kind(setup, device, on_progress)
    try:
        check_weights_fit(need, ranks.memory(), config, device)
        ranks.load()
        ranks.call(ModelRunner.calibrate_kv_cache)
        ranks.allocate_kv_cache(max(ranks.call(ModelRunner.warmup_model)))
        ranks.call(ModelRunner.capture_cudagraph, logger.isEnabledFor(logging.INFO))
        return ranks
    except BaseException:
        ranks.abandon()
        raise
