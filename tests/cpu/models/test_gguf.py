"""GGUF files: types of tensors, names, permuted rows, parts, ranks, and answers equal to transformers'."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checked_llm import make_tiny
from gguf_files import random_blocks, try_file, write_base
from tiny_models import edit_json, transformers_greedy, write_tiny_model
from transformers import AutoModelForCausalLM

from nanovllm import LLM, ModelLoadError, SamplingParams, demo_model_path
from nanovllm.formats.gguf.checkpoint import GGUFCheckpoint
from nanovllm.formats.gguf.file import TYPES, GGUFFile
from nanovllm.jobs.main import main
from nanovllm.models.registry import load_model_config, open_checkpoint, supported_architectures
from tools.write_gguf import WRITABLE, write_gguf

FILES = 200
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 17, 3, 42, 8]
Type = gguf.GGMLQuantizationType


def write_tensors(path: Path, tensors: dict[str, Any], architecture: str = "llama", **keys: Any) -> Path:
    """A file with these tensors, arrays or (bytes, type), and these keys, "__" for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
        add.get(type(value), writer.add_uint32)(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor.astype(np.float32), Type.F32)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy(model: Path, **options: Any) -> list[int]:
    with make_tiny(model, **{"quantization": "dequantize"} | options) as llm:
        return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


# -- tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored_as", TYPES)
def test_every_type_is_dequantised_as_by_gguf(tmp_path: Path, stored_as: str) -> None:
    kind = Type[stored_as]
    if stored_as in ("F32", "F16", "BF16"):
        raw = gguf.quants.quantize(np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32), kind)
    else:
        raw, _ = random_blocks(stored_as)("", np.zeros((6, 512)))
    path = write_tensors(tmp_path / "x.gguf", {"output.weight": (raw, kind), "odd": np.arange(7)})
    tensors = GGUFFile(path).tensors
    tensor, whole = tensors["output.weight"], torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
    assert tensor.get_shape() == [6, 512] and tensor.stored_as == stored_as and tensor.get_dtype() == "F32"
    assert whole.isfinite().all() and whole.unique().numel() > 20
    for index in [
        slice(None),
        *[(slice(2, 5),), (slice(None), slice(0, 256)), (slice(None), slice(100, 301)), (slice(5, 6),)],
    ]:
        assert torch.equal(tensor[index], whole[index]), index
    assert torch.equal(tensors["odd"][(slice(2, 5),)], torch.tensor([2.0, 3.0, 4.0]))


BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True} | BIASES),
    ("llama", {"head_dim": 10}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("mistral", {"num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_tensors_config_and_answers_are_those_of_the_folder(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path / "folder", family, **changes)
    path = write_gguf(folder, tmp_path / "model.gguf")
    with open_checkpoint(folder).tensors() as before, open_checkpoint(path).tensors() as after:
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert torch.equal(after[name][:], tensor[:]), name
            assert torch.equal(after[name][(slice(1, 9),)], tensor[1:9]), name
    ours, theirs = load_model_config(path), load_model_config(folder)
    differ = {key for key in vars(ours) if getattr(ours, key) != getattr(theirs, key)}
    assert differ <= {"architecture"} and (not differ or family == "mistral")
    assert greedy(path) == transformers_greedy(folder, PROMPT, GREEDY.max_tokens)


@pytest.mark.parametrize("stored_as", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_answers_equal_those_of_transformers_on_the_same_blocks(tmp_path: Path, stored_as: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    folder = write_tiny_model(tmp_path / "folder", "llama", **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", random_blocks(stored_as))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    theirs = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert greedy(path) == theirs[0, len(PROMPT) :].tolist()
    assert load_model_config(path).dtype == "bfloat16"


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rope_scaling_is_found_again(tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = write_tiny_model(tmp_path / "folder", "llama", head_dim=32)
    edit_json(folder / "config.json", rope_parameters=rope | {"rope_theta": 500000.0})
    path = write_gguf(folder, tmp_path / "model.gguf")
    assert load_model_config(path).attention == load_model_config(folder).attention


def test_rope_factors_that_are_not_llamas_are_refused(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.gguf", {"rope_freqs.weight": np.array([1, 2, 5, 8])})
    with pytest.raises(ModelLoadError, match=r"x\.gguf: tensor 'rope_freqs.weight' has factors that are not"):
        open_checkpoint(path).config()
    path = write_tensors(tmp_path / "y.gguf", {"rope_freqs.weight": np.ones(4)})
    assert open_checkpoint(path).config()["rope_scaling"] is None


def test_windows_and_defaults(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "folder", "mistral")
    changes: dict[str, Any] = {"attention.sliding_window": 64}
    config = load_model_config(write_gguf(folder, tmp_path / "mistral.gguf", **changes))
    assert (config.architecture, config.spec(0).window) == ("MistralForCausalLM", 64)
    folder = write_tiny_model(tmp_path / "qwen", "qwen2")
    assert load_model_config(write_gguf(folder, tmp_path / "qwen2.gguf", **changes)).spec(0).window == 64
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for key, value in {"eos": 3, "eot": 2, "eom": 3, "bos": 1}.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20}
    assert open_checkpoint(tmp_path / "x.gguf").generation() == expected


def test_experts_are_tensors_of_their_own(tmp_path: Path) -> None:
    gate, down = np.arange(3 * 4 * 8).reshape(3, 4, 8), np.arange(3 * 8 * 4).reshape(3, 8, 4)
    tensors = {"blk.0.ffn_gate_exps.weight": gate, "blk.0.ffn_down_exps.weight": down}
    tensors |= {"blk.0.ffn_gate_inp.weight": np.ones((3, 8)), "blk.1.ffn_gate.weight": np.ones((16, 8))}
    counts = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 4}
    path = write_tensors(tmp_path / "qwen.gguf", tensors, "qwen3moe", **counts)
    with open_checkpoint(path).tensors() as found:
        assert torch.equal(found["model.layers.0.mlp.experts.2.gate_proj.weight"][:], torch.tensor(gate[2]))
        one = found["model.layers.0.mlp.experts.1.down_proj.weight"]
        assert torch.equal(one[(slice(None), slice(1, 3))], torch.tensor(down[1, :, 1:3]))
        assert "model.layers.0.mlp.gate.weight" in found and len(found) == 8
    config = open_checkpoint(path).config()
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["norm_topk_prob"] is True
    assert config["mlp_only_layers"] == [1]
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (
        3,
        2,
        4,
    )
    path = write_tensors(tmp_path / "mixtral.gguf", tensors, "llama", **counts)
    with open_checkpoint(path).tensors() as found:
        assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in found
        assert "model.layers.0.block_sparse_moe.gate.weight" in found
    stored = np.zeros((3, 4, 34), np.uint8), Type.Q8_0
    tensors = {f"blk.0.ffn_{name}_exps.weight": stored for name in ("gate", "up", "down")}
    for architecture, block in (("llama", "block_sparse_moe"), ("qwen3moe", "mlp")):
        path = write_tensors(tmp_path / "stored.gguf", tensors, architecture, **counts)
        types = open_checkpoint(path).config()["quantization_config"]["types"]
        names = (f"model.layers.0.{block}.experts.{name}_proj" for name in ("gate", "up", "down"))
        assert types == dict.fromkeys(names, "Q8_0")


@pytest.mark.skipif("Qwen3MoeForCausalLM" not in supported_architectures(), reason="no such family")
def test_a_mixture_of_experts_answers_as_transformers(tmp_path: Path) -> None:
    sizes = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "hidden_size": 64}
    sizes |= {"num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 16, "norm_topk_prob": True}
    folder = write_tiny_model(tmp_path / "folder", "qwen3_moe", **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf")
    assert load_model_config(path) == load_model_config(folder)
    assert greedy(path) == transformers_greedy(folder, PROMPT, GREEDY.max_tokens)


# -- files --------------------------------------------------------------------------------------------------


def test_models_in_parts_and_in_folders(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "source")
    (tmp_path / "parts").mkdir()
    first = write_gguf(folder, tmp_path / "parts" / "m.gguf", tensors_in_part=10)
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    whole = greedy(write_gguf(folder, tmp_path / "whole.gguf"))
    for path in (first, second, first.parent):
        assert greedy(path) == whole
    assert len(open_checkpoint(first).files()[1]) == 3
    (first.parent / "mmproj-x.gguf").write_bytes(b"an image encoder")
    assert open_checkpoint(first.parent).config()["hidden_size"] == 32
    shutil.copy(first, first.parent / "other.gguf")
    with pytest.raises(ModelLoadError, match=r"has 2 GGUF models: m, other\.gguf; pass the path of one"):
        open_checkpoint(first.parent).config()
    with pytest.raises(ModelLoadError, match=r"it says that it is part 0 of 3 .* and its name says 0 of 1"):
        open_checkpoint(first.parent / "other.gguf").config()
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"one of 3 parts, and there is no m-00002-of-00003\.gguf"):
        open_checkpoint(first).config()


def test_a_folder_with_safetensors_is_read_as_before(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "x.gguf").write_bytes(b"GGUF")
    assert not isinstance(open_checkpoint(folder), GGUFCheckpoint)


def test_two_ranks_give_the_answers_of_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "folder", "llama", hidden_size=64, intermediate_size=128)
    path = write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    assert greedy(path, tensor_parallel_size=2) == greedy(path)


@pytest.mark.parametrize("stored_as", WRITABLE)
def test_what_the_tool_writes_is_near_the_model(tmp_path: Path, stored_as: str) -> None:
    folder = write_tiny_model(tmp_path / "folder", hidden_size=64, intermediate_size=96)
    path = write_gguf(folder, tmp_path / "model.gguf", stored_as)
    name = "model.layers.1.mlp.down_proj.weight"
    with open_checkpoint(folder).tensors() as before, open_checkpoint(path).tensors() as after:
        far = 0.2 if "4" in stored_as else 0.1 if "5" in stored_as else 0.01
        assert (after[name][:] - before[name][:]).abs().max() < far * before[name][:].abs().max()


def test_a_fingerprint_covers_the_header(tmp_path: Path) -> None:
    path = write_base(tmp_path)
    before, data = open_checkpoint(path).fingerprint(), path.read_bytes()
    assert open_checkpoint(path).fingerprint() == before
    place = data.index(b"<|im_end|>")
    path.write_bytes(data[:place] + b"<|im_eod|>" + data[place + 10 :])
    assert open_checkpoint(path).fingerprint() != before


def test_a_job_with_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(demo_model_path(), tmp_path / "demo.gguf", "BF16")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"prompt": "1 + 2 ="}))
    options = ["--sampling", "temperature=0,max_tokens=4", "--device", "cpu"]
    arguments = ["run", str(prompts), "-o", str(output), "--model", str(path), *options]
    assert main(arguments) == 0
    [row] = map(json.loads, output.read_text().splitlines())
    assert row["finish_reason"] == "length" and row["error"] is None
    assert main(["check", str(prompts), "--model", str(path)]) == 0


# -- refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architecture": "gemma3n"},
        r"general.architecture 'gemma3n' is not supported .*llama,",
    ),
    "setting": ({"logit_scale": 0.25}, "llama.logit_scale 0.25 is not supported"),
    "a list": ({"embedding_length": [1, 2]}, "llama.embedding_length as a list is not supported"),
    "layers": ({"attention__head_count": [4, 2]}, r"head_count \[4, 2\], not the same for all layers"),
    "partial rope": (
        {"attention__key_length": 8, "rope__dimension_count": 4},
        "rope.dimension_count 4, not the size 8",
    ),
    "rope type": ({"rope__scaling__type": "longrope"}, "rope.scaling.type longrope is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    path = write_tensors(tmp_path / "x.gguf", {"output_norm.weight": np.ones(4)}, **changes)
    with pytest.raises(ModelLoadError, match=f"x.gguf: .*{message}"):
        open_checkpoint(path).config()


def test_a_type_that_is_not_known_is_refused_with_its_tensor(tmp_path: Path) -> None:
    raw = np.zeros((2, gguf.GGML_QUANT_SIZES[Type.Q8_K][1]), np.uint8)
    path = write_tensors(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": (raw, Type.Q8_K)})
    with pytest.raises(
        ModelLoadError, match=r"'blk\.0\.ffn_up\.weight' is stored as Q8_K.*supported: F32, F16"
    ):
        open_checkpoint(path).config()


def test_tensors_that_a_family_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "model.gguf")
    with open_checkpoint(path).tensors() as found, pytest.MonkeyPatch.context() as patch:
        extra = {**found, "blk.0.attn_sinks.weight": found["model.norm.weight"]}
        patch.setattr(GGUFCheckpoint, "tensors", lambda self: nullcontext(extra))
        with pytest.raises(ModelLoadError, match=r"1 unexpected: blk\.0\.attn_sinks\.weight"):
            make_tiny(path)


@pytest.mark.parametrize("cut", [0, 3, 20, 200, -1])
def test_a_file_that_is_cut(tmp_path: Path, cut: int) -> None:
    path = write_base(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelLoadError, match=r"base\.gguf.*is it complete\?"):
        LLM(path, device="cpu")


def test_other_files_of_this_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for content, message in {
        b"version https://git-lfs.github.com/spec/v1\noid": "git-lfs pointer",
        b"PK" + bytes(100): "another kind of file",
        b"GGUF\x00\x00\x00\x03" + bytes(100): "big-endian",
        b"GGUF\x01\x00\x00\x00" + bytes(100): "version 1 is not supported",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=message):
            LLM(path, device="cpu")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_base(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r'pip install "nanovllm\[gguf\]"'):
        LLM(path, device="cpu")


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in (1, 2))])
def test_mutated_headers_load_or_are_refused_by_name(tmp_path: Path, part: int) -> None:
    base = write_base(tmp_path).read_bytes()
    gc.collect()
    gc.freeze()  # closing an engine collects garbage
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seeds = range(part, FILES, 3)
    outcomes = Counter(try_file(base, tmp_path / "mutated.gguf", seed)[1] for seed in seeds)
    gc.unfreeze()
    assert outcomes["refused"] > len(seeds) / 3 and outcomes["loaded"] > len(seeds) / 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


@pytest.mark.parametrize("option", ["awq", "compressed-tensors"])
def test_an_option_that_a_file_does_not_hold(tmp_path: Path, option: str) -> None:
    path = write_gguf(
        write_tiny_model(tmp_path / "folder", intermediate_size=64), tmp_path / "m.gguf", "Q8_0"
    )
    message = f"quantization='{option}' is not what a GGUF file holds; leave .*'dequantize', 'fp8', 'int8'"
    with pytest.raises(ValueError, match=message) as caught:
        LLM(path, device="cpu", quantization=option)
    assert "config.json" not in str(caught.value)
    assert load_model_config(path, quantization="gguf") == load_model_config(path)
