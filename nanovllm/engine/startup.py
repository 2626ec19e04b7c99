"""What an engine finds before it starts: the model's folder, its tokenizer and defaults, and the length of
sequences that it can compute. Loads no weights and keeps no state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.attention.backends import cache_dtype
from nanovllm.batch import SAMPLING_PARAMETERS
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.device_facts import CPU_KV_CACHE_BYTES
from nanovllm.doors import EXTRAS, MIXTURES, MODEL_OPTIONS, STATES, TEXT, Table, cpu_door, find
from nanovllm.errors import ModelLoadError
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import (
    GENERATION_FILE,
    MODULES_FILE,
    Hub,
    load_model_config,
    open_checkpoint,
    resolve_model_path,
)
from nanovllm.models.weights import check_weights, find_head
from nanovllm.params import SamplingParams
from nanovllm.runner.memory import CALIBRATION_TOKENS
from nanovllm.text.processor import Processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")

TABLE_BYTES = 2**30  # the most that tables for each position take on a CPU
_EXTRAS: Table[Any] = Table(EXTRAS)
_TEXT: Table[Any] = Table(TEXT)
_CPU_STEP = 2048  # prompt tokens of a step on a CPU: activations of more do not stay in its caches
_LARGEST_BLOCK = 256  # tokens; no attention backend has larger blocks by default

# The keys that are used, with the names of their parameters.
_PARAMETERS = {name: name for name in (*SAMPLING_PARAMETERS, "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
_ADVICE = "pass sampling_params, or make the LLM with generation_config='vllm'"


class OpenedModel(NamedTuple):
    """What is found in a model's folder before anything is loaded to a device."""

    config: Config
    path: Path
    model_config: ModelConfig
    max_model_len: int  # the one asked for, or the longest that the model supports
    defaults: dict[str, Any]  # sampling parameters that the model recommends
    processor: Processor
    embedding: Any  # how its files make embeddings of hidden states; None: they do not say it


def open_model(config: Config) -> OpenedModel:
    """Find and check the model that `config` names. Errors as in `LLMEngine`."""
    device = Device(config.device)
    device.ranks(config.tensor_parallel_size, config.data_parallel_size)  # before a model is downloaded
    if not device.is_cuda:
        cpu_door("say_what_is_missing")()
    elif config.num_threads is not None:
        logger.warning("num_threads=%d does nothing on a GPU", config.num_threads)
    if not device.is_cuda and config.max_num_batched_tokens > _CPU_STEP:
        config = replace(config, max_num_batched_tokens=_CPU_STEP)
    path = find_model(config)
    option, changes = config.generation_config, config.override_generation_config or {}
    generation = read_generation_config(option, path)
    model_config = read_model_config(config, path, generation, device)
    if not device.is_cuda and config.dtype == "auto":
        chosen = str(device.resolve_dtype("auto", model_config.dtype)).removeprefix("torch.")
        logger.info("dtype: %s on this CPU (the checkpoint's is %s)", chosen, model_config.dtype)
    for note in model_config.quant.notes:
        logger.warning("%s", note)
    defaults = overridden(generation, option, changes)
    model_config.check_tensor_parallel_size(config.tensor_parallel_size)
    if any(spec.state is not None for spec in model_config.attention):
        config, model_config = find(STATES["opened"])(config, model_config, device)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    model_config = model_config.rotated_up_to(max_model_len)
    processor = make_processor(config, path, model_config)
    if config.load_format == "auto":
        check_weights(model_config, path)
    embedding = _EXTRAS["embedding"](path, model_config) if (path / MODULES_FILE).is_file() else None
    return OpenedModel(config, path, model_config, max_model_len, defaults, processor, embedding)


def read_model_config(config: Config, path: Path, generation: dict[str, Any], device: Device) -> ModelConfig:
    """The config of the model in `path`, whose weights are stored as this device can use them."""
    model = load_model_config(path, generation, config.hf_overrides, config.quantization)
    if config.load_format == "auto" and open_checkpoint(path).files()[1]:
        model = find_head(model, path)
    asked = [place for option, place in MODEL_OPTIONS.items() if getattr(config, option)]
    for place in dict.fromkeys(asked if model.moe is None else [MIXTURES, *asked]):
        model = find(place)(config, model, device)
    return replace(model, quant=model.quant.on(device.capability))


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
        return config.tokenizer
    path = model_path
    if config.tokenizer is not None or config.tokenizer_revision not in (None, config.revision):
        name = config.model if config.tokenizer is None else config.tokenizer
        path = resolve_model_path(name, _hub(config, config.tokenizer_revision), "tokenizer")
    return open_checkpoint(path).tokenizer(lambda folder: load_tokenizer(folder, config.trust_remote_code))


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `path`, which gives the ids of its files; `trust_remote_code` runs code from that
    folder.

    Raises ModelLoadError that says what to do without a tokenizer.
    """
    # Here, because importing them takes as long as importing torch.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if type(tokenizer).__name__.startswith("MistralCommon"):  # of a tekken.json beside the tokenizer.json
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        if not tokenizer("a")["input_ids"]:  # transformers' result for a folder without tokenizer files
            raise ValueError("its vocabulary is empty")
        _TEXT["match_files"](tokenizer, Path(path))
    except ModelLoadError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise ModelLoadError(
            f"no tokenizer could be loaded from {path} ({error}); put the model's tokenizer files there, "
            "pass a folder that has them as tokenizer, or pass skip_tokenizer_init=True and token ids as "
            "prompts"
        ) from error
    return tokenizer


def make_processor(config: Config, path: Path, model_config: ModelConfig) -> Processor:
    """The processor with the model's tokenizer and its ends of answers. Errors as of `find_tokenizer`."""
    tokenizer, ends = find_tokenizer(config, path), model_config.eos_token_ids
    make: Callable[..., Processor] = Processor
    if config.reasoning_parser is not None or config.tool_parser is not None:
        make = partial(_TEXT["parsing"], config)
    processor = make(tokenizer, model_config.vocab_size, ends, config.max_logprobs)
    if not open_checkpoint(path).states_ends:
        _TEXT["written_end"](processor)
    return processor


def _hub(config: Config, revision: str | None) -> Hub:
    return Hub(revision, config.download_dir, config.hf_token, config.trust_remote_code)


def read_generation_config(option: str, model_folder: Path) -> dict[str, Any]:
    """Read the file of the model, or of the folder that `option` of `Config` names.

    Raises ValueError if that folder has no such file, ModelLoadError if the file is unreadable.
    """
    if option in ("auto", "vllm"):
        return open_checkpoint(model_folder).generation()
    folder = Path(option).expanduser()
    if not (folder / GENERATION_FILE).is_file():
        raise ValueError(
            f"generation_config must be 'auto', 'vllm' or a folder with {GENERATION_FILE}, not {option!r}"
        )
    return open_checkpoint(folder).generation()


def overridden(generation: Mapping[str, Any], option: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The file's sampling parameters, with `changes` replacing its values; `option` as in `Config`.

    `do_sample: false` in the file means greedy, as in transformers, unless `changes` set a temperature.

    ValueError or TypeError for a key that is no sampling parameter, or a wrong value in `changes`.
    """
    unknown = changes.keys() - _PARAMETERS.keys()
    if unknown:
        raise ValueError(
            f"override_generation_config: {min(map(str, unknown))!r} is none of {', '.join(_PARAMETERS)}; "
            "pass other parameters as SamplingParams"
        )
    _params(changes, "override_generation_config: {}")
    found = dict({} if option == "vllm" else generation) | dict(changes)
    if found.get("do_sample") is False and changes.get("temperature") is None:
        found["temperature"] = 0.0
    return found


def recommended_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Return SamplingParams with the file's values; null means the default. ValueError or TypeError for a
    wrong value."""
    return _params(generation, f"{GENERATION_FILE}: {{}}; {_ADVICE}")


def _params(generation: Mapping[str, Any], message: str) -> SamplingParams:
    """SamplingParams with these values; `message` is a format string for errors."""
    values = {_PARAMETERS[key]: generation[key] for key in _PARAMETERS if generation.get(key) is not None}
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(message.format(error)) from None


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
    whose tables take TABLE_BYTES. So no table is made for positions that nothing can use. An FP8 cache gets
    its scales from as many tokens whatever its size."""
    # Layers with a window need no more memory for longer sequences.
    limited, ranks = model_config.up_to(max_model_len), config.tensor_parallel_size
    values, most_values = limited.cached_values(ranks, far=True), limited.cached_values(ranks)
    dtype = device.resolve_dtype(config.dtype, model_config.dtype)
    item = cache_dtype(config.kv_cache_dtype, dtype).itemsize
    num_bytes = device.memory()[1] if device.is_cuda else CPU_KV_CACHE_BYTES // ranks
    block = config.kvcache_block_size or _LARGEST_BLOCK
    most = (config.kv_cache_memory_bytes or num_bytes) // (max(values, 1) * item)
    if config.num_kvcache_blocks is not None:
        most = config.num_kvcache_blocks * block * (most_values // max(values, 1))
    most = most if values else max_model_len
    if config.num_kvcache_blocks is None and not device.is_cuda:
        widest = max(spec.head_dim for spec in model_config.attention)
        tables = 24 * config.max_num_seqs // (config.kvcache_block_size or 16) + 12 * widest
        most = min(most, TABLE_BYTES // tables)  # block tables, and rope's with what computing it takes
    most += block  # so that an error names the cache as the limit
    return min(max_model_len, most if config.kv_cache_dtype == "auto" else max(most, CALIBRATION_TOKENS))
