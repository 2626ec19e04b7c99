"""EXAONE 4: norms after the blocks, and with windows no rotary embedding in the layers without one."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.families.olmo import NormedAfterLayer
from nanovllm.formats.config_json.values import layer_kinds, window_length
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily


def _is_sliding(hf: HFConfig, layer: int) -> bool:
    pattern = hf.get("sliding_window_pattern", 4)
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise ValueError(
            f"config.json: sliding_window_pattern must be a positive integer, or layer_types must be given, "
            f"not {pattern!r}"
        )
    return (layer + 1) % pattern != 0


class Exaone4Family(ModelFamily):
    """The layers without rope."""

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        if window_length(hf) is None:
            return config
        specs = [each if each.window is not None else replace(each, rope=None) for each in config.attention]
        return replace(config, attention=tuple(specs))


EXAONE4 = Exaone4Family(
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window_pattern": 4,
        "eos_token_id": 2,
    },
    qk_norm="head",
    kinds=lambda hf: (
        (FULL,) if window_length(hf) is None else layer_kinds(hf, lambda layer: _is_sliding(hf, layer))
    ),
    layer=NormedAfterLayer,
)
