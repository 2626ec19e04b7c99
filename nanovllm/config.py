"""Config: what the user asked for, checked, frozen. It never holds a fact found at run time."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.vllm_arguments import ENGINE, refuse_absent

CHOICES = {
    "logprobs_mode": ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "fp8"),
    "load_format": ("auto", "dummy"),
    "attention_backend": ("auto", "flash_attn", "triton", "reference"),
}
SAME: dict[str, dict[str | int, str | None]] = {  # other names of a value, as vLLM and torch have them
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto"},
    "max_model_len": {"auto": None, -1: None},
}


@dataclass(frozen=True)
class Config:
    """The options of `LLM`; every mistake is a ValueError or TypeError that names the value and the fix.

    None stands for an option's default.

    model: a folder with config.json and *.safetensors, or a Hugging Face hub id.
    tensor_parallel_size: how many devices share the model.
    max_num_batched_tokens: the most prompt tokens that one prefill step computes; longer prompts go in
    chunks.
    max_num_seqs: the most sequences that run at once.
    max_model_len: the most tokens of a sequence, prompt and output; None takes the model's own limit, and a
    larger value is lowered to it.
    gpu_memory_utilization: the share of the device's memory that the engine may fill, others' use included.
    enforce_eager: do not capture CUDA graphs.
    kvcache_block_size: tokens per KV cache block; None takes the attention backend's own.
    num_kvcache_blocks: blocks to allocate; None takes what fits.
    kv_cache_dtype: "auto" (the model's own) or "fp8": half the memory and less to read, a little less exact.
    enable_prefix_caching: share the KV blocks of equal prompt beginnings.
    attention_backend: "auto", "flash_attn", "triton" or "reference".
    device: "auto", "cpu", "cuda" or "cuda:N", or a torch.device.
    dtype: "auto" (the checkpoint's own on a GPU, float32 on a CPU), "float32", "bfloat16" or "float16", or a
    torch.dtype.
    load_format: "auto" reads the weights, "dummy" makes random ones from config.json alone.
    skip_tokenizer_init: load no tokenizer; prompts are then token ids and outputs have no text.
    deterministic: a token's logits have the same bits in any batch, chunk or graph; for a price in speed.
    seed: what unseeded requests and dummy weights are drawn from.
    async_scheduling: launch a step before the last one's tokens have been read; None does so on a GPU, where
    the device works meanwhile.
    generation_config: whose generation_config.json says how to sample without `sampling_params`: "auto" (the
    model's), "vllm" (no one's; its end-of-sequence ids count) or a folder (instead of the model's).
    max_logprobs: the most that `logprobs` and `prompt_logprobs` may ask for; -1: the whole vocabulary.
    logprobs_mode: what they tell: "raw_logprobs" (of the model's own logits), "processed_logprobs" (after
    penalties, masks, temperature and filters), "raw_logits" or "processed_logits". Those of prompts are raw.
    """

    model: str
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
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
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    deterministic: bool = False
    seed: int = 0
    async_scheduling: bool | None = None
    generation_config: str = "auto"
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"

    @classmethod
    def from_kwargs(cls, model: str | os.PathLike[str], **kwargs: Any) -> Config:
        """Build a Config. An unknown option is a TypeError with the nearest name; one of vLLM's that is not
        built may have a value that asks for nothing, and any other is a ValueError."""
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(
                f"model must be a folder or a Hugging Face hub id, a str or a Path, not {model!r}"
            )
        known = [field.name for field in fields(cls)]
        absent = {name: value for name, value in kwargs.items() if name not in known}
        if absent.get("tokenizer") is not None and str(absent["tokenizer"]) == str(model):
            del absent["tokenizer"]  # which is where it comes from
        refuse_absent("LLM()", absent, ENGINE, known[1:])
        options = {name: kwargs[name] for name in known[1:] if kwargs.get(name) is not None}
        return cls(os.fspath(model), **{name: _usual(name, value) for name, value in options.items()})

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must be a folder or a Hugging Face hub id, and it is empty")
        for name in ("tensor_parallel_size", "max_num_batched_tokens", "max_num_seqs"):
            _check_int(name, getattr(self, name), minimum=1)
        for name in ("max_model_len", "kvcache_block_size", "num_kvcache_blocks"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), minimum=1)
        _check_int("seed", self.seed, minimum=0)
        _check_int("max_logprobs", self.max_logprobs, minimum=-1)
        for name in ("enforce_eager", "enable_prefix_caching", "skip_tokenizer_init", "deterministic"):
            _check_bool(name, getattr(self, name))
        if self.async_scheduling is not None:
            _check_bool("async_scheduling", self.async_scheduling)
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, (int, float)):
            raise TypeError(f"gpu_memory_utilization must be a number, not {utilization!r}")
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {utilization}")
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
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {self.device!r}")


def _usual(name: str, value: Any) -> Any:
    """The value as `Config` holds it: a text for a path or an object of torch, ours for vLLM's others."""
    if name == "generation_config" and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if name in ("dtype", "device") and not isinstance(value, str):
        value = str(value).removeprefix("torch.")
    same = SAME.get(name, {})
    return same[value] if isinstance(value, (str, int)) and value in same else value


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
