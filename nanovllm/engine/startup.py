"""Start and end of all ranks: either all of them start, with captured CUDA graphs, or nothing is left.

Decides the maximum length of sequences. Keeps no state.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.device import CPU_KV_CACHE_BYTES, Device
from nanovllm.distributed.group import TPGroup
from nanovllm.distributed.rendezvous import Rendezvous
from nanovllm.models.config import ModelConfig
from nanovllm.models.files import check_tokenizer_files
from nanovllm.models.loader import Hub, resolve_model_path, weight_bytes
from nanovllm.runner.memory import check_weights_fit, fit_kv_cache
from nanovllm.runner.residency import ResidentModelRunner
from nanovllm.text.tokenizer import load_tokenizer
from nanovllm.workers.worker import RankSetup, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")

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
    check_tokenizer_files(path)
    return load_tokenizer(path, config.trust_remote_code)


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
    config: Config, model_config: ModelConfig, path: Path, device: Device, max_model_len: int
) -> tuple[Workers, ResidentModelRunner, int]:
    """Start every rank; return the workers, this rank's runner, and the number of KV cache blocks.

    Raises the errors of `LLMEngine`; all ranks are then ended.
    """
    config = replace(config, tokenizer=None, hf_token=None)  # no rank needs them
    size = config.tensor_parallel_size
    devices = device.ranks(size)
    dtype = device.resolve_dtype(config.dtype, model_config.dtype)
    need = weight_bytes(model_config, TPGroup(0, size), dtype)
    rendezvous = Rendezvous() if size > 1 else None
    port = rendezvous.port if rendezvous else 0
    setups = [
        RankSetup(rank, size, devices[rank], port, config, model_config, path, max_model_len)
        for rank in range(size)
    ]
    workers = Workers(setups[1:])
    runner: ResidentModelRunner | None = None
    try:
        check_weights_fit(need, [device.memory(), *workers.collect()], config, device)
        runner, *_ = workers.call(lambda: _load(workers, setups[0], device, rendezvous), "load")
        workers.call(runner.calibrate_kv_cache, "calibrate_kv_cache")
        reserve = max(workers.call(runner.warmup_model, "warmup_model"))
        spaces = workers.call(runner.measure_kv_cache, "measure_kv_cache", reserve)
        most = config.max_num_seqs * runner.max_blocks
        num_blocks = fit_kv_cache(spaces, config, runner.block_size, most)
        allocated = workers.call(runner.allocate_kv_cache, "allocate_kv_cache", num_blocks)
        assert set(allocated) == {num_blocks}, "every rank has as many blocks as the scheduler"
        workers.call(runner.capture_cudagraph, "capture_cudagraph", logger.isEnabledFor(logging.INFO))
        return workers, runner, num_blocks
    except BaseException:
        workers.kill()
        if runner is not None:
            runner.exit()
        if rendezvous is not None:
            rendezvous.close()
        raise


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
    return setup.load(device, group, workers.watch.check)
