"""The command `nanovllm doctor`: what this machine has, what would be chosen and why, and if a model can run.

Loads no weights and allocates nothing on a device. Of a model on the hub it downloads the small files alone.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from nanovllm.attention.backends import BACKENDS, cache_dtype, select
from nanovllm.config import Config
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.engine.startup import (
    find_tokenizer,
    overridden,
    read_generation_config,
    read_model_config,
    recommended_params,
    resolve_max_model_len,
)
from nanovllm.errors import KVCacheMemoryError, ModelLoadError
from nanovllm.extras.embedding import read_embedding_defaults
from nanovllm.jobs.about import version
from nanovllm.jobs.errors import ANSWERED, REFUSED
from nanovllm.jobs.job import engine_options
from nanovllm.layers.stream import Group
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import Checkpoint, Hub, open_checkpoint, resolve_model_path, shortened
from nanovllm.models.weights import check_weights, weight_bytes
from nanovllm.moe.layers import MoESpec
from nanovllm.moe.options import placed
from nanovllm.runner.memory import check_weights_fit
from nanovllm.states.spec import pool_bytes

_GIB = 2**30


def doctor(args: argparse.Namespace) -> int:
    """Print the verdict, what it rests on, and the machine; return 0 if the model can run, or if there is
    none, and 2 if it cannot."""
    found: list[str] = []
    logger = logging.getLogger("nanovllm")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it says of a start is printed here
    verdict, code = "it can run here", ANSWERED
    try:
        config = Config.from_kwargs(args.model or ".", **engine_options(args))
        device = Device(config.device)
        found += _devices(config, device)
        if args.model is None:
            verdict = "pass a model, a folder or a hub id, to see whether it can run here"
        else:
            found.append(f"model {args.model}")
            for line in _model(config, device):
                found.append("  " + line)
    except (ValueError, TypeError, ImportError, ModelLoadError, KVCacheMemoryError) as error:
        verdict, code = f"it cannot run here: {error}", REFUSED
    finally:
        logger.setLevel(level)
    print("\n".join([verdict, *found, "", "this machine:"]))
    version(args)
    return code


def _devices(config: Config, device: Device) -> Iterator[str]:
    """The devices that would be used, and why. ValueError if there are too few."""
    why = "asked for"
    if config.device == "auto":
        why = "a GPU comes first" if device.is_cuda else "there is no GPU that torch can use"
    yield f"device: {device.torch} ({why})"
    if not device.is_cuda:
        isa.level()
        with device.share_of_threads(config.tensor_parallel_size, config.num_threads):
            yield f"kernels for CPUs: {isa.described(torch.get_num_threads())}"
    count = config.tensor_parallel_size * config.data_parallel_size
    if count > 1:
        names = device.ranks(config.tensor_parallel_size, config.data_parallel_size)
        yield f"all ranks: {', '.join(names)}"


def _model(config: Config, device: Device) -> Iterator[str]:
    """What would be chosen for a model. Raises the error of a start that would fail."""
    path = _folder(config)
    checkpoint = open_checkpoint(path)
    generation = read_generation_config(config.generation_config, path)
    model = read_model_config(config, path, generation, device)
    yield f"architecture {model.architecture}, {model.num_layers} layers, vocabulary of {model.vocab_size:,}"
    changes = config.override_generation_config or {}
    recommended_params(overridden(generation, config.generation_config, changes))
    size = config.tensor_parallel_size
    model.check_tensor_parallel_size(size)
    dtype = device.resolve_dtype(config.dtype, model.dtype)
    yield f"dtype: {str(dtype).removeprefix('torch.')} (the checkpoint's is {model.dtype})"
    if config.quantization or model.quant.notes:
        yield f"quantised weights: {'; '.join(model.quant.notes) or config.quantization}"
    if isinstance(model.moe, MoESpec) and size > 1:
        yield placed(model.moe, size)
    pooling = read_embedding_defaults(path, model).pooling
    if model.head:
        yield f"no LM head: {model.head}; the labels are {shortened(', '.join(model.head.labels))}"
    elif not model.has_head:
        yield f"no LM head: it makes embeddings alone, by default of {pooling} hidden states"
    cached = cache_dtype(config.kv_cache_dtype, dtype)
    yield _backend(config, device, model, (dtype, cached))
    longest = resolve_max_model_len(config.max_model_len, model)
    yield f"max_model_len: {longest:,} of the model's {model.max_position_embeddings:,} positions"
    yield from _tokenizer(config, path)
    need = weight_bytes(model, Group(0, size), dtype)
    free, total = device.memory()
    each = f" on each of {size} devices" if size > 1 else ""
    yield f"weights: {need / _GIB:.2f} GiB{each}; {free / _GIB:.2f} of {total / _GIB:.2f} GiB are free"
    check_weights_fit(need, [(free, total)] * size, config, device)
    yield from _files(checkpoint, model, config)
    yield _room(config, device, model, (need, cached.itemsize, longest))


def _folder(config: Config) -> Path:
    """The model's folder; of a hub id the one with its small files."""
    hub = Hub(config.revision, config.download_dir, config.hf_token, config.trust_remote_code)
    path = Path(config.model).expanduser()
    try:
        return resolve_model_path(config.model, hub, "model" if path.exists() else "tokenizer")
    except (ValueError, ModelLoadError) as error:
        raise type(error)(str(error).replace("tokenizer", "model", 1)) from None


def _backend(
    config: Config, device: Device, model: ModelConfig, dtypes: tuple[torch.dtype, torch.dtype]
) -> str:
    dtype, cached = dtypes
    asked, specs = config.attention_backend, model.attention
    chosen = select(asked, device, dtype, specs, cached, config.deterministic)
    reasons = []
    for backend in BACKENDS.values():
        if isinstance(chosen, backend):
            break
        reason = backend.unavailable(device, dtype, cached) or backend.unsupported(specs)
        reasons.append(f"{backend.name}: {reason or 'only for tests on a CPU'}")
    return f"attention backend: {chosen.name}" + (f" (no {'; no '.join(reasons)})" if reasons else "")


def _tokenizer(config: Config, path: Path) -> Iterator[str]:
    tokenizer = find_tokenizer(config, path)
    if tokenizer is None:
        yield "no tokenizer, because of skip_tokenizer_init: prompts are token ids"
        return
    chats = "it has a chat template"
    if not tokenizer.chat_template:
        chats = "it has no chat template, so chat() needs one; generate() continues texts"
    yield f"tokenizer: {len(tokenizer):,} tokens; {chats}"


def _files(checkpoint: Checkpoint, model: ModelConfig, config: Config) -> Iterator[str]:
    """Whether the files have all weights; a model of the hub may have to be downloaded."""
    if config.load_format == "dummy":
        yield "files: random weights, because of load_format"
    elif Path(config.model).expanduser().exists():
        check_weights(model, checkpoint.path)
        yield "files: all weights are there, with the right shapes"
    else:
        yield "files: the first run downloads what is not there yet"


def _room(config: Config, device: Device, model: ModelConfig, sizes: tuple[int, int, int]) -> str:
    """About how many tokens the KV cache holds. sizes: bytes of the weights and of a cached value, and the
    longest sequence."""
    weights, item, longest = sizes
    per_token = model.cached_values(config.tensor_parallel_size) * item
    budget = config.kv_cache_memory_bytes
    if budget is None:
        states = pool_bytes(config, model, device) if device.is_cuda else 0  # beside the budget on a CPU
        budget = device.kv_cache_budget(config.gpu_memory_utilization, 0, weights + states)[0]
    tokens = max(0, budget) // per_token
    if tokens < 1:
        raise KVCacheMemoryError(f"no room for the KV cache: {max(0, budget) / _GIB:.2f} GiB are left for it")
    fit = f"{tokens / longest:.1f} sequences of {longest:,}"
    return f"KV cache: about {tokens:,} tokens in {budget / _GIB:.2f} GiB, less what activations take: {fit}"
