"""ModelConfig: a checkpoint's config.json, checked and normalised; ModelFamily: how to read it.

Reads plain dicts of transformers 4 and 5. Refuses what the decoder does not compute; opens no file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from nanovllm.attention.base import AttentionSpec
from nanovllm.attention.rotary import RopeConfig
from nanovllm.kernels.activation import Activation
from nanovllm.layers.linear import can_split_heads
from nanovllm.models.hf_config import (
    FULL,
    SLIDING,
    HFConfig,
    activation,
    dtype,
    dual_chunk,
    eos_token_ids,
    fraction,
    rope_config,
    window_length,
)
from nanovllm.models.spellings import NAMES, Ropes, one_form
from nanovllm.quantization.config import QuantConfig, quant_config
from nanovllm.quantization.names import FileNames

_MAX_RANKS = 1024  # tensor_parallel_size up to this is proposed in an error
MAX_ELEMENTS = 2**48  # of one weight

# Keys of config.json for features that the decoder does not have, each with the values that turn them off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    key: values
    for values, keys in (
        ((None,), "attention_chunk_size attention_multiplier clip_qkv dim_model_base query_pre_attn_scalar"),
        ((None,), "scale_depth"),
        ((None, 0), "attn_logit_softcapping final_logit_softcapping no_rope_layer_interval"),
        ((None, 0), "num_experts n_routed_experts"),
        ((None, 1), "embedding_multiplier logit_scale logits_scaling residual_multiplier scale_emb"),
        ((None, False), "alibi attn_temperature_tuning qk_layernorm use_bidirectional_attention"),
        ((None, False), "use_parallel_residual use_qk_norm"),  # Qwen3 has its own q/k norms, always
        ((None, True), "is_causal use_rope"),
        ((None, []), "no_rope_layers"),
        ((None, {}), "compression_config quantization"),
    )
    for key in keys.split()
}


class Mixture(ABC):
    """What some layers have in place of the MLP, such as routed experts. The family's layer makes it."""

    @abstractmethod
    def widths(self, dense_width: int) -> list[int]:
        """All widths that the ranks split. dense_width: of the layers with an MLP."""

    @abstractmethod
    def kinds(self, num_layers: int) -> Sequence[tuple[Mixture, int]]:
        """The kinds of the first `num_layers` layers: a spec of which every layer is one, and how many."""

    @abstractmethod
    def check_gpu(self, hidden_size: int, dtype: torch.dtype) -> None:
        """ValueError if the kernels of a GPU cannot read the rows of the weights."""

    @abstractmethod
    def record(self, layers: Sequence[nn.Module], max_tokens: int, device: torch.device) -> torch.Tensor:
        """Let each step write the experts of its tokens to the first rows of the result, [max_tokens, layers,
        top_k] int16; a layer without experts writes nothing."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the variations of a decoder. Sizes are numbers of elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: tuple[AttentionSpec, ...]  # of the first layers; the others repeat them in turn
    rms_norm_eps: float
    max_position_embeddings: int  # with the rope scaling applied
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint
    dual_chunk: int | None = (
        None  # up to this length dual chunk attention equals full attention; None: always
    )
    quant: QuantConfig = field(default_factory=QuantConfig)  # of the checkpoint
    architecture: str = ""
    eos_token_ids: tuple[int, ...] = ()
    activation: Activation = Activation.SILU
    norm_offset: float = 0.0  # added to the weight of each RMSNorm (Gemma: 1)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what each block adds to the stream
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None  # logits become softcap * tanh(logit / softcap), last
    names: FileNames = field(default_factory=FileNames)  # of tensors in files
    layer: Callable[..., Any] | None = None  # (config, index, build) -> a layer; None: `DecoderLayer`
    layer_inputs: Callable[..., Any] | None = None  # (config, build) -> what makes an input of each layer
    moe: Mixture | None = None
    max_model_len: int | None = None  # maximum tokens of a sequence in the engine; None: without an engine
    has_head: bool = True  # whether the files have what makes logits of hidden states

    def __post_init__(self) -> None:
        for layer, spec in enumerate(self.attention):
            source = spec.kv_from
            if source is not None and (source not in range(layer) or self.spec(source).kv_from is not None):
                raise ValueError(
                    f"layer {layer} has kv_from={source}, which must be an earlier layer with keys and "
                    "values of its own"
                )
            for name in ("num_kv_heads", "head_dim"):
                own, other = getattr(spec, name), getattr(spec if source is None else self.spec(source), name)
                if own != other:
                    raise ValueError(
                        f"layer {layer} has {name}={own}, and layer {source}, whose keys and values it "
                        f"reads, has {other}"
                    )

    def spec(self, layer: int) -> AttentionSpec:
        """What the attention of a layer computes."""
        return self.attention[layer % len(self.attention)]

    def up_to(self, length: int) -> ModelConfig:
        """The same for sequences of at most `length` tokens: a window that is no shorter does nothing."""
        specs = (replace(x, window=None) if (x.window or 0) >= length else x for x in self.attention)
        return replace(self, attention=tuple(specs))

    def rotated_up_to(self, length: int) -> ModelConfig:
        """The same with the ropes of sequences of at most `length` tokens. An engine takes the length that
        its user or the model states, so that no memory setting changes what is computed."""
        specs = (replace(x, rope=None if x.rope is None else x.rope.up_to(length)) for x in self.attention)
        return replace(self, attention=tuple(specs))

    @property
    def ties_head(self) -> bool:
        """Whether the embedding is the LM head too. It takes its place where there is none, so that a step is
        the same; the engine refuses requests that would read the logits."""
        return self.tie_word_embeddings or not self.has_head

    @property
    def num_heads(self) -> int:
        """Query heads of the first layer."""
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the first layer."""
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head of the first layer."""
        return self.attention[0].head_dim

    def cached_values(self, ranks: int = 1, far: bool = False) -> int:
        """Elements of a token's keys and values in the cache of one of `ranks` ranks; far: only those of
        layers without a window."""
        each = [
            2 * spec.of_rank(ranks).num_kv_heads * spec.head_dim
            if spec.kv_from is None and not (far and spec.window is not None)
            else 0
            for spec in self.attention
        ]
        repeats, rest = divmod(self.num_layers, len(each))
        return repeats * sum(each) + sum(each[:rest])

    @property
    def longest(self) -> int:
        """The longest sequence for which the model needs nothing that is not supported."""
        return min([self.max_position_embeddings, *self._unsupported.values()])

    @property
    def _unsupported(self) -> dict[str, int]:
        """What longer sequences need and is not supported, with the lengths up to which nothing needs it."""
        ropes = {spec.rope for spec in self.attention if spec.rope is not None}
        trained = min((rope.longest_fixed for rope in ropes if rope.longest_fixed is not None), default=None)
        kinds = {
            "dual chunk attention (dual_chunk_attention_config)": self.dual_chunk,
            f"dynamic rope scaling beyond its trained length of {trained} tokens": trained,
        }
        return {kind: limit for kind, limit in kinds.items() if limit is not None}

    @property
    def why_shorter(self) -> str:
        """What makes `longest` shorter than `max_position_embeddings`; empty if nothing does."""
        kinds = self._unsupported
        return min(kinds, key=kinds.__getitem__) if self.longest < self.max_position_embeddings else ""

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raise ValueError if sequences of `max_model_len` tokens need what is not supported."""
        for kind, limit in self._unsupported.items():
            if max_model_len > limit:
                raise ValueError(
                    f"max_model_len={max_model_len} needs this model's {kind}, which is not supported and "
                    f"changes nothing up to {limit} tokens; use at most max_model_len={self.longest}"
                )

    def check_tensor_parallel_size(self, size: int) -> None:
        """Raise ValueError, with the possible sizes, if the model cannot be split over `size` ranks."""

        widths = [self.intermediate_size] if self.moe is None else self.moe.widths(self.intermediate_size)

        def fits(ranks: int) -> bool:
            heads = {(spec.num_heads, spec.num_kv_heads) for spec in self.attention}
            heads_fit = all(can_split_heads(queries, keys, ranks) for queries, keys in heads)
            return heads_fit and all(width % ranks == 0 for width in widths)

        if not fits(size):
            sizes = ", ".join(
                str(ranks) for ranks in range(1, min(self.num_heads, _MAX_RANKS) + 1) if fits(ranks)
            )
            raise ValueError(
                f"tensor_parallel_size={size} does not divide this model's {self.num_heads} query heads, "
                f"{self.num_kv_heads} KV heads (or is not a multiple of them) and intermediate size "
                f"{' and '.join(map(str, dict.fromkeys(widths)))}; sizes that do: {sizes}"
            )


@dataclass(frozen=True)
class ModelFamily:
    """The properties of one family of decoders. A bias may be the name of its key in config.json.

    A subclass may override `read`, for example to give each layer its own `AttentionSpec`, `text_config`,
    where config.json holds the decoder's keys, and `own_names`, what it calls them.
    """

    defaults: Mapping[str, Any]  # transformers' defaults for keys that config.json leaves out
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["head", "all"] | None = None
    kinds: Callable[[HFConfig], Sequence[str]] = lambda hf: (FULL,)  # of the first layers; others repeat them
    ropes: Ropes = "one"  # whether layers with a window have another rope
    rotary_share: float | None = None  # of a head's elements, unless config.json says it; None: always 1
    interleaved: bool = False  # rope rotates neighbouring elements of a head
    layer: Callable[..., Any] | None = None  # see `ModelConfig`; ranks import it by its name
    reads: tuple[str, ...] = ()  # keys of NEUTRAL that `read` reads

    def model_config(
        self,
        architecture: str,
        raw: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        quantization: str | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> ModelConfig:
        """Read the dicts of config.json and, if there is one, generation_config.json; quantization: as in
        `Config`; overrides: its `hf_overrides`.

        Raises ValueError for anything malformed or not supported.
        """
        raw = one_form(self.text_config(raw), self.text_config(overrides), self.defaults, self.ropes)
        hf = HFConfig(self.own_names(raw), self.defaults)
        quant = quant_config(hf.get("quantization_config"), quantization)
        _refuse_unsupported(hf, self.reads)
        stop = eos_token_ids(hf, generation or {})
        config = self.read(hf)
        if config.names.packed and not quant.keeps_rows:
            raise ValueError(
                f"config.json: quantization_config: weights of 4 bits are not supported in {architecture}, "
                f"whose checkpoints hold several projections as one ({', '.join(config.names.packed)}); use "
                "its FP8, bfloat16 or float16 checkpoint"
            )
        return replace(
            config,
            architecture=architecture,
            eos_token_ids=stop,
            layer=config.layer or self.layer,
            quant=quant.in_files(config.names),
        )

    def text_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of config.json that describes the decoder."""
        return raw

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        """config.json, as `one_form` gives it, with the names that `read` knows."""
        return raw

    def rope(self, hf: HFConfig, kind: str) -> RopeConfig:
        """The rotary embedding of layers of this kind."""
        params, positions = hf.raw["rope_parameters"][kind], hf.integer("max_position_embeddings")
        return rope_config(params, positions, self.rotary_share, self.interleaved)

    def read(self, hf: HFConfig) -> ModelConfig:
        """Read config.json. ValueError for what is malformed or not supported."""
        hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
        num_kv_heads = hf.integer("num_key_value_heads", num_heads)
        head_dim = hf.integer("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2 or head_dim < 4:
            raise ValueError(f"config.json: head_dim must be even and at least 4, not {head_dim}")
        intermediate_size, vocab_size = hf.integer("intermediate_size"), hf.integer("vocab_size")
        if hidden_size * max(vocab_size, 2 * intermediate_size, 3 * num_heads * head_dim) > MAX_ELEMENTS:
            raise ValueError(
                f"config.json: hidden_size {hidden_size} with vocab_size {vocab_size}, intermediate_size "
                f"{intermediate_size} or num_attention_heads {num_heads} gives weights that no memory holds"
            )
        kinds = tuple(self.kinds(hf))
        spec = AttentionSpec(num_heads, num_kv_heads, head_dim, qk_norm=self.qk_norm)
        specs = {kind: replace(spec, rope=self.rope(hf, kind)) for kind in sorted({FULL, *kinds})}
        if SLIDING in specs:
            specs[SLIDING] = replace(specs[SLIDING], window=window_length(hf))
        longest = specs[FULL].rope
        assert longest is not None

        def bias(value: bool | str) -> bool:
            return hf.boolean(value) if isinstance(value, str) else value

        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=hf.integer("num_hidden_layers"),
            attention=tuple(specs[kind] for kind in kinds),
            rms_norm_eps=fraction(hf, "rms_norm_eps"),
            max_position_embeddings=longest.max_position(hf.integer("max_position_embeddings")),
            tie_word_embeddings=hf.boolean("tie_word_embeddings"),
            qkv_bias=bias(self.qkv_bias),
            o_bias=bias(self.o_bias),
            mlp_bias=bias(self.mlp_bias),
            dtype=dtype(hf),
            activation=activation(hf),
            dual_chunk=dual_chunk(hf),
        )


def _refuse_unsupported(hf: HFConfig, known: tuple[str, ...]) -> None:
    for key, neutral in NEUTRAL.items():
        if key not in known and not any(hf.get(key) == value for value in neutral):
            others = "".join(f" (or {name})" for name in NAMES.get(key, ()) if name != key)
            raise ValueError(
                f"config.json: {key}{others} {hf.get(key)!r} is not supported; supported: "
                f"{', '.join(map(repr, neutral))}, which change nothing"
            )
    kinds = hf.get("layer_types", [])
    if not isinstance(kinds, list) or not all(kind in (FULL, SLIDING) for kind in kinds):
        other = [kind for kind in kinds if kind not in (FULL, SLIDING)] if isinstance(kinds, list) else kinds
        raise ValueError(
            f"config.json: layer_types {other!r} are not supported; supported: {FULL}, {SLIDING}"
        )
