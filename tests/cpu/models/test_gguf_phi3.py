"""GGUF files of Phi-3 and Phi-4-mini, written by the rules of llama.cpp's converter, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_llm import make_tiny
from gguf_checks import check_answers, check_blocks, encoding
from gguf_dense import write
from gguf_hybrids import write as write_tensors
from tiny_models import write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.formats.gguf.file import GGUFFile
from nanovllm.models.registry import load_model_config

PLAIN = {"rope_type": "default", "rope_theta": 500.0}
FORMS: dict[str, dict[str, Any]] = {
    "long factors": {},
    "short factors": {"original_max_position_embeddings": 256},
    "no scaling": {
        **{"rope_parameters": PLAIN, "sliding_window": None, "tie_word_embeddings": True},
        **{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    },
    "a share that no float states": {
        **{"rope_parameters": PLAIN | {"partial_rotary_factor": 0.69}, "hidden_size": 88},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_in_float32_is_the_folder(tmp_path: Path, form: str) -> None:
    """Parts of matrices, partial rotation, factors and windows; in steps shorter than the text."""
    changes = FORMS[form]
    folder = write_tiny_model(tmp_path / "folder", "phi3", **changes)
    path = write(folder, tmp_path / "m.gguf")
    check_answers(path, folder)


@pytest.mark.parametrize("stored_as", ["Q8_0", "Q4_K"])
def test_blocks(tmp_path: Path, stored_as: str) -> None:
    """Parts keep the blocks of their matrix."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "rope_parameters": PLAIN}
    folder = write_tiny_model(tmp_path / "folder", "phi3", **sizes)
    path = write(folder, tmp_path / "m.gguf", encoding(stored_as), dense=tmp_path / "dense")
    check_blocks(path, tmp_path / "dense", stored_as, 16, packed=True)


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    """As llama.cpp: all of a head rotates, cosines are multiplied by 1, and there is no window."""
    folder = write_tiny_model(tmp_path / "folder", "phi3")

    def spec(source: Path, **changes: Any) -> Any:
        return load_model_config(write(source, tmp_path / "m.gguf", **changes)).spec(0)

    assert spec(folder).rope.attention_factor == pytest.approx(3**0.5)
    assert spec(folder, rope__scaling__attn_factor=None).rope.attention_factor == 1
    assert spec(folder, rope__scaling__type="longrope") == spec(folder)
    assert (spec(folder).window, spec(folder, attention__sliding_window=None).window) == (7, None)
    plain = write_tiny_model(tmp_path / "plain", "phi3", rope_parameters=PLAIN)
    assert spec(plain, rope__dimension_count=None).rope.rotary_dim(16) == 16
    assert spec(plain, rope__dimension_count=6).rope.rotary_dim(16) == 6
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    assert (spec(plain, **linear).rope.rope_type, spec(plain, **linear).rope.factor) == ("linear", 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"attention__head_count": None}, r"phi3\.attention\.head_count must be a number"),
    "no size": ({"feed_forward_length": None}, r"phi3\.feed_forward_length must be a number"),
    "no length": ({"rope__scaling__original_context_length": None}, "original_context_length must be a"),
    "an odd rotation": ({"rope__dimension_count": 7}, r"dimension_count 7 must be an even .* at most 16"),
    "a long rotation": ({"rope__dimension_count": 18}, r"dimension_count 18 must be an even .* at most 16"),
    "factors": ({"rope__dimension_count": 8}, r"'rope_factors_long\.weight' .* \(4,\); it has \(6,\)"),
    "another rope": ({"rope__scaling__type": "yarn"}, r"rope\.scaling\.type yarn together with rope_fact"),
    "other sizes": ({"feed_forward_length": 40}, r"ffn_up\.weight' has the shape \(96, 64\); 40 \+ 40 r"),
    "other heads": ({"attention__head_count_kv": 4}, r"attn_qkv\.weight' .*; 64 \+ 64 \+ 64 rows are needed"),
    "a scale": ({"attention__scale": 0.5}, r"phi3\.attention\.scale 0\.5 is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_are_refused(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    path = write(write_tiny_model(tmp_path / "folder", "phi3"), tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(path)


CHANGED: dict[str, tuple[dict[str, str | None], str]] = {
    "one set of factors": ({"rope_factors_short.weight": None}, r"factors_short\.weight' .*; it is missing"),
    "a bias": ({"blk.0.attn_norm.weight": "blk.0.attn_qkv.bias"}, r"blk\.0\.attn_qkv\.bias"),
    "a part": ({"blk.1.attn_norm.weight": "blk.00.attn_qkv.weight"}, r"blk\.00\.attn_qkv\.weight' has the"),
    "a name": ({"blk.0.ffn_norm.weight": "blk.0.attn_sinks.weight"}, r"blk\.0\.attn_sinks\.weight"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_tensors_that_are_refused(tmp_path: Path, case: str) -> None:
    names, message = CHANGED[case]
    file = GGUFFile(write(write_tiny_model(tmp_path / "folder", "phi3"), tmp_path / "m.gguf"))
    stored = {names.get(name, name): tensor[:] for name, tensor in file.tensors.items()}
    keys = {key.removeprefix("phi3."): value for key, value in file.metadata.items() if "phi3." in key}
    tensors = {name: tensor for name, tensor in stored.items() if name is not None}
    path = write_tensors(tmp_path / "o.gguf", tensors, "phi3", keys)
    with pytest.raises(ModelLoadError, match=message):
        make_tiny(path)
