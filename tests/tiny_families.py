"""Families whose config says more than the common settings: what a tiny model of each has besides."""

from __future__ import annotations

from typing import Any

import transformers

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Layers of Gated DeltaNet, with three value heads for each key head.
HYBRID: dict[str, Any] = {
    **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", _FULL]},
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4},
}
HYBRID_EXPERTS: dict[str, Any] = {
    **{"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 40,
}


def muse_config(**settings: Any) -> transformers.MuseGlimmerConfig:
    """Of a model that reads images: transformers has no text model alone."""
    if not settings:
        return transformers.MuseGlimmerConfig()
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16}
    sizes = {"out_hidden_size": 64, "projector_hidden_size": 24}
    ties = settings["tie_word_embeddings"]
    return transformers.MuseGlimmerConfig(
        text_config=settings, vision_config=vision, tie_word_embeddings=ties, **sizes
    )


# Families whose config says more: what a tiny one has besides the common settings.
MORE_FAMILIES: dict[str, tuple[Any, type, dict[str, Any]]] = {
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForCausalLM,
        {**HYBRID, "layer_types": None, "num_hidden_layers": 4},
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        {**HYBRID, **HYBRID_EXPERTS},
    ),
    "granite_swa": (
        transformers.GraniteSWAConfig,
        transformers.GraniteSWAForCausalLM,
        {
            **{"num_hidden_layers": 4, "sliding_window": 6, "layer_rope_theta": [1e4, 300.0, 0, 1e4]},
            **{"attention_multiplier": 0.3, "residual_multiplier": 0.8, "logits_scaling": 2.0},
            "embedding_multiplier": 1.5,
        },
    ),
    "mellum": (
        transformers.MellumConfig,
        transformers.MellumForCausalLM,
        {
            **{"num_hidden_layers": 3, "layer_types": [_SLIDING, _FULL, _SLIDING], "sliding_window": 6},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "head_dim": 16, "num_experts": 10},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 24},
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                _SLIDING: {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 12, "head_dim": 16},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2},
            **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True},
            "attention_bias": True,
        },
    ),
    "laguna": (
        transformers.LagunaConfig,
        transformers.LagunaForCausalLM,
        {
            **{"num_hidden_layers": 3, "layer_types": [_FULL, _SLIDING, _FULL], "sliding_window": 6},
            **{"num_attention_heads_per_layer": [4, 6, 8], "head_dim": 12, "num_experts": 10},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_routed_scaling_factor": 1.5},
            **{"shared_expert_intermediate_size": 40, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            **{"gating": "per-head", "pad_token_id": None},
            "rope_parameters": {
                _FULL: {
                    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                    **{"rope_theta": 500.0, "partial_rotary_factor": 0.5, "attention_factor": 1.2},
                },
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "muse_glimmer": (
        muse_config,
        transformers.MuseGlimmerForConditionalGeneration,
        {
            **{"num_hidden_layers": 5, "head_dim": 12, "sliding_window": 6, "post_norm_eps": 1e-3},
            **{"final_logit_softcapping": 3.0, "qk_scale_factor": 1.7, "output_multiplier": 0.6},
            **{"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        },
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        {"head_dim": 12, "num_local_experts": 10, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {**HYBRID, **HYBRID_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {
            **{"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "num_hidden_layers": 3},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            **{"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "num_hidden_layers": 3},
            **{"layer_types": [_SLIDING, _SLIDING, _FULL], "tie_word_embeddings": True},
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": (
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForCausalLM,
        {
            **{"head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 6},
            **{"attention_k_eq_v": True, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
            **{"num_hidden_layers": 6, "layer_types": [_SLIDING, _SLIDING, _FULL] * 2},
            **{"hidden_size_per_layer_input": 0, "pad_token_id": None},
            "rope_parameters": {
                _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 300.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4-small": (
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForCausalLM,
        {
            **{"head_dim": 12, "global_head_dim": 16, "sliding_window": 6, "num_hidden_layers": 7},
            **{"layer_types": [*[_SLIDING] * 4, _FULL, _SLIDING, _FULL], "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 99, "pad_token_id": None},
            **{"use_double_wide_mlp": True, "tie_word_embeddings": True},
            "rope_parameters": {
                _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 300.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4-unified": (
        transformers.Gemma4UnifiedTextConfig,
        transformers.Gemma4UnifiedForCausalLM,
        {
            **{"head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 6},
            **{"attention_k_eq_v": True, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
            **{"num_hidden_layers": 3, "layer_types": [_SLIDING, _SLIDING, _FULL], "pad_token_id": None},
            "rope_parameters": {
                _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 300.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4-experts": (
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForCausalLM,
        {
            **{"head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 6},
            **{"attention_k_eq_v": True, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
            **{"num_hidden_layers": 3, "layer_types": [_SLIDING, _SLIDING, _FULL]},
            **{"hidden_size_per_layer_input": 0, "pad_token_id": None, "enable_moe_block": True},
            **{"num_experts": 10, "top_k_experts": 3, "moe_intermediate_size": 24},
            "rope_parameters": {
                _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 300.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "olmo3": (
        transformers.Olmo3Config,
        transformers.Olmo3ForCausalLM,
        {
            **{"sliding_window": 5, "num_hidden_layers": 3, "layer_types": [_SLIDING, _FULL, _SLIDING]},
            "rope_parameters": {
                _FULL: {
                    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                    "rope_theta": 500.0,
                },
                _SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "olmo_hybrid": (
        transformers.OlmoHybridConfig,
        transformers.OlmoHybridForCausalLM,
        {
            **{"num_hidden_layers": 4, "layer_types": ["linear_attention", _FULL, "linear_attention", _FULL]},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
            "pad_token_id": None,
        },
    ),
    "lfm2": (
        transformers.Lfm2Config,
        transformers.Lfm2ForCausalLM,
        {
            **{"num_hidden_layers": 4, "layer_types": ["conv", _FULL, "conv", "conv"], "hidden_size": 48},
            **{"intermediate_size": 71, "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.3},
            **{"conv_bias": True, "pad_token_id": None, "head_dim": 16},
        },
    ),
    "lfm2_moe": (
        transformers.Lfm2MoeConfig,
        transformers.Lfm2MoeForCausalLM,
        {
            **{"num_hidden_layers": 4, "layer_types": ["conv", _FULL, "conv", _FULL], "num_dense_layers": 1},
            **{"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"routed_scaling_factor": 1.5, "pad_token_id": None, "head_dim": 16},
        },
    ),
    "phi3": (
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        {
            **{"hidden_size": 64, "sliding_window": 7, "original_max_position_embeddings": 8},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
                **{"short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 2.0]},
                **{"long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 16.0]},
            },
            "pad_token_id": 0,
        },
    ),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {
            **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2},
            "logits_scaling": 3.0,
        },
    ),
    "granite4": (
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
        {
            **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2},
            **{"logits_scaling": 3.0, "num_local_experts": 0, "shared_intermediate_size": 40},
            **{"layer_types": [_FULL, _FULL], "position_embedding_type": "rope", "mamba_n_heads": 4},
        },
    ),
    "ministral3": (
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        {
            **{"head_dim": 12, "num_attention_heads": 6},
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 7},
                **{"rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7},
            },
        },
    ),
    "glm": (transformers.GlmConfig, transformers.GlmForCausalLM, {"head_dim": 12, "pad_token_id": 0}),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, {"head_dim": 16, "pad_token_id": 0}),
    "smollm3": (
        transformers.SmolLM3Config,
        transformers.SmolLM3ForCausalLM,
        {
            **{"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "use_sliding_window": True},
            **{"sliding_window": 6, "pad_token_id": 0},
        },
    ),
    "exaone4": (
        transformers.Exaone4Config,
        transformers.Exaone4ForCausalLM,
        {"sliding_window": 6, "sliding_window_pattern": 3, "num_hidden_layers": 3},
    ),
    "ernie": (
        transformers.Ernie4_5Config,
        transformers.Ernie4_5ForCausalLM,
        {"use_bias": True, "head_dim": 12},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            **{"head_dim": 16, "num_hidden_layers": 3, "layer_types": [_SLIDING, _FULL, _SLIDING]},
            **{"sliding_window": 6, "num_local_experts": 10, "num_experts_per_tok": 3},
            "intermediate_size": 20,
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                **{"rope_theta": 500.0, "truncate": False},
            },
        },
    ),
    "mistral-window": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 6}),
    "qwen2-window": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3-window": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 16},
    ),
}
