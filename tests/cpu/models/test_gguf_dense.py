"""GGUF files of SmolLM3 and Granite, written by the rules of llama.cpp's converter, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_checks import check_answers, check_blocks, encoding
from gguf_dense import write
from test_models import PROMPT, forward, load
from tiny_models import edit_json, transformers_logits, write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.models.registry import load_model_config

PLAIN = {"no_rope_layers": None, "use_sliding_window": False, "sliding_window": None}
HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
BIASES = {"attention_bias": True, "mlp_bias": True}
HYBRID = {"hidden_size": 64, "mamba_n_heads": 4, "shared_intermediate_size": 40, "intermediate_size": 40}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", PLAIN | HEADS | {"num_hidden_layers": 9, "tie_word_embeddings": True}),
    "smollm3 with biases": ("smollm3", PLAIN | BIASES | {"num_hidden_layers": 4}),
    "granite": ("granite", HEADS | {"tie_word_embeddings": True}),
    "granite with biases": ("granite", BIASES),
    "granite 4": ("granite4", HYBRID),
}


def tiny(folder: Path, family: str, **changes: Any) -> Path:
    return write_tiny_model(folder, family, **(PLAIN if family == "smollm3" else {}) | changes)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_in_float32_is_the_folder(tmp_path: Path, form: str) -> None:
    """Layers without rope, multipliers, and rows of queries and keys; in steps of few tokens."""
    family, changes = FORMS[form]
    folder = tiny(tmp_path / "folder", family, **changes)
    path = write(folder, tmp_path / "m.gguf")
    check_answers(path, folder)


@pytest.mark.parametrize("stored_as", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("family", ["smollm3", "granite"])
def test_blocks(tmp_path: Path, family: str, stored_as: str) -> None:
    """Rows of queries and keys are found in place; all matrices stay."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    folder = tiny(tmp_path / "folder", family, **sizes)
    path = write(folder, tmp_path / "m.gguf", encoding(stored_as), dense=tmp_path / "dense")
    check_blocks(path, tmp_path / "dense", stored_as, 16)


def test_layers_without_rope_are_not_stated(tmp_path: Path) -> None:
    """Every fourth has none, whatever the model had: as llama.cpp has it."""
    folder = tiny(tmp_path / "folder", "smollm3", num_hidden_layers=9)
    config = load_model_config(write(folder, tmp_path / "m.gguf"))
    assert [layer for layer in range(9) if config.spec(layer).rope is None] == [3, 7]
    folder = tiny(tmp_path / "other", "smollm3", num_hidden_layers=3, no_rope_layers=[0, 1, 0])
    path = write(folder, tmp_path / "o.gguf")
    edit_json(folder / "config.json", no_rope_layers=[1, 1, 1])
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(path), PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_multipliers_that_a_file_leaves_out(tmp_path: Path) -> None:
    """They are 1, and that of scores is 1 / sqrt(head_dim), as in llama.cpp; so is 0."""
    folder = tiny(tmp_path / "folder", "granite", **HEADS)
    names = ("attention__scale", "embedding_scale", "residual_scale")
    for value in (None, 0.0):
        path = write(folder, tmp_path / "m.gguf", **dict.fromkeys(names, value))
        config = load_model_config(path)
        assert config.spec(0).scale == 8**-0.5 and config.logit_multiplier == 1 / 3
        assert (config.embedding_multiplier, config.residual_multiplier) == (1, 1)
    config = load_model_config(write(folder, tmp_path / "m.gguf"))
    assert config.spec(0).scale == 0.2 and config.logit_multiplier == 1 / 3
    assert (config.embedding_multiplier, config.residual_multiplier) == (12, 0.22)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layers": ("granite", {"block_count": None}, "num_hidden_layers must be a positive integer, not None"),
    "no heads": ("granite", {"attention__head_count": None}, r"granite\.attention\.head_count must be a"),
    "no logit_scale": ("granite", {"logit_scale": None}, r"granite\.logit_scale must be a .* above 0, not 0"),
    "logit_scale 0": ("granite", {"logit_scale": 0.0}, r"granite\.logit_scale must be a .* above 0, not 0"),
    "a text": ("granite", {"residual_scale": "x"}, r"granite\.residual_scale must be of type float, not 'x'"),
    "no rope": ("granite", {"rope__scaling__finetuned": False}, "rope.scaling.finetuned False, no rope, is"),
    "granite's window": ("granite", {"attention__sliding_window": 4}, r"granite\..*sliding_window 4 is not"),
    "its softcap": ("granite", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0 is not supp"),
    "its rope": ("granite", {"rope__scaling__type": "longrope"}, "rope.scaling.type longrope is not supp"),
    "smollm3's window": ("smollm3", {"attention__sliding_window": 4}, r"smollm3\..*sliding_window 4 is not"),
    "its scale": ("smollm3", {"attention__scale": 0.5}, r"smollm3\.attention\.scale 0\.5 is not supported"),
    "its rotation": ("smollm3", {"rope__dimension_count": 4}, "rope.dimension_count 4, not the size 8 of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_are_refused(tmp_path: Path, case: str) -> None:
    family, changes, message = REFUSED[case]
    path = write(tiny(tmp_path / "folder", family), tmp_path / "m.gguf", **changes)
    with pytest.raises((ModelLoadError, ValueError), match=message):
        load_model_config(path)


def test_experts_are_refused(tmp_path: Path) -> None:
    """Of a file whose architecture has none."""
    path = write(tiny(tmp_path / "folder", "granite"), tmp_path / "m.gguf", expert_count=4)
    with pytest.raises(ValueError, match=r"num_experts .* 4 is not supported"):
        load_model_config(path)
