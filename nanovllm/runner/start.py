"""The start of a model's ranks. Either all start, with weights, KV cache and CUDA graphs, or nothing is
left. Never schedules.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

import torch

from nanovllm import doors
from nanovllm.device import Device
from nanovllm.doors import Table
from nanovllm.errors import KVCacheMemoryError
from nanovllm.kv_group import slabs_of
from nanovllm.layers.stream import Group
from nanovllm.models.weights import weight_bytes
from nanovllm.runner.memory import check_weights_fit, fit_kv_cache
from nanovllm.runner.model_runner import ModelRunner, RankSetup
from nanovllm.runner.ranks import OneRank

RANKS: Table[type[OneRank]] = Table(doors.RANKS)  # of more than one
logger = logging.getLogger("nanovllm")

_START_TRIES = _KV_CACHE_TRIES = 3
PAUSE_SECONDS = 1.0, 6.0  # between two tries of a start


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
        shortest, longest = PAUSE_SECONDS
        pause = random.uniform(shortest, longest)
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
        _allocate_kv_cache(ranks, max(ranks.call(ModelRunner.warmup_model)))
        ranks.call(ModelRunner.capture_cudagraph)
        return ranks
    except BaseException:
        ranks.abandon()
        raise


def _allocate_kv_cache(ranks: OneRank, reserve: int) -> None:
    """Allocate the KV cache on every rank; all have as many blocks. reserve: bytes of the device to keep.

    Other processes may take memory between the measurement and the allocation; then measure again.
    """
    runner = ranks.runner
    config, groups, longest = runner.config, runner.layout.groups, runner.max_model_len
    each = slabs_of(groups, longest, runner.block_size, config.max_num_batched_tokens)
    most = config.max_num_seqs * each  # more blocks are of no use
    for _ in range(_KV_CACHE_TRIES):
        spaces = ranks.call(ModelRunner.measure_kv_cache, reserve)
        ranks.num_blocks = fit_kv_cache(spaces, runner.config, runner.block_size, most)
        if all(ranks.call(ModelRunner.try_kv_cache, ranks.num_blocks)):
            return
        logger.warning("the memory for the KV cache was taken while the engine started; measuring it again")
    allocated = ranks.call(ModelRunner.allocate_kv_cache, ranks.num_blocks)
    assert set(allocated) == {ranks.num_blocks}, "every rank has as many blocks as the scheduler"
