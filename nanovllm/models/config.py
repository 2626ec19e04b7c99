"""ModelConfig: a checkpoint's config.json, checked and normalised; ModelFamily: how to read it.

Reads plain dicts of transformers 4 and 5. Refuses what the decoder does not compute; opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanovllm.attention.base import AttentionSpec
from nanovllm.attention.rotary import RopeConfig
from nanovllm.kernels.activation import Activation
from nanovllm.layers.linear import can_split_heads
from nanovllm.quantization.int4_configs import from_awq, from_compressed_tensors, from_gptq
from nanovllm.quantization.unquantized import QuantConfig

_SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
_SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
_MAX_RANKS = 1024  # tensor_parallel_size up to this is proposed in an error
_MAX_ELEMENTS = 2**48  # of one weight

# Keys of config.json for features that the decoder does not have, each with the values that turn them off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    key: values
    for values, keys in (
        ((None,), "attention_chunk_size attention_multiplier clip_qkv dim_model_base query_pre_attn_scalar"),
        ((None,), "scale_depth"),
        ((None, 0), "attn_logit_softcapping final_logit_softcapping no_rope_layer_interval"),
        ((None, 0), "num_experts num_local_experts n_routed_experts"),
        ((None, 1), "embedding_multiplier logit_scale logits_scaling residual_multiplier scale_emb"),
        ((None, False), "alibi attn_temperature_tuning qk_layernorm use_bidirectional_attention"),
        ((None, False), "use_parallel_residual use_qk_norm"),  # Qwen3 has its own q/k norms, always
        ((None, True), "is_causal use_rope"),
        ((None, []), "no_rope_layers"),
        ((None, {}), "compression_config quantization"),
    )
    for key in keys.split()
}

# The quantisation for each `quant_method` of config.json's quantization_config, which it is made from.
QUANTIZATIONS: dict[str, Callable[[Mapping[str, Any]], QuantConfig]] = {
    "awq": from_awq,
    "gptq": from_gptq,
    "compressed-tensors": from_compressed_tensors,
}


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
    sliding_window: int | None  # up to this length full attention gives the same result; None: always
    dual_chunk: int | None = None  # the same for dual chunk attention
    quant: QuantConfig = field(default_factory=QuantConfig)  # of the checkpoint
    architecture: str = ""
    eos_token_ids: tuple[int, ...] = ()
    activation: Activation = Activation.SILU
    layer: Callable[..., Any] | None = None  # (config, index, build) -> a layer; None: `DecoderLayer`
    max_model_len: int | None = None  # maximum tokens of a sequence in the engine; None: without an engine

    def __post_init__(self) -> None:
        for layer, spec in enumerate(self.attention):
            for name in ("num_kv_heads", "head_dim"):
                own, first = getattr(spec, name), getattr(self, name)
                if own != first:
                    raise ValueError(
                        f"layer {layer} has {name}={own}, and layer 0 has {first}; the KV cache needs the "
                        "same in all layers"
                    )
            source = spec.kv_from
            if source is not None and (source not in range(layer) or self.spec(source).kv_from is not None):
                raise ValueError(
                    f"layer {layer} has kv_from={source}, which must be an earlier layer with keys and "
                    "values of its own"
                )

    def spec(self, layer: int) -> AttentionSpec:
        """What the attention of a layer computes."""
        return self.attention[layer % len(self.attention)]

    @property
    def num_heads(self) -> int:
        """Query heads of the first layer."""
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention[0].head_dim

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
            f"sliding window of {self.sliding_window} tokens": self.sliding_window,
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

        def fits(ranks: int) -> bool:
            heads = {(spec.num_heads, spec.num_kv_heads) for spec in self.attention}
            heads_fit = all(can_split_heads(*each, ranks) for each in heads)
            return heads_fit and self.intermediate_size % ranks == 0

        if not fits(size):
            sizes = ", ".join(
                str(ranks) for ranks in range(1, min(self.num_heads, _MAX_RANKS) + 1) if fits(ranks)
            )
            raise ValueError(
                f"tensor_parallel_size={size} does not divide this model's {self.num_heads} query heads, "
                f"{self.num_kv_heads} KV heads (or is not a multiple of them) and intermediate size "
                f"{self.intermediate_size}; sizes that do: {sizes}"
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


def window_length(hf: HFConfig) -> int | None:
    """The sliding window; a missing key means 4,096, null means none."""
    return None if hf.raw.get("sliding_window", 4096) is None else hf.integer("sliding_window", 4096)


@dataclass(frozen=True)
class ModelFamily:
    """The properties of one family of decoders. A bias may be the name of its key in config.json.

    A subclass may override `read`, for example to give each layer its own `AttentionSpec`.
    """

    defaults: Mapping[str, Any]  # transformers' defaults for keys that config.json leaves out
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["head", "all"] | None = None
    sliding_window: Callable[[HFConfig], int | None] = lambda hf: None
    layer: Callable[..., Any] | None = None  # see `ModelConfig`; ranks import it by its name
    reads: tuple[str, ...] = ()  # keys of NEUTRAL that `read` reads

    def model_config(
        self, architecture: str, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the dicts of config.json and, if there is one, generation_config.json.

        Raises ValueError for anything malformed or not supported.
        """
        hf = HFConfig(raw, self.defaults)
        quant = _quant_config(hf)
        _refuse_unsupported(hf, self.reads)
        stop = _eos_token_ids(hf, generation or {})
        config = self.read(hf)
        return replace(config, architecture=architecture, eos_token_ids=stop, layer=self.layer, quant=quant)

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
        if hidden_size * max(vocab_size, 2 * intermediate_size, 3 * num_heads * head_dim) > _MAX_ELEMENTS:
            raise ValueError(
                f"config.json: hidden_size {hidden_size} with vocab_size {vocab_size}, intermediate_size "
                f"{intermediate_size} or num_attention_heads {num_heads} gives weights that no memory holds"
            )
        stated_positions = hf.integer("max_position_embeddings")
        rope = _rope_config(hf, stated_positions)
        biases: dict[str, Any] = {
            name: hf.boolean(value) if isinstance(value := getattr(self, name), str) else value
            for name in ("qkv_bias", "o_bias", "mlp_bias")
        }
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=hf.integer("num_hidden_layers"),
            attention=(AttentionSpec(num_heads, num_kv_heads, head_dim, qk_norm=self.qk_norm, rope=rope),),
            rms_norm_eps=_positive_float(hf, "rms_norm_eps"),
            max_position_embeddings=rope.max_position(stated_positions),
            tie_word_embeddings=hf.boolean("tie_word_embeddings"),
            **biases,
            dtype=_dtype(hf),
            activation=_activation(hf),
            sliding_window=self.sliding_window(hf),
            dual_chunk=_dual_chunk(hf),
        )


def _eos_token_ids(hf: HFConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids in either file; the family's default only if neither has any."""
    stated: set[int] = set()
    for source, value in (
        ("config.json", hf.raw.get("eos_token_id")),
        ("generation_config.json", generation.get("eos_token_id")),
    ):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"{source}: eos_token_id must be token ids, not {value!r}")
            stated.add(token_id)
    if not stated and "eos_token_id" not in hf.raw and "eos_token_id" in hf.defaults:
        stated.add(hf.defaults["eos_token_id"])
    return tuple(sorted(stated))


def _activation(hf: HFConfig) -> Activation:
    try:
        return Activation.of(hf.get("hidden_act"))
    except ValueError as error:
        raise ValueError(f"config.json: hidden_act {error}") from None


def _refuse_unsupported(hf: HFConfig, known: tuple[str, ...]) -> None:
    for key, neutral in NEUTRAL.items():
        if key not in known and not any(hf.get(key) == value for value in neutral):
            raise ValueError(
                f"config.json: {key} {hf.get(key)!r} is not supported; supported: "
                f"{', '.join(map(repr, neutral))}, which change nothing"
            )
    kinds = hf.get("layer_types", [])
    if not isinstance(kinds, list) or not all(kind in _SUPPORTED_LAYERS for kind in kinds):
        other = (
            [kind for kind in kinds if kind not in _SUPPORTED_LAYERS] if isinstance(kinds, list) else kinds
        )
        raise ValueError(
            f"config.json: layer_types {other!r} are not supported; supported: {', '.join(_SUPPORTED_LAYERS)}"
        )


def _quant_config(hf: HFConfig) -> QuantConfig:
    if (stated := hf.get("quantization_config")) is None:
        return QuantConfig()
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or not isinstance(method, str) or method not in QUANTIZATIONS:
        raise ValueError(
            f"config.json: the weights are quantised (quantization_config: quant_method {method!r}), and "
            f"this is not supported; supported: {', '.join(sorted(QUANTIZATIONS))}. Or use the model's "
            "bfloat16, float16 or float32 checkpoint, on the hub usually the one without a suffix such as "
            "FP8 or bnb-4bit"
        )
    return QUANTIZATIONS[method](stated)


def _dual_chunk(hf: HFConfig) -> int | None:
    """The length up to which dual chunk attention (Qwen2.5-1M) equals full attention: one chunk, before the
    scaling of logits and sparse attention begin. None without dual chunk attention."""
    raw = hf.get("dual_chunk_attention_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"config.json: dual_chunk_attention_config must be an object, not {raw!r}")
    config = HFConfig(raw, {"chunk_size": 8192, "local_size": 1024, "sparse_attention_threshold": 32768})
    chunk, local = config.integer("chunk_size"), config.integer("local_size")
    if chunk <= local:
        raise ValueError(
            f"config.json: dual_chunk_attention_config needs a chunk_size above its local_size {local}, "
            f"not {chunk}"
        )
    limits = [chunk - local]
    if config.get("original_max_position_embeddings"):
        limits.append(config.integer("original_max_position_embeddings"))
    if config.get("sparse_attention_enabled"):
        limits.append(config.integer("sparse_attention_threshold"))
    return min(limits)


def _rope_config(hf: HFConfig, max_position_embeddings: int) -> RopeConfig:
    params = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(params, dict) or any(isinstance(value, dict) for value in params.values()):
        raise ValueError(
            f"config.json: one set of rope parameters for all layers is supported, not {params!r}"
        )
    params = dict(params)
    if hf.get("original_max_position_embeddings") is not None:
        params["original_max_position_embeddings"] = hf.get("original_max_position_embeddings")
    rotary_share = params.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if rotary_share not in (None, 1.0):
        raise ValueError(
            f"config.json: partial_rotary_factor {rotary_share} is not supported; supported: 1.0"
        )
    try:
        return RopeConfig.from_dict(params, hf.get("rope_theta", 10000.0), max_position_embeddings)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None


def _positive_float(hf: HFConfig, key: str) -> float:
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"config.json: {key} must be a number between 0 and 1, not {value!r}")
    return float(value)


def _dtype(hf: HFConfig) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _SUPPORTED_DTYPES:
        raise ValueError(
            f"config.json: dtype {name!r} is not supported; supported: {', '.join(_SUPPORTED_DTYPES)}"
        )
    return name
