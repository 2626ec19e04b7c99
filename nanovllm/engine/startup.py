"""Start and end of all ranks: either all of them start, with captured CUDA graphs, or nothing is left.

Decides the maximum length of sequences. Keeps no state.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanovllm.config import Config
from nanovllm.device import CPU_KV_CACHE_BYTES, Device
from nanovllm.distributed.group import TPGroup
from nanovllm.distributed.rendezvous import Rendezvous
from nanovllm.errors import KVCacheMemoryError
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import Hub, open_checkpoint, resolve_model_path
from nanovllm.models.weights import weight_bytes
from nanovllm.runner.memory import check_weights_fit, fit_kv_cache
from nanovllm.runner.residency import ResidentModelRunner
from nanovllm.text.tokenizer import load_tokenizer
from nanovllm.workers.worker import RankSetup, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")

START_TRIES = KV_CACHE_TRIES = 3
PAUSE_SECONDS = 1.0, 6.0  # between two tries of a start
TABLE_BYTES = 2**30  # the most that tables for each position take on a CPU
LARGEST_BLOCK = 256  # tokens; no attention backend has larger blocks by default


def find_model(config: Config) -> Path:
    """Return the model's folder. ValueError or ModelLoadError as in `resolve_model_path`."""
    return resolve_model_path(config.model, _hub(config, config.revision))


def find_tokenizer(config: Config, model_path: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that `config` names; by default that of the model in `model_path`.

    None with `skip_tokenizer_init=True`. ValueError or ModelLoadError if it cannot be found.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None and not isinstance(config.tokenizer, str):
        found: PreTrainedTokenizerBase = config.tokenizer
        return found
    path = model_path
    if config.tokenizer is not None or config.tokenizer_revision not in (None, config.revision):
        name = config.model if config.tokenizer is None else config.tokenizer
        path = resolve_model_path(name, _hub(config, config.tokenizer_revision), "tokenizer")
    return open_checkpoint(path).tokenizer(lambda folder: load_tokenizer(folder, config.trust_remote_code))


def _hub(config: Config, revision: str | None) -> Hub:
    return Hub(revision, config.download_dir, config.hf_token, config.trust_remote_code)


def resolve_max_model_len(asked: int | None, model_config: ModelConfig) -> int:
    """Return the maximum length of a sequence; None asks for the longest that the model supports here.

    A length that is not the one asked for, or not the model's own, is a warning. Raises ValueError if the
    model cannot compute that many tokens.
    """
    positions, longest = model_config.max_position_embeddings, model_config.longest
    if asked is not None:
        model_config.check_max_model_len(asked)
        if asked > positions:
            logger.warning("max_model_len is %d, not %d: the model has no more positions", positions, asked)
        return min(asked, positions)
    if longest < positions:
        why = model_config.why_shorter
        logger.warning(
            "max_model_len is %d, not the model's %d: longer sequences need its %s, which is not supported",
            *(longest, positions, why),
        )
    return longest


def cache_options(config: Config, device: Device) -> str:
    """The options that make the KV cache larger on this device, for messages."""
    if config.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    if config.num_kvcache_blocks is not None:
        return "num_kvcache_blocks"
    return "gpu_memory_utilization" if device.is_cuda else "kv_cache_memory_bytes or num_kvcache_blocks"


def warn_of_options(config: Config, max_model_len: int, longest: int) -> None:
    """Say that an option does nothing here, and that the KV cache has room for only `longest` tokens."""
    device = Device(config.device)
    if not device.is_cuda and config.gpu_memory_utilization != Config.gpu_memory_utilization:
        logger.warning(
            "gpu_memory_utilization=%s does nothing on a CPU, where %s sets the size of the KV cache",
            *(config.gpu_memory_utilization, cache_options(config, device)),
        )
    if longest < max_model_len:
        logger.warning(
            "max_model_len is %d, not %d: the KV cache has room for no more; raise %s for longer sequences",
            *(longest, max_model_len, cache_options(config, device)),
        )


def usable_length(config: Config, model_config: ModelConfig, device: Device, max_model_len: int) -> int:
    """`max_model_len`, or less: the most tokens that any KV cache of this device may hold, and on a CPU those
    whose tables take TABLE_BYTES. So no table is made for positions that nothing can use."""
    layers, heads = model_config.num_layers, model_config.num_kv_heads
    dtype = device.resolve_dtype(config.dtype, model_config.dtype)
    item = 1 if config.kv_cache_dtype == "fp8" else dtype.itemsize
    own_heads = max(1, heads // config.tensor_parallel_size)
    per_token = 2 * layers * own_heads * model_config.head_dim * item
    num_bytes = device.memory()[1] if device.is_cuda else CPU_KV_CACHE_BYTES // config.tensor_parallel_size
    block = config.kvcache_block_size or LARGEST_BLOCK
    most = (config.kv_cache_memory_bytes or num_bytes) // per_token
    if config.num_kvcache_blocks is not None:
        most = config.num_kvcache_blocks * block
    elif not device.is_cuda:
        tables = 24 * config.max_num_seqs // (config.kvcache_block_size or 16) + 12 * model_config.head_dim
        most = min(most, TABLE_BYTES // tables)  # block tables, and rope's with what computing it takes
    return min(max_model_len, most + block)  # a block more, so that an error names the cache as the limit


def start_ranks(
    config: Config,
    model_config: ModelConfig,
    path: Path,
    device: Device,
    max_model_len: int,
    on_progress: Callable[[], None],
) -> tuple[Workers, ResidentModelRunner, int]:
    """Start every rank; return the workers, this rank's runner, and the number of KV cache blocks.

    Engines that start on one GPU at the same moment may need its last memory together. So a start that runs
    out of memory is tried again, after a random time.

    on_progress: called by any thread for each tensor that loads, and after each call of all ranks.
    Raises the errors of `LLMEngine`; all ranks are then ended.
    """
    for left in range(START_TRIES)[::-1]:
        try:
            return _start_ranks(config, model_config, path, device, max_model_len, on_progress)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            if not left:
                raise KVCacheMemoryError(
                    f"{device.torch} ran out of memory while the engine started ({error}). Close other "
                    "programs on the device, or lower gpu_memory_utilization "
                    f"(now {config.gpu_memory_utilization}), max_num_batched_tokens or max_num_seqs"
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


def _start_ranks(
    config: Config,
    model_config: ModelConfig,
    path: Path,
    device: Device,
    max_model_len: int,
    on_progress: Callable[[], None],
) -> tuple[Workers, ResidentModelRunner, int]:
    """One try."""
    config = replace(config, tokenizer=None, hf_token=None)  # no rank needs them
    size = config.tensor_parallel_size
    devices = device.ranks(size)
    dtype = device.resolve_dtype(config.dtype, model_config.dtype)
    need = weight_bytes(model_config, TPGroup(0, size), dtype)
    rendezvous = Rendezvous() if size > 1 else None
    folder = rendezvous.folder if rendezvous else ""
    setups = [
        RankSetup(rank, size, devices[rank], folder, config, model_config, path, max_model_len)
        for rank in range(size)
    ]
    workers = Workers(setups[1:], config.distributed_timeout_seconds, on_progress)
    runner: ResidentModelRunner | None = None
    try:
        check_weights_fit(need, [device.memory(), *workers.collect("the start")], config, device)
        runner, *_ = workers.call(lambda: _load(workers, setups[0], device, rendezvous), "load")
        workers.call(runner.calibrate_kv_cache, "calibrate_kv_cache")
        reserve = max(workers.call(runner.warmup_model, "warmup_model"))
        num_blocks = _allocate_kv_cache(workers, runner, reserve)
        workers.call(runner.capture_cudagraph, "capture_cudagraph", logger.isEnabledFor(logging.INFO))
        return workers, runner, num_blocks
    except BaseException:
        workers.kill()
        if runner is not None:
            runner.exit()
        if rendezvous is not None:
            rendezvous.close()
        raise


def _allocate_kv_cache(workers: Workers, runner: ResidentModelRunner, reserve: int) -> int:
    """Allocate the KV cache on every rank and return its number of blocks.

    Other processes may take memory between the measurement and the allocation; then measure again.
    """
    most = runner.config.max_num_seqs * runner.max_blocks
    for _ in range(KV_CACHE_TRIES):
        spaces = workers.call(runner.measure_kv_cache, "measure_kv_cache", reserve)
        num_blocks = fit_kv_cache(spaces, runner.config, runner.block_size, most)
        if all(workers.call(runner.try_kv_cache, "try_kv_cache", num_blocks)):
            return num_blocks
        logger.warning("the memory for the KV cache was taken while the engine started; measuring it again")
    allocated = workers.call(runner.allocate_kv_cache, "allocate_kv_cache", num_blocks)
    assert set(allocated) == {num_blocks}, "every rank has as many blocks as the scheduler"
    return num_blocks


def stop_ranks(workers: Workers, runner: ResidentModelRunner) -> None:
    """End the workers, then free this rank's memory."""
    workers.stop()
    runner.exit()


def _load(
    workers: Workers, setup: RankSetup, device: Device, rendezvous: Rendezvous | None
) -> ResidentModelRunner:
    """Meet the other ranks, if there are any, and load this rank's part of the model."""
    group = TPGroup()
    if rendezvous is not None:
        workers.watch.on_failure(rendezvous.leave)
        group = workers.watched(lambda: setup.join_group(device, rendezvous))
        workers.watch.on_failure(group.abort)
    return setup.load(device, group, workers.watch.progress)
