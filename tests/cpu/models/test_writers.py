"""What the tools write of each family: the same model again, or a refusal that names what cannot be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_models import FAMILIES, MORE_FAMILIES, edit_json, write_tiny_model

from nanovllm import ModelLoadError, demo_model_path
from nanovllm.engine.startup import load_tokenizer
from nanovllm.models.config import FULL, SLIDING, ModelConfig
from nanovllm.models.registry import load_model_config, open_checkpoint
from tools import write_gguf as write_gguf_module
from tools.write_fp8 import SCALES, write_fp8
from tools.write_gguf import ARCHITECTURES, settings, write_gguf

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe")

ALL = FAMILIES | {family: each[:2] for family, each in MORE_FAMILIES.items() if "-window" not in family}


def dequantised(folder: Path, target: Path, plain: Path) -> Path:
    """The same weights in float32, with the other files of `plain`."""
    shutil.copytree(plain, target)
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if "_scale" in each]:
        scales, weight = tensors.pop(name), name.rpartition(".")[0] + ".weight"
        rows, columns = tensors[weight].shape
        if name.endswith("_inv"):
            scales = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        tensors[weight] = tensors[weight].float() * scales
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# Files with the experts of a layer as one tensor are refused; `test_gemma4_experts.py` has others.
@pytest.mark.parametrize("family", [each for each in ALL if each not in ("gpt_oss", "gemma4-experts")])
def test_fp8_files_are_read_again(tmp_path: Path, family: str) -> None:
    plain = write_tiny_model(tmp_path / "plain", family)
    original = forward(load(plain), PROMPT)
    # `test_hybrids.py` and `test_lfm2.py` have blocks of a hybrid, whose parts must be whole blocks.
    for scales in SCALES if family not in HYBRIDS else ("channel", "tensor"):
        folder = write_fp8(plain, tmp_path / scales, scales)
        tensors = load_file(folder / "model.safetensors")
        codes = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
        assert len(codes) == sum("_scale" in name for name in tensors) >= 5
        floats = {name for name, each in tensors.items() if each.dim() > 1 and each.dtype == torch.float32}
        others = ("embed_tokens", "lm_head", ".gate.", "shared_expert_gate", "_scale", "conv1d", "in_proj_")
        others = (*others, "model.vision_", ".conv.conv.")
        assert all(any(other in name for other in others) for name in floats), floats
        found, expected = (
            forward(load(each, on_cpu=True), PROMPT)
            for each in (folder, dequantised(folder, tmp_path / f"{scales} floats", plain))
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found, original, atol=1e-5)


def test_fp8_of_a_model_with_images(tmp_path: Path) -> None:
    """Only the decoder is quantised; its tensors are named otherwise."""
    plain = write_tiny_model(tmp_path / "plain", "gemma3")
    tensors = load_file(plain / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model."): each for name, each in tensors.items()}
    tensors["model.vision_tower.encoder.layers.0.mlp.fc1.weight"] = torch.ones(4, 4)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    edit_json(plain / "config.json", architectures=["Gemma3ForConditionalGeneration"], text_config=text)
    folder = write_fp8(plain, tmp_path / "fp8", "channel")
    written = load_file(folder / "model.safetensors")
    assert written["model.vision_tower.encoder.layers.0.mlp.fc1.weight"].dtype == torch.float32
    codes = [name for name, each in written.items() if each.dtype == torch.float8_e4m3fn]
    assert len(codes) == 7 * 3 and all(name.startswith("model.language_model.layers.") for name in codes)
    floats = dequantised(folder, tmp_path / "floats", plain)
    torch.testing.assert_close(forward(load(folder, on_cpu=True), PROMPT), forward(load(floats), PROMPT))


def test_what_is_not_loaded_in_fp8_is_not_written(tmp_path: Path) -> None:
    experts = write_tiny_model(tmp_path / "gpt_oss", "gpt_oss")
    with pytest.raises(ValueError, match=rf"^{experts}: quantization 'fp8' is not supported in GptOss"):
        write_fp8(experts, tmp_path / "a", "block")
    folder = write_fp8(write_tiny_model(tmp_path / "llama", "llama"), tmp_path / "fp8", "tensor")
    with pytest.raises(ValueError, match="is quantised already; write from its checkpoint in 16 or 32 bits"):
        write_fp8(folder, tmp_path / "a", "tensor")
    with pytest.raises(ValueError, match="'x' is none of its linear layers"):
        write_fp8(tmp_path / "llama", tmp_path / "a", "tensor", ignore=("x",))
    assert not (tmp_path / "a").exists()


YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 500.0},
    **{"beta_fast": 16.0, "beta_slow": 2.0},
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024, "rope_theta": 500.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
WINDOWS = {"sliding_window": 6, "use_sliding_window": True}
GGUF_MODELS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")),
    ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    ("mistral", {"sliding_window": 6}),
    ("mistral", {"rope_parameters": YARN}),
    ("qwen2", WINDOWS | {"max_window_layers": 0}),
    ("qwen3", WINDOWS | {"max_window_layers": 0, "rope_parameters": YARN}),
    ("qwen3_moe", WINDOWS | {"mlp_only_layers": [1]}),
    (
        "qwen3",
        {"eos_token_id": [5, 3, 9], "rope_parameters": YARN | {"attention_factor": 1.1386294361119891}},
    ),
]


@pytest.mark.parametrize(("family", "changes"), GGUF_MODELS)
def test_gguf_files_are_read_again(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = write_tiny_model(tmp_path / "folder", family, **changes)
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    edit_json(folder / "generation_config.json", **sampling)
    path = write_gguf(folder, tmp_path / "model.gguf")
    assert torch.equal(forward(load(path), PROMPT), forward(load(folder), PROMPT))
    before, after = load_model_config(folder), load_model_config(path)
    assert after.eos_token_ids == before.eos_token_ids
    assert after.max_position_embeddings == before.max_position_embeddings
    found = open_checkpoint(path).generation()
    assert {key: found[key] for key in sampling} == sampling


def test_every_architecture_is_written(tmp_path: Path) -> None:
    assert {FAMILIES[family][1].__name__ for family, _ in GGUF_MODELS} == {*ARCHITECTURES}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"rope_parameters": YARN | {"attention_factor": 1.5}}, "factor 1.5, which is not 1.139"),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}}, "which is not 1.139"),
        ("llama", {"rope_parameters": YARN | {"truncate": False}}, "yarn without truncate"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "that are not 1 and 4"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 1000}},
            "not those of Llama",
        ),
        ("qwen2", WINDOWS | {"layer_types": [FULL, SLIDING]}, "layers that differ, such as windows in some"),
        ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}, "the activation gelu_pytorch_tanh"),
        ("llama", {"eos_token_id": [1, 2, 3, 4]}, "more than three end-of-sequence tokens"),
        ("qwen2", {"dual_chunk_attention_config": {}}, "dual chunk attention"),
        ("gemma2", {}, "Gemma2ForCausalLM is none of LlamaForCausalLM"),
    ],
)
def test_what_gguf_files_cannot_state_is_not_written(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path / "folder", family, head_dim=32)
    edit_json(folder / "config.json", **changes)
    with pytest.raises((ValueError, ModelLoadError), match=message):
        write_gguf(folder, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf"))


def test_a_file_that_says_something_else_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `check` does not know."""
    folder = write_tiny_model(tmp_path / "folder", "llama")

    def wrong(config: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
        return settings(config, replace(model, rms_norm_eps=0.25))

    monkeypatch.setattr(write_gguf_module, "settings", wrong)
    with pytest.raises(ValueError, match=r"cannot state all of it: rms_norm_eps 1e-06, not 0\.25"):
        write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="cannot state all of it"):
        write_gguf(folder, tmp_path / "parts.gguf", tensors_in_part=5)
    assert not list(tmp_path.glob("*.gguf"))


def test_the_template_of_a_folder_is_in_the_file(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_model_path(), tmp_path / "folder"))
    edit_json(folder / "tokenizer_config.json", remove=("chat_template",))
    (folder / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    path = write_gguf(folder, tmp_path / "model.gguf")
    assert open_checkpoint(path).tokenizer(load_tokenizer).chat_template == "<{{ messages[0].content }}>"
