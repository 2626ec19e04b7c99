"""Config: the user's options, checked and frozen. It never holds a fact found at run time.

An option is told here, once: the help, the flags of a command line and the table of docs/options.md follow.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from nanovllm.checks import check_bool, check_int
from nanovllm.doors import OTHER_NAMES, Table

T = TypeVar("T")
U = TypeVar("U", contravariant=True)
_OTHERS: Table[Any] = Table(OTHER_NAMES)
_OTHER_DEVICES = ("mps", "metal", "rocm", "hip", "xpu", "hpu", "npu", "tpu", "xla")


class Option(NamedTuple):
    """What is said of an option, in Markdown: the help, the flags and docs/options.md show it."""

    meaning: str
    refused: str = ""
    least: int = 0  # of an integer
    choices: tuple[str, ...] = ()
    also: Mapping[str | int, str | None] = {}  # other names of a value, from vLLM and torch

    @property
    def text(self) -> str:
        """The meaning without links."""
        return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", self.meaning)


def option(
    default: Any,
    meaning: str,
    refused: str = "",
    *,
    secret: bool = False,
    least: int = 0,
    choices: tuple[str, ...] = (),
    also: Mapping[str | int, str | None] | None = None,
) -> Any:
    """A field that tells of itself; arguments as the fields of `Option`."""
    about = Option(meaning, refused, least, choices, also or {})
    return field(default=default, repr=not secret, metadata={"option": about})


def told(cls: type[T]) -> type[T]:
    """Decorates a dataclass: its help says what its options mean."""
    options = [each for each in fields(cls) if "option" in each.metadata]  # type: ignore[arg-type]
    about = [f"{each.name}: {each.metadata['option'].text}" for each in options]
    cls.__doc__ = "\n".join([cleandoc(cls.__doc__ or ""), "", *about])
    return cls


def kind_of(each: Field[Any]) -> str:
    """The type that a field of `Config` holds, if it is not None."""
    return re.sub(r"^Held\[([^,]+).*$", r"\1", str(each.type)).removesuffix(" | None")


if TYPE_CHECKING:

    class Held(Generic[T, U]):
        """An option that is given as U and read as T."""

        def __get__(self, owner: object, of: type | None = None) -> T: ...
        def __set__(self, owner: object, value: U) -> None: ...


@told
@dataclass(frozen=True)
class Config:
    """The options of `LLM`. Every mistake raises ValueError or TypeError with the value and the fix.

    None means an option's default.
    """

    model: str | Path
    _: KW_ONLY
    # fmt: off
    tensor_parallel_size: int = option(1, "GPUs (on a CPU: processes) that share a model, from `device` on.",
        "A number that does not divide the attention heads; more GPUs than there are.", least=1)
    enable_expert_parallel: bool = option(False, "For a mixture of experts: each rank holds [whole "
        "experts](#whole-experts-by-rank), not a part of the width of every one. Two GPUs are as fast with "
        "either.",
        "`tensor_parallel_size=1`; another model; more ranks than experts.")
    data_parallel_size: int = option(1, "[Replicas of the model](#several-replicas), each on its own "
        "`tensor_parallel_size` devices, from that of `device` on. On a CPU they share the host.",
        "Below 1; more GPUs than there are.", least=1)
    distributed_timeout_seconds: int = option(600, "Seconds for which other ranks and replicas may make no "
        "progress while a call waits for them; each loaded tensor, finished step and finished call is "
        "progress. Then a rank ends the engine with `WorkerError`, which names the rank and what it did; "
        "a replica restarts. Raise it if a single step takes longer, such as a long prefill on a CPU. A "
        "start imports for some seconds, so values below 60 may be too short.", "Below 1.", least=1)
    max_num_batched_tokens: int = option(16384, "Prompt tokens in one prefill step, at most; on a CPU "
        "never over 2,048, which are faster. Longer prompts are computed in chunks.", "Below 1.", least=1)
    max_num_seqs: int = option(1024, "Sequences that run at once, at most; fewer of a model with "
        "states, if those of more [take too much memory](#how-memory-is-divided).", "Below 1.", least=1)
    max_model_len: Held[int | None, int | str | None] = option(None, "Tokens of a sequence, prompt and "
        'output, at most. `None`, `"auto"` and `-1`: [the longest](#the-longest-sequence) that the model '
        "supports; a larger value is lowered to its positions, and either to what the KV cache can hold.",
        "Below 1; a length that needs dual chunk attention or dynamic rope beyond the trained length.",
        least=1, also={"auto": None, -1: None})
    gpu_memory_utilization: float = option(0.9, "This engine's share of the GPU's memory, at most what is "
        "free; the start says if that is less. Several engines share a GPU if their shares leave about 2 "
        "GiB for the CUDA context and graphs of each. No effect on a CPU.",
        "Outside (0, 1]; `KVCacheMemoryError` if the weights or one block do not fit.")
    enforce_eager: bool = option(False, "No CUDA graphs: a faster start, but slower decode steps.")
    kvcache_block_size: int | None = option(None, "Tokens in a KV cache block. `None`: 128; 256 with "
        '`"flash_attn"`, 64 with `"cpu"`, 16 with `"reference"`.',
        'Not a multiple of 16 (`"triton"`) or 256 (`"flash_attn"`).', least=1)
    num_kvcache_blocks: int | None = option(None, "Blocks of the KV cache. `None`: [what "
        "fits](#how-memory-is-divided), at most what `max_num_seqs` sequences of `max_model_len` tokens "
        "need.", "`KVCacheMemoryError` if they do not fit.", least=1)
    kv_cache_dtype: str = option("auto", "`\"auto\"`: the model's. `\"fp8\"` (`\"fp8_e4m3\"`) halves the "
        "cache and its traffic. It changes log-probabilities by 0.06 on average; bfloat16 itself changes "
        "them by 0.01.", '`"fp8"` on GPUs before Ada and Hopper.', choices=("auto", "fp8"),
        also={"fp8_e4m3": "fp8"})
    mamba_ssm_cache_dtype: str = option("auto", "The states of [hybrid models](#models) between steps; "
        "others have none. `\"auto\"`: `\"float32\"`, as in transformers. `\"bfloat16\"` halves their memory "
        "and traffic. It changes log-probabilities by 0.02 to 0.06 on average; bfloat16 itself by 0.04.",
        '`"bfloat16"` with `deterministic=True`.', choices=("auto", "float32", "bfloat16"))
    enable_prefix_caching: bool = option(True, "Compute the beginning that prompts have in common once, "
        "within and between calls, up to the token at which they part, with any block size.")
    attention_backend: str = option("auto", '`"triton"`, `"flash_attn"`, `"cpu"` (kernels for CPUs, with '
        'the extra `cpu`) or `"reference"` (plain torch). `"auto"`: the first that can run.',
        "A backend that cannot run here; the message says why.",
        choices=("auto", "flash_attn", "triton", "cpu", "reference"),
        also={"FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton"})
    device: Held[str, Any] = option("auto", '`"cpu"`, `"cuda"`, `"cuda:N"`, or a `torch.device`. '
        '`"auto"`: a GPU if there is one.', "A device that does not exist.")
    dtype: Held[str, Any] = option("auto", '`"bfloat16"`, `"float16"` (`"half"`), `"float32"` '
        "(`\"float\"`), or a `torch.dtype`. `\"auto\"`: the checkpoint's on a GPU. On a CPU bfloat16 for "
        "a checkpoint in bfloat16 if the CPU has AVX512_BF16, else float32.",
        choices=("auto", "float32", "bfloat16", "float16"), also={"half": "float16", "float": "float32"})
    quantization: str | None = option(None, "How the weights of linear layers are "
        '[stored](#quantised-weights). `None`: as `config.json` says. `"fp8"`: weights in 16 or 32 bits '
        'become FP8 as they are loaded; `"int8"`, `"int4"`: the same [on a CPU](#on-a-cpu). '
        "`\"dequantize\"`: a GGUF file's become floats. A name that `config.json` has as `quant_method` "
        "is accepted; any other value is refused.")
    load_format: str = option("auto", '`"auto"` (`"safetensors"`) reads the weights. `"dummy"` makes '
        "random ones from `config.json` alone. Both load the tokenizer, unless `skip_tokenizer_init` is "
        "on.", choices=("auto", "dummy"), also={"safetensors": "auto", "hf": "auto"})
    skip_tokenizer_init: bool = option(False, "Prompts and outputs are token ids.", "Text prompts.")
    deterministic: bool = option(False, "[The same bits](#the-same-answer-in-any-batch) for a prompt in "
        "any batch, chunk or graph, at a cost in speed.",
        'Another backend than `"triton"`; several GPUs; weights with rows not multiples of 16 bytes.')
    seed: int = option(0, "The seed of dummy weights and of requests without their own.", "Below 0.", least=0)
    async_scheduling: bool | None = option(None, "Launch a step before the tokens of the previous one are "
        "read. `None`: on a GPU.")
    speculative_config: Mapping[str, Any] | None = option(None, "[Drafts from the "
        'text](#drafts-from-the-text), such as `{"method": "suffix"}` or `{"method": "ngram", '
        '"num_speculative_tokens": 4}`: several tokens of a sequence in a step, and the same answers.',
        "Methods with a second model; models with states.")
    generation_config: Held[str, str | os.PathLike[str]] = option("auto", "Which "
        "`generation_config.json` sets the sampling parameters that nobody gives: its `temperature`, "
        "`top_k`, `top_p`, `min_p`, "
        '`repetition_penalty` and `max_new_tokens`; `do_sample: false` means `temperature=0`. `"auto"`: '
        "the model's. `\"vllm\"`: none, but for end-of-sequence ids. A folder: the one there.",
        "A folder without that file.")
    max_logprobs: int = option(20, "The maximum of `logprobs` and `prompt_logprobs`. -1: the vocabulary. A "
        "request for all of it makes its steps return it for all rows: 12 bytes of device memory for "
        "each row (or prompt token) and entry.", "Below -1.", least=-1)
    logprobs_mode: str = option("raw_logprobs", "`\"raw_logprobs\"`: from the model's own logits. "
        '`"processed_logprobs"`: of the distribution that the token was drawn from. `"raw_logits"`, '
        '`"processed_logits"`: without log-softmax. `prompt_logprobs` are always raw.',
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"))
    override_generation_config: Mapping[str, Any] | None = option(None, "Values that replace those of that "
        'file, such as `{"temperature": 0.2}`. `None` as a value removes its key.',
        "Keys that are not sampling parameters.")
    tokenizer: Any = option(None, "A folder or hub id of another tokenizer, or a transformers tokenizer.",
        "With `skip_tokenizer_init=True`.")
    revision: str | None = option(None, "A branch, tag or commit of the model on the hub. `None`: the main "
        "branch.", 'With a folder, unless it is `"main"`.')
    tokenizer_revision: str | None = option(None, "The same for `tokenizer`. `None`: `revision`, for the "
        "model's own.", 'With a folder, unless it is `"main"`.')
    trust_remote_code: bool = option(False, "Run code that comes with the tokenizer, never a model's.")
    hf_overrides: Mapping[str, Any] | None = option(None, "[Values that replace](#values-of-configjson) "
        'those of `config.json`, such as `{"rope_theta": 1000000}`.', "Functions.")
    download_dir: Held[str | None, str | os.PathLike[str] | None] = option(None, "The folder for models "
        "from the hub. `None`: huggingface_hub's.")
    hf_token: str | bool | None = option(None, "The access token for the hub. `True`, and `None` where the "
        "hub needs one: that of `hf auth login`.", secret=True)
    kv_cache_memory_bytes: int | None = option(None, "The size of the KV cache of each GPU; it replaces "
        "`gpu_memory_utilization`.",
        "With `num_kvcache_blocks`; `KVCacheMemoryError` below one block, or above the free memory.",
        least=1)
    num_threads: int | None = option(None, "Threads [of a CPU](#on-a-cpu) that this engine uses, its "
        "kernels and torch; its ranks and replicas share them. `None`: as many as torch uses, the physical "
        "cores that the process may use. No effect on a GPU.", "Below 1.", least=1)
    return_routed_experts: bool = option(False, "For a mixture of experts: each completion has "
        "`routed_experts`, an int16 array [tokens, layers, experts of a token] of all tokens of prompt "
        "and output but the last one, which is not computed; 0 in a layer without experts. For training "
        "that replays the routing.",
        "Without `enable_prefix_caching=False`, because no experts compute tokens from the prefix cache; "
        "another model.")
    reasoning_parser: str | None = option(None, "Separates [the thinking](#thinking-and-tool-calls) of "
        'answers from their text: `"auto"` reads the family from the chat template; or its name. `None`: '
        "the text has all.",
        'A name that is not known, and `"auto"` where the template shows no marks; with '
        "`skip_tokenizer_init=True`.", also={"": None})
    tool_parser: str | None = option(None, 'The same of tool calls, such as `"hermes"`.',
        "The same; `\"openai\"` without gpt-oss's `reasoning_parser`, `\"muse_glimmer\"` without its own.")
    # fmt: on

    @classmethod
    def from_kwargs(cls, model: str | os.PathLike[str] | None, **kwargs: Any) -> Config:
        """Build a Config. An unknown option raises TypeError with the nearest name. A vLLM option that is not
        supported raises ValueError, unless it has a neutral value."""
        known = [each.name for each in fields(cls)]
        kwargs = _OTHERS["options"](kwargs, known)
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(
                f"model must be a folder or a Hugging Face hub id, a str or a Path, not {model!r}"
            )
        tokenizer = kwargs.get("tokenizer")
        if isinstance(tokenizer, (str, os.PathLike)) and os.fspath(tokenizer) in ("", os.fspath(model)):
            del kwargs["tokenizer"]  # the model's own tokenizer, the default
        found = [(name, value) for name, value in kwargs.items() if value is not None]
        return cls(os.fspath(model), **{name: _canonical(name, value) for name, value in found})

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must be a folder or a Hugging Face hub id, and it is empty")
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                _check_kind(each.name, kind_of(each), value, each.metadata["option"])
        if self.tokenizer is not None:
            self._check_tokenizer()
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
        kind, _, index = str(self.device).partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
            fix = (
                "; GPUs that are not NVIDIA's are not supported, use 'cpu'" if kind in _OTHER_DEVICES else ""
            )
            fix = "; an NVIDIA GPU is 'cuda'" if kind in ("gpu", "nvidia") else fix
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {self.device!r}{fix}")

    def _check_tokenizer(self) -> None:
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
                given = f"tokenizer_revision={self.tokenizer_revision!r}"
                raise ValueError(f"{given} is for a hub id, and tokenizer is an object; leave it out")


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
    same = Config.__dataclass_fields__[name].metadata["option"].also
    return same[value] if isinstance(value, (str, int)) and value in same else value


def _check_kind(name: str, kind: str, value: Any, about: Option) -> None:
    """Check a value that is not None by the kind of its field, and by its limits."""
    if about.choices:
        if value not in about.choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, about.choices))}, not {value!r}")
    elif kind == "int":
        if check_int(name, value, -math.inf, "an integer") < about.least:
            raise ValueError(f"{name} must be at least {about.least}, not {value}")
    elif kind == "bool":
        check_bool(name, value)
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, not {value!r}")
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be in (0, 1], not {value}; 0.9 is 90 %")
    elif kind == "str | bool":  # it is secret
        if not isinstance(value, (str, bool)):
            raise TypeError(f"{name} must be a string, True or False, not a {type(value).__name__}")
    elif kind.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dictionary of values of the file, not {value!r}")
    elif kind != "Any" and (not isinstance(value, str) or not value):
        raise TypeError(f"{name} must be a string that is not empty, not {value!r}")
