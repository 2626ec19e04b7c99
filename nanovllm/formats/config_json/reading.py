"""How config.json becomes a ModelConfig, the same for all families: the default of what a `ModelFamily` does.

Reads plain dicts of transformers 4 and 5. Refuses what the decoder does not compute; opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.attention.rotary import AttentionSpec, RopeConfig
from nanovllm.formats.config_json.spellings import NAMES, one_form
from nanovllm.formats.config_json.values import (
    activation,
    check_layers,
    dtype,
    dual_chunk,
    eos_token_ids,
    fraction,
    rope_config,
    window_length,
)
from nanovllm.models.config import FULL, SLIDING, HFConfig, ModelConfig, ModelFamily
from nanovllm.pooling_heads.head import read_head
from nanovllm.quantization.config import quant_config

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


def model_config(
    family: ModelFamily,
    architecture: str,
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    quantization: str | None,
    overrides: Mapping[str, Any],
) -> ModelConfig:
    """As `ModelFamily.model_config`."""
    head = read_head(architecture, {**raw, **overrides})
    raw = one_form(family.text_config(raw), family.text_config(overrides), family.defaults, family.ropes)
    check_layers(raw)
    hf = HFConfig(family.own_names(raw), family.defaults)
    quant = quant_config(hf.get("quantization_config"), quantization)
    _refuse_unsupported(hf, family.reads)
    stop = eos_token_ids(hf, generation or {})
    config = family.read(hf)
    return replace(
        config,
        architecture=architecture,
        eos_token_ids=stop,
        layer=config.layer or family.layer,
        quant=quant.in_files(config.names),
        head=head,
    )


def rope(family: ModelFamily, hf: HFConfig, kind: str) -> RopeConfig:
    """As `ModelFamily.rope`."""
    params, positions = hf.raw["rope_parameters"][kind], hf.integer("max_position_embeddings")
    return rope_config(params, positions, family.rotary_share, family.interleaved)


def read(family: ModelFamily, hf: HFConfig) -> ModelConfig:
    """As `ModelFamily.read`."""
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
    kinds = tuple(family.kinds(hf))
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, qk_norm=family.qk_norm)
    specs = {kind: replace(spec, rope=family.rope(hf, kind)) for kind in sorted({FULL, *kinds})}
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
        qkv_bias=bias(family.qkv_bias),
        o_bias=bias(family.o_bias),
        mlp_bias=bias(family.mlp_bias),
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
