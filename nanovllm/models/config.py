"""ModelConfig: what a model computes; ModelFamily: how config.json says so; HFConfig: typed reading of it.

The reading itself is a door, which `doors.CONFIG_JSON` names. Opens no file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from nanovllm import doors
from nanovllm.attention.rotary import AttentionSpec, RopeConfig
from nanovllm.doors import Table
from nanovllm.kernels.activation import Activation
from nanovllm.layers.weights import can_split_heads
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import FileNames

_MAX_RANKS = 1024  # tensor_parallel_size up to this is proposed in an error
FULL, SLIDING = "full_attention", "sliding_attention"  # the kinds of layers in layer_types
# Which layers settings hold for that are not stated for each kind of layer. "one": all. "unscaled": layers
# with a window have no scaling. "local": nor the same theta, but rope_local_base_freq. "each": none, only
# rope_parameters states them, and for each kind.
Ropes = Literal["one", "unscaled", "local", "each"]


class Mixture(ABC):
    """What some layers have in place of the MLP, such as routed experts. The family's layer makes it."""

    @abstractmethod
    def widths(self, dense_width: int) -> list[int]:
        """All widths that the ranks split. dense_width: of the layers with an MLP."""

    @abstractmethod
    def kinds(self, num_layers: int) -> Sequence[tuple[Mixture, int]]:
        """The kinds of the first `num_layers` layers: a spec of which every layer is one, and how many."""

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
    dual_chunk: int | None = None  # up to this length it equals full attention; None: always
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
    head: Any = None  # `HeadConfig` of pooling_heads/, of a model that classifies; None: it does not
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
        """Whether the embedding is the LM head too, or in its place; then no request may read logits."""
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
            if spec.kv_from is None and spec.state is None and not (far and spec.window is not None)
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
            wide = f" and intermediate size {' and '.join(map(str, dict.fromkeys(widths)))}" if widths else ""
            raise ValueError(
                f"tensor_parallel_size={size} does not divide this model's {self.num_heads} query heads, "
                f"{self.num_kv_heads} KV heads (or is not a multiple of them){wide}; sizes that do: {sizes}"
            )


class HFConfig:
    """Typed reading of a config.json dict. A missing key takes the family's default, null the caller's."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = raw
        self.defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or the family's default if it is missing; `default` if that is null."""
        value = self.raw[key] if key in self.raw else self.defaults.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
        if value >= 2**31:
            raise ValueError(f"config.json: {key} must be below 2**31, not {value!r}")
        return value

    def boolean(self, key: str) -> bool:
        """Return True or False; null counts as False."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {key} must be true or false, not {value!r}")
        return value


_READERS: Table[Callable[..., Any]] = Table(doors.CONFIG_JSON)


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
    reads: tuple[str, ...] = ()  # keys that `read` reads, of those that are refused otherwise

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
        read = _READERS["family"]
        config: ModelConfig = read(self, architecture, raw, generation, quantization, overrides)
        return config

    def text_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of config.json that describes the decoder."""
        return raw

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        """config.json, in one form and with overrides in place, with the names that `read` knows."""
        return raw

    def rope(self, hf: HFConfig, kind: str) -> RopeConfig:
        """The rotary embedding of layers of this kind."""
        config: RopeConfig = _READERS["rope"](self, hf, kind)
        return config

    def read(self, hf: HFConfig) -> ModelConfig:
        """Read config.json. ValueError for what is malformed or not supported."""
        config: ModelConfig = _READERS["decoder"](self, hf)
        return config
