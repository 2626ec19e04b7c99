"""GGUF files of Gemma 2 and Gemma 3, written by the rules of llama.cpp's converter, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_checks import check_answers
from gguf_hybrids import write as write_tensors
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.cpu.integers import StoredConfig
from nanovllm.formats.gguf.file import GGUFFile
from nanovllm.formats.tokenizer_json.bpe import NORMAL, SPACE, sentencepiece_steps
from nanovllm.models.registry import load_model_config, open_checkpoint

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"self_attn.{name}": f"attn_{name[0]}" for name in ("q_proj", "k_proj", "v_proj")},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}": f"attn_{name}" for name in ("q_norm", "k_norm")},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm"},
}
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
PERIODS = {"gemma2": 2, "gemma3": 6}


def write_source(folder: Path, family: str, layers: int = 7, **more: Any) -> Path:
    """Layers with windows as published models have them."""
    last = PERIODS[family]
    kinds = ["full_attention" if (n + 1) % last == 0 else "sliding_attention" for n in range(layers)]
    sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": layers, "layer_types": kinds}
    return write_tiny_model(folder, family, tie_word_embeddings=True, **sizes | more)


def write(folder: Path, path: Path, family: str, encode: str = "F32", **changes: Any) -> Path:
    """changes: keys below the architecture, "__" for a dot; None leaves one out."""
    config = json.loads((folder / "config.json").read_text())
    keys = {key: config[name] for key, name in KEYS.items() if config.get(name)}
    ropes = config["rope_parameters"]
    full = ropes.get("full_attention", ropes)
    keys["rope.freq_base"] = full["rope_theta"]
    if full["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        prefix, known = "", module
        if module.startswith("model.layers."):
            _, _, layer, known = module.split(".", 3)
            prefix = f"blk.{layer}."
        tensors[f"{prefix}{NAMES[known]}.{kind}"] = tensor.float() + (1 if "norm" in name else 0)
    kept = {key: value for key, value in keys.items() if value is not None}
    return write_tensors(path, tensors, family, kept, encode)


@pytest.mark.parametrize("family", PERIODS)
def test_a_file_in_float32_is_the_folder(tmp_path: Path, family: str) -> None:
    """Windows, ropes, softcaps and norms; in an engine with windows shorter than its text."""
    folder = write_source(tmp_path / "folder", family)
    path = write(folder, tmp_path / "m.gguf", family)
    check_answers(path, folder)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_scale_of_scores_of_the_largest(tmp_path: Path, family: str, layers: int) -> None:
    """Only the 27B models have so many layers; files do not state it."""
    folder = write_source(tmp_path / "folder", family, layers, hidden_size=24, query_pre_attn_scalar=6)
    config = load_model_config(write(folder, tmp_path / "m.gguf", family))
    assert {spec.scale for spec in config.attention} == {6**-0.5}
    assert {spec.scale for spec in load_model_config(folder).attention} == {6**-0.5}
    folder = write_source(tmp_path / "other", family, layers - 1, hidden_size=24)
    config = load_model_config(write(folder, tmp_path / "m.gguf", family))
    assert {spec.scale for spec in config.attention} == {16**-0.5}


def test_windows_by_keys(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "folder", "gemma3", 5)

    def windows(**changes: Any) -> list[int | None]:
        config = load_model_config(write(folder, tmp_path / "m.gguf", "gemma3", **changes))
        return [config.spec(layer).window for layer in range(5)]

    assert windows() == [6] * 5
    assert windows(attention__sliding_window_pattern=3) == [6, 6, None, 6, 6]
    assert windows(attention__sliding_window=None) == [None] * 5
    config = open_checkpoint(write(folder, tmp_path / "m.gguf", "gemma3", rope__freq_base_swa=500.0)).config()
    assert config["rope_local_base_freq"] == 500.0
    folder = write_source(tmp_path / "folder2", "gemma2", 3)
    path = write(folder, tmp_path / "m.gguf", "gemma2", attention__sliding_window=None)
    config = open_checkpoint(path).config()
    assert config["sliding_window"] == 4096 and config["layer_types"][1] == "full_attention"


def test_blocks_stay_and_float16_becomes_bfloat16(tmp_path: Path) -> None:
    """Activations of Gemma exceed float16."""
    folder = write_source(tmp_path / "folder", "gemma3", 2, hidden_size=64, intermediate_size=64)
    config = load_model_config(write(folder, tmp_path / "m.gguf", "gemma3", "Q8_0"))
    assert isinstance(config.quant, StoredConfig)
    assert {*config.quant.types.values()} == {"Q8_0"} and len(config.quant.types) == 15
    assert open_checkpoint(write(folder, tmp_path / "m.gguf", "gemma3", "F16")).config()["torch_dtype"] == (
        "bfloat16"
    )
    assert open_checkpoint(write(folder, tmp_path / "m.gguf", "gemma3")).config()["torch_dtype"] == "float32"


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "attention.key_length"])
def test_missing_numbers_are_named(tmp_path: Path, key: str) -> None:
    folder = write_source(tmp_path / "folder", "gemma3", 2)
    path = write(folder, tmp_path / "m.gguf", "gemma3", **{key.replace(".", "__"): None})
    with pytest.raises(ModelLoadError, match=rf"gemma3\.{key} must be a number from 1 on, not None"):
        load_model_config(path)


def test_a_second_norm_is_named(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "folder", "gemma3", 2)
    path = write(folder, tmp_path / "m.gguf", "gemma3")
    tensors = {name: each[:] for name, each in GGUFFile(path).tensors.items()}
    tensors["blk.00.ffn_norm.weight"] = tensors["blk.0.ffn_norm.weight"]
    keys = {key.removeprefix("gemma3."): value for key, value in GGUFFile(path).metadata.items()}
    kept = {key: value for key, value in keys.items() if not key.startswith("general.")}
    path = write_tensors(tmp_path / "two.gguf", tensors, "gemma3", kept)
    with pytest.raises(
        ModelLoadError, match=r"'blk\.00\.ffn_norm\.weight' is a second model\.layers\.0\.pre_"
    ):
        load_model_config(path)


def test_symbols_of_a_user_come_before_the_first_merge() -> None:
    """Files of Gemma have them as plain tokens with the score 0; the first merge has -0."""
    from tokenizers import Tokenizer

    tokens = ["<unk>", SPACE * 2, SPACE, "t", "o", f"{SPACE}t", "to"]
    scores = [0.0, 0.0, -9.0, -8.0, -7.0, -0.0, -1.0]
    steps = sentencepiece_steps(tokens, [2, *[NORMAL] * 6], scores, prefix=False)
    steps["model"]["byte_fallback"] = False
    content: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps(content | steps | {"post_processor": None}))
    assert tokenizer.encode("  to").tokens == [SPACE * 2, "to"]
    assert tokenizer.encode(" to").tokens == [f"{SPACE}t", "o"]
