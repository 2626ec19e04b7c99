"""Start and end of all ranks: either all of them start, with captured CUDA graphs, or nothing is left.

Decides the maximum length of sequences. Keeps no state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.distributed.group import TPGroup
from nanovllm.distributed.rendezvous import Rendezvous
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import Hub, resolve_model_path, weight_bytes
from nanovllm.runner.memory import check_weights_fit, fit_kv_cache
from nanovllm.runner.residency import ResidentModelRunner
from nanovllm.text.tokenizer import load_tokenizer
from nanovllm.workers.worker import RankSetup, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")


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
    return load_tokenizer(path, config.trust_remote_code)


def _hub(config: Config, revision: str | None) -> Hub:
    return Hub(revision, config.download_dir, config.hf_token, config.trust_remote_code)


def resolve_max_model_len(asked: int | None, model_config: ModelConfig) -> int:
    """Return the maximum length of a sequence; None asks for the longest that needs only full attention.

    Raises ValueError if the model cannot compute that many tokens.
    """
    positions = model_config.max_position_embeddings
    if asked is None:
        asked = model_config.longest
        if asked < positions:
            why = "the longest sequence that this model computes with full attention alone"
            logger.info("max_model_len=%d, %s (it has %d positions)", asked, why, positions)
    if asked > positions:
        logger.info("max_model_len=%d is lowered to the model's own limit, %d", asked, positions)
    max_model_len = min(asked, positions)
    model_config.check_max_model_len(max_model_len)
    return max_model_len


def start_ranks(
    config: Config,
    model_config: ModelConfig,
    path: Path,
    device: Device,
    max_model_len: int,
    on_progress: Callable[[], None],
) -> tuple[Workers, ResidentModelRunner, int]:
    """Start every rank; return the workers, this rank's runner, and the number of KV cache blocks.

    on_progress: called by any thread for each tensor that loads, and after each call of all ranks.
    Raises the errors of `LLMEngine`; all ranks are then ended.
    """
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
    return setup.load(device, group, workers.watch.progress)
