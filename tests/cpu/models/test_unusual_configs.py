"""Valid settings of config.json that no released checkpoint has: the logits of transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import PROMPT, check_against_transformers, forward, load
from tiny_models import edit_json, transformers_logits, write_tiny_model

from nanovllm.models.registry import get_family

# What a family's tiny model has besides.
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 45913696000.0}}),
    ("qwen3_moe", {"hidden_act": "gelu"}),
    ("qwen2_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    ("mixtral", {"hidden_act": "gelu"}),
    ("mellum", {"hidden_act": "gelu"}),
    ("glm4_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    ("minimax_m2", {"hidden_act": "gelu"}),
    ("laguna", {"hidden_act": "gelu"}),
]


@pytest.mark.parametrize(("family", "settings"), CONFIGS)
def test_unusual_settings(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family, **settings))


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 32}
BY_KIND = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
# What a family's tiny model has besides, and keys that its config.json has, and that change nothing.
KEYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"hidden_activation": "gelu"}),
    ("mellum", {"rope_parameters": BY_KIND}, {"original_max_position_embeddings": 8}),
    ("olmo3", {"rope_parameters": BY_KIND}, {"original_max_position_embeddings": 8}),
    ("gemma3", {"rope_parameters": BY_KIND}, {"original_max_position_embeddings": 8}),
]


@pytest.mark.parametrize(("family", "settings", "keys"), KEYS)
def test_keys_that_the_family_does_not_read(
    tmp_path: Path, family: str, settings: dict[str, Any], keys: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path, family, **settings)
    edit_json(folder / "config.json", **keys)
    check_against_transformers(folder)


def test_a_bare_decoder_with_inputs_of_layers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gemma4-small")
    expected = transformers_logits(folder, PROMPT)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in tensors.items()}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", architectures=["Gemma4TextModel"])
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen2Moe", "SmolLM3"])
def test_layers_with_windows_need_use_sliding_window(kind: str) -> None:
    reader = get_family(f"{kind}ForCausalLM")
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    raw = {**kinds, "sliding_window": 6}
    for stated in ({}, {"use_sliding_window": False}, {"use_sliding_window": None}):
        with pytest.raises(ValueError, match="layer_types names a layer with sliding_attention, and use_sl"):
            reader.model_config("X", raw | stated)
    config = reader.model_config("X", raw, overrides={"use_sliding_window": True})
    assert [config.spec(layer).window for layer in range(2)] == [6, None]
    config = reader.model_config("X", raw, overrides={"use_sliding_window": False})
    assert [config.spec(layer).window for layer in range(2)] == [None, None]


@pytest.mark.parametrize(
    ("whole", "text", "ends"),
    [([1, 6], 1, (1, 6)), (5, [7, 8], (5, 7, 8)), ([1, 6], None, (1, 6)), (None, 6, (6,))],
)
def test_ends_of_a_model_and_of_its_decoder_count(whole: Any, text: Any, ends: tuple[int, ...]) -> None:
    raw = {"eos_token_id": whole, "text_config": {"eos_token_id": text}}
    for kind in ("Gemma3", "Gemma4", "Qwen3_5", "Mistral3"):
        architecture = f"{kind}ForConditionalGeneration"
        assert get_family(architecture).model_config(architecture, raw).eos_token_ids == ends
