"""The shapes of bench.py: config.json of models, for dummy weights. Loads no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3 = {  # name: layers, hidden, intermediate, heads, tied embeddings
    "qwen3-0.6b": (28, 1024, 3072, 16, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, True),
    "qwen3-4b": (36, 2560, 9728, 32, True),
    "qwen3-8b": (36, 4096, 12288, 32, False),
    "qwen3-14b": (40, 5120, 17408, 40, False),
    "qwen3-32b": (64, 5120, 25600, 64, False),
    "qwen3-30b-a3b": (48, 2048, 6144, 32, False),
}
QWEN3_MOE: dict[str, dict[str, Any]] = {  # what a mixture of experts adds to the config
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
}
GEMMA3 = {"gemma3-4b": (34, 2560, 10240, 8, True)}  # the same; a window of 1,024 in five of six layers
GEMMA3_CONFIG: dict[str, Any] = {  # what differs from a Qwen3 of this shape
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "max_position_embeddings": 131072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GPT_OSS = {  # the same; the width of an expert
    "gpt-oss-20b": (24, 2880, 2880, 64, False),
    "gpt-oss-120b": (36, 2880, 2880, 64, False),
}
GPT_OSS_EXPERTS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
GPT_OSS_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
    "eos_token_id": 200002,
    "bos_token_id": 199998,
}
QWEN3_5 = {  # layers, hidden size, intermediate size or width of an expert, query heads, ties embeddings
    "qwen3.5-0.8b": (24, 1024, 3584, 8, True),
    "qwen3.5-4b": (32, 2560, 9216, 16, True),
    "qwen3.5-27b": (64, 5120, 17408, 24, False),
    "qwen3.5-35b-a3b": (40, 2048, 512, 16, False),
}
QWEN3_5_HEADS = {  # KV heads, value heads of a state
    **{"qwen3.5-0.8b": (2, 16), "qwen3.5-4b": (4, 32), "qwen3.5-27b": (4, 48), "qwen3.5-35b-a3b": (2, 32)},
}


def qwen3_5_config(name: str) -> dict[str, Any]:
    """What differs from a Qwen3 of this shape."""
    kv_heads, value_heads = QWEN3_5_HEADS[name]
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "eos_token_id": 248046,
    }
    if name.endswith("a3b"):
        experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
        config |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"} | experts
        config |= {"shared_expert_intermediate_size": 512}
    return config


MORE = {  # layers, hidden size, intermediate size, query heads, ties embeddings
    "gemma4-12b": (48, 3840, 15360, 16, True),
    "gemma4-26b-a4b": (30, 2816, 2112, 16, True),
    "laguna-xs": (40, 2048, 8192, 48, False),
    "lfm2-1.2b": (16, 2048, 12288, 32, True),
    "lfm2-8b-a1b": (24, 2048, 7168, 32, True),
    "ministral3-8b": (34, 4096, 14336, 32, False),
    "muse-glimmer-30b": (52, 6656, 19968, 32, False),
    "olmo-hybrid-7b": (32, 3840, 11008, 30, False),
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_GEMMA4: dict[str, Any] = {
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LFM2: dict[str, Any] = {
    "vocab_size": 65536,
    "head_dim": 64,
    "norm_eps": 1e-5,
    "max_position_embeddings": 128000,
    "eos_token_id": 7,
    "bos_token_id": 1,
}
MORE_CONFIG: dict[str, dict[str, Any]] = {  # what differs from a Qwen3 of this shape
    "gemma4-12b": {
        **_GEMMA4,
        "architectures": ["Gemma4UnifiedForCausalLM"],
        "model_type": "gemma4_unified_text",
        "num_global_key_value_heads": 1,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 8,
    },
    "gemma4-26b-a4b": {
        **_GEMMA4,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_global_key_value_heads": 2,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "laguna-xs": {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "vocab_size": 100352,
        "gating": "per-head",
        "sliding_window": 512,
        "layer_types": ([FULL] + [SLIDING] * 3) * 10,
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
        "mlp_layer_types": ["dense"] + ["sparse"] * 39,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            FULL: {
                **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192},
                **{"rope_theta": 500000.0, "partial_rotary_factor": 0.5, "beta_fast": 64.0, "beta_slow": 1.0},
            },
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "eos_token_id": 2,
        "bos_token_id": 2,
    },
    "lfm2-1.2b": {
        **_LFM2,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "lfm2-8b-a1b": {
        **_LFM2,
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "full_attn_idxs": [2, 6, 10, 14, 18, 21],
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
    },
    "ministral3-8b": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "vocab_size": 131072,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "sliding_window": None,
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384},
            **{"rope_theta": 1000000.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    "muse-glimmer-30b": {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "model_type": "muse_glimmer",
        "vocab_size": 202048,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "layer_types": ([SLIDING] * 3 + [FULL]) * 13,
        "rope_theta": 500000.0,
        "eos_token_id": 200001,
        "bos_token_id": 200000,
    },
    "olmo-hybrid-7b": {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "vocab_size": 100352,
        "num_key_value_heads": 30,
        "layer_types": ([LINEAR] * 3 + [FULL]) * 8,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "rope_theta": None,
        "eos_token_id": 100257,
        "bos_token_id": None,
    },
}


def write_shape(name: str, folder: Path, longest: int = 0) -> Path:
    """Write the config.json of a shape, for dummy weights and sequences of up to `longest` tokens."""
    layers, hidden, intermediate, heads, tied = (QWEN3 | GEMMA3 | GPT_OSS | QWEN3_5 | MORE)[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": max(40960, longest),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
        "bos_token_id": 151643,
    }
    if name in GEMMA3:
        config |= GEMMA3_CONFIG
    if name in GPT_OSS:
        config |= GPT_OSS_CONFIG | {"num_local_experts": GPT_OSS_EXPERTS[name]}
    if name in QWEN3_5:
        config |= qwen3_5_config(name)
    config |= QWEN3_MOE.get(name, {}) | MORE_CONFIG.get(name, {})
    if name in MORE and longest > config["max_position_embeddings"]:
        config["max_position_embeddings"] = longest
    (folder / "config.json").write_text(json.dumps(config))
    return folder
