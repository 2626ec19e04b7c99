"""The tables that doors fill: what the core looks up by name, and where it is. Imports no door.

A place is "module:object" below nanovllm, such as "families.qwen3:QWEN3". Asking for it imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def find(place: str) -> Any:
    """The object at a place, imported."""
    module, _, attribute = place.partition(":")
    return attrgetter(attribute)(import_module(f"nanovllm.{module}"))


class Table(MutableMapping[str, T]):
    """Objects by name, each imported on first use."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places: dict[str, str | T] = dict(places)
        self._found: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._found:
            self._found[name] = find(str(self._places[name]))
        return self._found[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._places[name] = ""
        self._found[name] = value

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._found.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


# `ModelFamily` by the name in config.json's `architectures`.
FAMILIES: dict[str, str] = {
    "Qwen3ForCausalLM": "families.qwen3:QWEN3",
    "Qwen2ForCausalLM": "families.qwen2:QWEN2",
    "LlamaForCausalLM": "families.llama:LLAMA",
    "MistralForCausalLM": "families.mistral:MISTRAL",
    "Ministral3ForCausalLM": "families.ministral3:MINISTRAL3",
    "Mistral3ForConditionalGeneration": "families.ministral3:MISTRAL3",
    "Qwen3MoeForCausalLM": "families.qwen3_moe:QWEN3_MOE",
    "Qwen2MoeForCausalLM": "families.qwen2_moe:QWEN2_MOE",
    "MixtralForCausalLM": "families.mixtral:MIXTRAL",
    "Gemma2ForCausalLM": "families.gemma:GEMMA2",
    "Gemma3ForCausalLM": "families.gemma:GEMMA3",
    "Gemma3ForConditionalGeneration": "families.gemma:GEMMA3",
    "Gemma4ForCausalLM": "families.gemma4:GEMMA4",
    "Gemma4ForConditionalGeneration": "families.gemma4:GEMMA4",
    "Gemma4UnifiedForCausalLM": "families.gemma4:GEMMA4_UNIFIED",
    "Gemma4UnifiedForConditionalGeneration": "families.gemma4:GEMMA4_UNIFIED",
    "Olmo2ForCausalLM": "families.olmo:OLMO2",
    "Olmo3ForCausalLM": "families.olmo:OLMO3",
    "OlmoHybridForCausalLM": "families.olmo_hybrid:OLMO_HYBRID",
    "Lfm2ForCausalLM": "families.lfm2:LFM2",
    "Lfm2MoeForCausalLM": "families.lfm2:LFM2_MOE",
    "Phi3ForCausalLM": "families.phi3:PHI3",
    "GraniteForCausalLM": "families.granite:GRANITE",
    "GraniteMoeHybridForCausalLM": "families.granite:GRANITE_HYBRID",
    "GlmForCausalLM": "families.glm:GLM",
    "Glm4ForCausalLM": "families.glm:GLM4",
    "SmolLM3ForCausalLM": "families.smollm3:SMOLLM3",
    "Exaone4ForCausalLM": "families.exaone4:EXAONE4",
    "Ernie4_5ForCausalLM": "families.ernie:ERNIE",
    "GptOssForCausalLM": "families.gpt_oss:GPT_OSS",
    "GraniteSWAForCausalLM": "families.granite:GRANITE_SWA",
    "MellumForCausalLM": "families.mellum:MELLUM",
    "Glm4MoeForCausalLM": "families.glm4_moe:GLM4_MOE",
    "MiniMaxM2ForCausalLM": "families.glm4_moe:MINIMAX_M2",
    "LagunaForCausalLM": "families.laguna:LAGUNA",
    "MuseGlimmerForConditionalGeneration": "families.muse_glimmer:MUSE_GLIMMER",
    "Qwen3NextForCausalLM": "families.qwen3_next:QWEN3_NEXT",
    "Qwen3_5ForCausalLM": "families.qwen3_next:QWEN3_5",
    "Qwen3_5ForConditionalGeneration": "families.qwen3_next:QWEN3_5",
    "Qwen3_5MoeForCausalLM": "families.qwen3_next:QWEN3_5_MOE",
    "Qwen3_5MoeForConditionalGeneration": "families.qwen3_next:QWEN3_5_MOE",
}
HEADS_NORM = "families.norms:HeadsNorm"  # a norm over the heads of all ranks
# Where a model comes from that is no folder or file here.
MODELS = {"hub": "hub.download:download"}
# How a `ModelFamily` reads config.json, unless it overrides that.
CONFIG_JSON = {
    "family": "formats.config_json.reading:model_config",
    "decoder": "formats.config_json.reading:read",
    "rope": "formats.config_json.reading:rope",
}
# `Checkpoint` by the format of the files; the first that reads a path takes it.
CHECKPOINTS = {
    "gguf": "formats.gguf.checkpoint:GGUFCheckpoint",
    "safetensors": "formats.safetensors.checkpoint:SafetensorsCheckpoint",
}
MIXTURES = "moe.options:with_options"  # a model's config with what options say of its experts
# A model's config with what an option of `Config` says, by the option, if it is set.
MODEL_OPTIONS = {"enable_expert_parallel": MIXTURES, "return_routed_experts": MIXTURES}
# What fills weights by the option `load_format`; "auto" reads a checkpoint.
LOAD_FORMATS = {"dummy": "formats.dummy:init_dummy_weights"}
# What makes a `QuantConfig` of config.json's quantization_config, by its `quant_method`.
QUANTIZATIONS = {
    "fp8": "formats.fp8.method:Fp8Config.of",
    "compressed-tensors": "formats.compressed_tensors:CompressedTensorsConfig.of",
    "awq": "formats.int4.configs:from_awq",
    "gptq": "formats.int4.configs:from_gptq",
    "mxfp4": "formats.mxfp4.method:Mxfp4Config.of",
    "modelopt": "formats.nvfp4.modelopt:ModelOptConfig.of",
    "gguf": "cpu.integers:StoredConfig.of",
}
# A `QuantConfig` by the option `quantization`, for checkpoints without quantization_config and GGUF files.
ON_THE_FLY = {
    "fp8": "formats.fp8.method:ON_THE_FLY",
    "int8": "cpu.integers:INT8",
    "int4": "cpu.integers:INT4",
}
# `BlockManager` of several groups of layers, or of policies that free blocks of running sequences.
BLOCKS = {"groups": "windows.blocks:GroupBlocks", "states": "states.blocks:StateBlocks"}
# What makes the `CacheLayout` of layers that are not all alike.
LAYOUTS = {"windows": "windows.layout:windowed_layout"}
# What sets the scales of a KV cache, by the option `kv_cache_dtype`; "auto" has none.
CALIBRATIONS = {"fp8": "formats.fp8.cache:calibrate"}
# Layers with a state of each sequence: what the plan, the inputs and the memory of such a model need.
STATES = {
    "groups": "states.policy:groups",  # the `KVGroup`s
    "columns": "states.columns:state_columns",  # of a step: `StateColumns`
    "opened": "states.spec:opened",  # how many sequences may run at once, and the dtype of their states
}
# What finds the prefixes that rows of a decode step share, as `PrefixFinder` of `runner/batch_runner.py`.
SHARED_PREFIXES = {"finder": "shared_prefixes.finder:make_finder"}
# What gives a runner its `Graphs`, on a GPU.
CUDA_GRAPHS = {"graphs": "cuda_graphs.capture:capture"}
# What the graphs of prefill steps take of the memory of such a step.
PREFILL_SHARE = "cuda_graphs.capture:prefill_share"
# `AttentionBackend` by its name, fastest first, as measured on an H200 (docs/log/2026-11-22-measurements.md).
BACKENDS = {
    "triton": "attention.backends:TritonBackend",
    "flash_attn": "flash_attn.backend:FlashAttnBackend",
    "cpu": "cpu.attention:CPUBackend",
    "reference": "attention.reference:ReferenceBackend",
}
# `RopeType` by config.json's `rope_type`.
ROPES = {
    "default": "attention.rotary:RopeType",
    "linear": "families.ropes:Linear",
    "dynamic": "families.ropes:Dynamic",
    "llama3": "families.ropes:Llama3",
    "yarn": "families.ropes:Yarn",
    "longrope": "families.ropes:LongRope",
    "proportional": "families.ropes:Proportional",
}
# The ranks of a model beyond one, as `runner.ranks.OneRank`.
RANKS = {"processes": "parallel.ranks:Ranks"}
# What text needs of a model's files.
TEXT = {
    "late": "order.ids:late_prompts",  # a list whose prompts are made late, or None
    "match_files": "formats.tokenizer_json.match:match_files",  # makes a tokenizer give the ids of its files
    "parsing": "reasoning.processor:ParsingProcessor",  # a `Processor` that separates thinking and tool calls
    "written_end": "chat.ends:add_written_end",  # has answers end by what a template writes after them
}
# What counts the entries of a `History`, when somebody asks.
COUNTS = {"steps": "stats.timeline:Timeline", "answers": "vllm.metrics:RequestTimes"}
# The `Progress` of a call that is shown.
PROGRESS = {"shown": "stats.progress:ShownProgress"}
HINT = "stats.hint:say_if_cut"  # what is said after a call about answers that the default length cut off
# What an engine changes that drafts tokens, as the option `speculative_config` says.
DRAFTS = {"drafting": "drafts.drafting:Drafting.of", "checked": "drafts.settings:DraftSettings.of"}
# What gives the requests of a list to the executor, in the order that is fastest.
ORDERS = {"list": "order.feed:Feed"}
# What yields parts of unfinished answers.
STREAMS = {"parts": "streams.parts:Parts"}
# What is known of other libraries: their arguments by call, and what to write instead of one of their names.
OTHER_NAMES = {"arguments": "vllm.arguments:ARGUMENTS", "elsewhere": "vllm.arguments:elsewhere"}
OTHER_NAMES["options"] = "vllm.engine_args:our_options"
# What a request may ask for besides tokens by temperature, filters and penalties.
EXTRAS = {
    "embedding": "extras.embedding:read_embedding_defaults",  # as a model's files state them
    "params": "extras.params:checked",  # checks these sampling parameters
    "replayed": "extras.params:replayed",  # of an answer whose tokens are known
    "guarded": "extras.logits_processors:GuardedProcessors",  # whose errors end one request
    "texts": "extras.texts:ExtraTexts",  # constraints, bad words and logprobs, for a `Processor`
    "sequence": "extras.planned:SequenceExtras.of",  # what one sequence asks for, and what it has got
    "step": "extras.planned:extras_of",  # what those of a step ask for: its `Extras`
    "masks": "extras.planned:masks_of",  # the tokens that may follow in a step
    "keep": "extras.planned:keep",  # gives the sequences of a step what they asked for
    "forced_ends": "extras.planned:forced_ends",  # of sequences that need no step for their last tokens
    "dead_end": "extras.planned:dead_end",
    "found_stops": "extras.stop_strings:found_stops",  # searches the texts of a step
    "repetitions": "extras.repetitions:Repetitions",  # ends an answer that repeats itself
    "ending": "extras.ending:ExtrasEnding",  # ends a step with `Extras`, for an `Ending`
}
# What the door of CPUs does in place of Triton, cuBLAS and CUDA graphs; see `cpu_door`.
CPU = {
    "has_kernels": "cpu.isa:has_kernels",
    "has_bf16": "cpu.isa:has_bf16",
    "say_what_is_missing": "cpu.isa:say_what_is_missing",
    "linear_method": "cpu.dense:linear_method",
    "recorded_steps": "cpu.recorded:recorded_steps",
    "compile_ahead": "cpu.ahead:compile_ahead",
    "warn_of_cache": "cpu.memory:warn_of_cache",
}
CPU_KERNELS = "cpu.kernels"  # the folder of kernels that are siblings of those in kernels/


@cache
def cpu_door(name: str) -> Callable[..., Any]:
    """A function of the door of CPUs, imported on use:

    - has_kernels() -> bool: whether its kernels run on this CPU; else torch computes
    - has_bf16() -> bool: whether this CPU multiplies bfloat16 faster than float32
    - say_what_is_missing(): once, what would make this CPU faster
    - linear_method(shape, options, kind) -> the `LinearMethod` of a weight in floats; None: the core's
    - recorded_steps() -> `RecordedSteps` of `runner/batch_runner.py`; None if nothing can be recorded
    - compile_ahead(runner): compiles the kernels that a `ModelRunner` needs and that are not kept yet
    """
    found: Callable[..., Any] = find(CPU[name])
    return found
