"""GGUF files of OLMo 2 and OLMo 3, written by the rules of llama.cpp's converter, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_checks import check_answers, check_blocks, encoding
from gguf_dense import write
from tiny_models import write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.models.registry import load_model_config

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 500.0}
LOCAL = {"rope_type": "default", "rope_theta": 300.0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "olmo3": ("olmo3", {}),
    "olmo3 with a factor of yarn": (
        "olmo3",
        {"rope_parameters": {FULL: YARN | {"attention_factor": 1.5}, SLIDING: LOCAL}},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_in_float32_is_the_folder(tmp_path: Path, form: str) -> None:
    """Norms, windows and the rope of each kind of layer; in steps shorter than the text."""
    family, changes = FORMS[form]
    folder = write_tiny_model(tmp_path / "folder", family, **changes)
    path = write(folder, tmp_path / "m.gguf")
    check_answers(path, folder)


@pytest.mark.parametrize("stored_as", ["Q8_0", "Q4_K"])
def test_blocks(tmp_path: Path, stored_as: str) -> None:
    folder = write_tiny_model(tmp_path / "folder", "olmo3", hidden_size=256, intermediate_size=256)
    path = write(folder, tmp_path / "m.gguf", encoding(stored_as), dense=tmp_path / "dense")
    check_blocks(path, tmp_path / "dense", stored_as, 23)


def test_windows_and_ropes_by_keys(tmp_path: Path) -> None:
    """As llama.cpp: every fourth layer has no window, and those with one have the theta of all."""
    ropes = {FULL: YARN, SLIDING: LOCAL}
    sizes: dict[str, Any] = {"num_hidden_layers": 5, "layer_types": None, "rope_parameters": ropes}
    folder = write_tiny_model(tmp_path / "folder", "olmo3", **sizes)

    def specs(**changes: Any) -> list[Any]:
        config = load_model_config(write(folder, tmp_path / "m.gguf", **changes))
        return [config.spec(layer) for layer in range(5)]

    def windows(pattern: Any) -> list[int | None]:
        return [spec.window for spec in specs(attention__sliding_window_pattern=pattern)]

    assert windows(None) == [5, 5, 5, None, 5] == [spec.window for spec in specs()]
    assert windows([False, True, False, True, False]) == [None, 5, None, 5, None]
    assert windows(2) == [5, None, 5, None, 5] and windows(0) == [5] * 5 and windows(1) == [None] * 5
    found = [spec.rope for spec in specs()]
    assert [rope.rope_type for rope in found] == ["default", "default", "default", "yarn", "default"]
    assert [rope.theta for rope in found] == [300, 300, 300, 500, 300]
    assert {spec.rope.theta for spec in specs(rope__freq_base_swa=None)} == {500}
    for off in (0, None):
        assert {spec.window for spec in specs(attention__sliding_window=off)} == {None}
        assert {spec.rope.rope_type for spec in specs(attention__sliding_window=off)} == {"yarn"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"block_count": None}, r"olmo2\.block_count must be a number from 1 on, not None"),
    "a short list": ({"attention__sliding_window_pattern": [True]}, r"each of 3 layers .* not a list of 1"),
    "a text": ({"attention__sliding_window_pattern": "x"}, "of so many has none, not 'x'"),
    "a window": ({"attention__sliding_window": 5.5}, r"sliding_window must be of type int, not 5\.5"),
    "a theta": ({"rope__freq_base_swa": 5}, "freq_base_swa must be of type float, not 5"),
    "a multiplier": ({"rope__scaling__attn_factor": 1.25}, r"rope\.scaling\.attn_factor 1\.25 is not"),
    "a rotation": ({"rope__dimension_count": 4}, r"rope\.dimension_count 4, not the size 8 of a head"),
    "a scale": ({"attention__scale": 0.5}, r"olmo2\.attention\.scale 0\.5 is not supported"),
    "a clamp": ({"attention__clamp_kqv": 8.0}, r"olmo2\.attention\.clamp_kqv 8\.0 is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_are_refused(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    path = write(write_tiny_model(tmp_path / "folder", "olmo3"), tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(path)
