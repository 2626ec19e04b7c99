"""Config: the user's options, checked and frozen. It never holds a fact found at run time.

`versions` names the packages that answers depend on, and imports none of them.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from nanovllm.checks import check_bool
from nanovllm.names import others_of, refuse_unknown
from nanovllm.params import SamplingParams

logger = logging.getLogger("nanovllm")

CHOICES = {
    "logprobs_mode": ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "fp8"),
    "load_format": ("auto", "dummy"),
    "attention_backend": ("auto", "flash_attn", "triton", "cpu", "reference"),
}
_ALIASES: dict[str, dict[str | int, str | None]] = {  # other names of a value, from vLLM and torch
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "attention_backend": {"FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton"},
    "max_model_len": {"auto": None, -1: None},
    "reasoning_parser": {"": None},
}
_OTHER_DEVICES = ("mps", "metal", "rocm", "hip", "xpu", "hpu", "npu", "tpu", "xla")
# vLLM's names
RENAMED = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
    "enable_return_routed_experts": "return_routed_experts",
}


@dataclass(frozen=True)
class Config:
    """The options of `LLM`. Every mistake raises ValueError or TypeError with the value and the fix.

    None means an option's default.

    model: a folder with config.json and *.safetensors, or a Hugging Face hub id.
    tensor_parallel_size: the number of devices that share the model.
    data_parallel_size: the number of replicas of the model, each on its own tensor_parallel_size devices.
    distributed_timeout_seconds: the seconds for which the other ranks and replicas may make no progress. Each
    loaded tensor, finished step and finished call is progress, so a slow load may take any time.
    max_num_batched_tokens: the maximum number of prompt tokens in one prefill step, on a CPU never more than
    2048; longer prompts are computed in chunks.
    max_num_seqs: the maximum number of sequences that run at once.
    max_model_len: the maximum number of tokens of a sequence, prompt and output. None takes the model's own
    limit; a larger value is lowered to that limit, and either to what the KV cache can hold.
    gpu_memory_utilization: this engine's share of the device's memory, at most what is free. It
    does nothing on a CPU.
    enforce_eager: do not capture CUDA graphs.
    kvcache_block_size: tokens in a KV cache block; None takes the attention backend's default.
    num_kvcache_blocks: blocks to allocate; None allocates what fits and `max_num_seqs` sequences may need.
    kv_cache_dtype: "auto" (the model's dtype) or "fp8": half the memory and traffic, slightly less exact.
    enable_prefix_caching: compute what prompts have in common at their beginning once.
    attention_backend: "auto", "flash_attn", "triton", "cpu" or "reference".
    device: "auto", "cpu", "cuda" or "cuda:N", or a torch.device.
    dtype: "auto" (the checkpoint's dtype on a GPU; on a CPU that multiplies bfloat16 faster than float32 that
    of a checkpoint in bfloat16, else float32), "float32", "bfloat16" or "float16", or a torch.dtype.
    quantization: None (as config.json or the GGUF file says), "fp8" or, on a CPU, "int8" or "int4" (weights
    in 16 or 32 bits become these as they are loaded), "dequantize" (those of a GGUF file become floats), or
    the quant_method that config.json has.
    load_format: "auto" reads the weights, "dummy" makes random ones from config.json alone. Both load the
    tokenizer, unless `skip_tokenizer_init` is on.
    skip_tokenizer_init: load no tokenizer; prompts are then token ids and outputs have no text.
    deterministic: a token's logits have the same bits in any batch, chunk or graph, at a cost in speed.
    seed: the seed of dummy weights and of requests without their own seed.
    async_scheduling: launch a step before the previous step's tokens are read; None means yes on a GPU, no on
    a CPU.
    generation_config: which generation_config.json sets the sampling parameters when `sampling_params` is not
    given: "auto" (the model's), "vllm" (none, except for end-of-sequence ids) or a folder with the file.
    max_logprobs: the maximum of `logprobs` and `prompt_logprobs`; -1: the whole vocabulary.
    override_generation_config: values that replace those of generation_config.json, such as
    {"temperature": 0.2}; the value None removes a key.
    tokenizer: a folder or hub id of another tokenizer, or a transformers tokenizer.
    revision: a branch, tag or commit of the model on the hub; None takes the main branch.
    tokenizer_revision: the same for the tokenizer; for the model's own tokenizer None takes `revision`.
    trust_remote_code: run code that comes with the tokenizer. A model's code never runs.
    hf_overrides: values that replace those of config.json, such as {"rope_theta": 1000000}.
    download_dir: the folder for models from the hub; None takes the hub's default.
    hf_token: the access token for the hub; True takes the token of `hf auth login`.
    kv_cache_memory_bytes: the size of the KV cache on each device; it replaces `gpu_memory_utilization`.
    logprobs_mode: what `logprobs` returns: "raw_logprobs" (from the model's own logits), "processed_logprobs"
    (after penalties, masks, temperature and filters), "raw_logits" or "processed_logits". Those of prompts
    are always raw.
    num_threads: the threads of a CPU that this engine uses, shared by its ranks; None takes as many as torch
    uses, the physical cores that the process may use. It does nothing on a GPU.
    return_routed_experts: the outputs of a mixture of experts say which experts computed each token.
    reasoning_parser: takes the thinking out of the text: "auto" (as the template shows) or a family's name.
    tool_parser: takes tool calls out of the text: "auto" or a family's name, such as "hermes".
    """

    model: str
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_timeout_seconds: int = 600
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 1024
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    deterministic: bool = False
    seed: int = 0
    async_scheduling: bool | None = None
    generation_config: str = "auto"
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    override_generation_config: Mapping[str, Any] | None = None
    tokenizer: Any = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, Any] | None = None
    download_dir: str | None = None
    hf_token: str | bool | None = field(default=None, repr=False)
    kv_cache_memory_bytes: int | None = None
    num_threads: int | None = None
    return_routed_experts: bool = False
    reasoning_parser: str | None = None
    tool_parser: str | None = None

    @classmethod
    def from_kwargs(cls, model: str | os.PathLike[str] | None, **kwargs: Any) -> Config:
        """Build a Config. An unknown option raises TypeError with the nearest name. A vLLM option that is not
        supported raises ValueError, unless it has a neutral value."""
        kwargs = _renamed(kwargs)
        known = [each.name for each in fields(cls)]
        absent = {name: value for name, value in kwargs.items() if name not in known}
        if absent:
            _check_absent(absent, known)
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(
                f"model must be a folder or a Hugging Face hub id, a str or a Path, not {model!r}"
            )
        tokenizer = kwargs.get("tokenizer")
        if isinstance(tokenizer, (str, os.PathLike)) and os.fspath(tokenizer) in ("", os.fspath(model)):
            del kwargs["tokenizer"]  # the model's own tokenizer, the default
        options = {name: kwargs[name] for name in known[1:] if kwargs.get(name) is not None}
        return cls(os.fspath(model), **{name: _canonical(name, value) for name, value in options.items()})

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must be a folder or a Hugging Face hub id, and it is empty")
        for name in ("tensor_parallel_size", "data_parallel_size", "max_num_batched_tokens", "max_num_seqs"):
            _check_int(name, getattr(self, name), minimum=1)
        sizes = "max_model_len", "kvcache_block_size", "num_kvcache_blocks", "kv_cache_memory_bytes"
        for name in (*sizes, "num_threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), minimum=1)
        _check_int("distributed_timeout_seconds", self.distributed_timeout_seconds, minimum=1)
        _check_int("seed", self.seed, minimum=0)
        _check_int("max_logprobs", self.max_logprobs, minimum=-1)
        flags = ("enforce_eager", "enable_prefix_caching", "skip_tokenizer_init", "deterministic")
        for name in (*flags, "trust_remote_code", "return_routed_experts"):
            check_bool(name, getattr(self, name))
        if self.async_scheduling is not None:
            check_bool("async_scheduling", self.async_scheduling)
        self._check_files()
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, (int, float)):
            raise TypeError(f"gpu_memory_utilization must be a number, not {utilization!r}")
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {utilization}; 0.9 is 90 %")
        if not isinstance(self.generation_config, str):
            raise TypeError(
                f"generation_config must be 'auto', 'vllm' or a folder, not {self.generation_config!r}"
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, choices))}, not {getattr(self, name)!r}"
                )
        if self.deterministic and self.attention_backend not in ("auto", "triton"):
            raise ValueError(
                f"deterministic=True needs attention_backend='triton' (or 'auto'), not "
                f"{self.attention_backend!r}, whose bits depend on the batch"
            )
        if self.deterministic and self.tensor_parallel_size > 1:
            raise ValueError(
                f"deterministic=True needs tensor_parallel_size=1, not {self.tensor_parallel_size}: "
                "how the GPUs' parts are summed depends on the size of the step"
            )
        if self.return_routed_experts and self.enable_prefix_caching:
            raise ValueError(
                "return_routed_experts=True needs enable_prefix_caching=False: no experts compute the tokens "
                "that come from the prefix cache"
            )
        if self.kv_cache_memory_bytes is not None and self.num_kvcache_blocks is not None:
            raise ValueError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} and num_kvcache_blocks="
                f"{self.num_kvcache_blocks} both set the size of the KV cache; pass only one of them"
            )
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
            fix = (
                "; GPUs that are not NVIDIA's are not supported, use 'cpu'" if kind in _OTHER_DEVICES else ""
            )
            fix = "; an NVIDIA GPU is 'cuda'" if kind in ("gpu", "nvidia") else fix
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {self.device!r}{fix}")

    def _check_files(self) -> None:
        """Check the options about files."""
        for name in ("revision", "tokenizer_revision", "download_dir", "quantization"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise TypeError(f"{name} must be a string that is not empty, not {value!r}")
        if self.hf_token is not None and not isinstance(self.hf_token, (str, bool)):
            raise TypeError(f"hf_token must be a string, True or False, not a {type(self.hf_token).__name__}")
        for name in ("hf_overrides", "override_generation_config"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"{name} must be a dictionary of values of the file, not {value!r}")
        if self.tokenizer is None:
            return
        if self.skip_tokenizer_init:
            raise ValueError(
                f"skip_tokenizer_init=True loads no tokenizer, and tokenizer={self.tokenizer!r} asks for "
                "one; pass only one of them"
            )
        if not isinstance(self.tokenizer, str):
            if not all(hasattr(self.tokenizer, name) for name in ("get_vocab", "convert_ids_to_tokens")):
                raise TypeError(
                    "tokenizer must be a folder, a Hugging Face hub id or a transformers tokenizer, not "
                    f"{self.tokenizer!r}"
                )
            if self.tokenizer_revision is not None:
                raise ValueError(
                    f"tokenizer_revision={self.tokenizer_revision!r} is for a hub id, and tokenizer is an "
                    "object; leave it out"
                )


def _check_absent(absent: Mapping[str, Any], known: list[str]) -> None:
    """Check options that `Config` does not have. One of another library may be accepted, with a warning."""
    others = others_of("LLM")
    for name in absent:
        if name in SamplingParams.__dataclass_fields__ and name not in others:
            raise TypeError(f"LLM() got {name!r}; pass it to generate() as SamplingParams({name}=...)")
    refuse_unknown("LLM", absent, known)
    for name, value in absent.items():
        is_nothing = isinstance(value, (type(None), list, tuple, dict, str, set)) and not value
        if others[name].neutral is None and others[name].advice and not is_nothing:
            logger.warning(f"{name}={value!r} has no effect here; {others[name].advice}")


def _renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under our names. ValueError if both names of an option are given and differ."""
    found = {name: value for name, value in arguments.items() if name not in RENAMED}
    for name in RENAMED.keys() & arguments.keys():
        ours, value = RENAMED[name], arguments[name]
        if value is None:
            continue
        if found.get(ours) not in (None, value):
            raise ValueError(f"{name}={value!r} and {ours}={found[ours]!r} are one option; pass one of them")
        found[ours] = value
    return found


def _canonical(name: str, value: Any) -> Any:
    """The value as `Config` holds it: a string for a path or torch object, a Python number for a NumPy one,
    one name of several."""
    if isinstance(value, np.generic):
        value = value.item()
    if name in ("generation_config", "tokenizer", "download_dir") and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if name in ("hf_overrides", "override_generation_config") and value == {}:
        return None
    if name in ("dtype", "device"):
        value = str(value).removeprefix("torch.")
    same = _ALIASES.get(name, {})
    return same[value] if isinstance(value, (str, int)) and value in same else value


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")


_PACKAGES = ("nanovllm", "torch", "transformers", "tokenizers", "triton", "numpy")


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """The versions of Python, of the packages that answers depend on, and of the packages `more`, by name."""
    found = {"python": platform.python_version()}
    for name in (*_PACKAGES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
