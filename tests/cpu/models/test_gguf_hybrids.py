"""GGUF files of Qwen3-Next and Qwen3.5: names, orders of heads, changed values, blocks that stay."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checked_llm import make_tiny
from gguf_files import random_blocks, try_file, write_base
from gguf_hybrids import converted, of_folder, settings, stored_tensors, write, write_hybrid
from safetensors.torch import save_file
from test_gguf import PROMPT, greedy
from test_models import forward, load
from tiny_models import transformers_greedy, transformers_logits, write_tiny_model

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.cpu import isa
from nanovllm.cpu.integers import IntegerExpertsMethod, IntegerLinearMethod
from nanovllm.layers.weights import methods
from nanovllm.models.registry import load_model_config, open_checkpoint
from nanovllm.models.weights import unpacked
from nanovllm.parallel.group import TPGroup
from tools.write_gguf import Encode, encode_as

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
CHANGED = ("layernorm.weight", "_norm.weight", "model.norm.weight", "A_log")  # by a sum or a logarithm
BLOCKS: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "vocab_size": 104}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


def named(path: Path) -> dict[str, Any]:
    """The tensors of a file or a folder by the model's names, in float32."""
    with open_checkpoint(path).tensors() as stored:
        return {name: tensor[:].float() for name, tensor in unpacked(load_model_config(path), stored.items())}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_file_in_float32_is_the_folder(tmp_path: Path, family: str) -> None:
    """Three value heads for each key head, of another size; one of the files has a layer of speculation."""
    folder = write_tiny_model(tmp_path / "folder", family)
    path = write_hybrid(folder, tmp_path / "m.gguf", mtp=family == "qwen3_5")
    before, after = named(folder), named(path)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if name.endswith(CHANGED) and "linear_attn.norm" not in name:
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-7)
        else:
            assert torch.equal(after[name], tensor), name
    ours, theirs = load_model_config(path), load_model_config(folder)
    differ = {key for key in vars(ours) if getattr(ours, key) != getattr(theirs, key)}
    assert differ <= {"eos_token_ids", "intermediate_size"}
    assert greedy(path) == transformers_greedy(folder, PROMPT, 12)
    torch.testing.assert_close(
        forward(load(path), PROMPT), transformers_logits(folder, PROMPT), rtol=1e-4, atol=1e-4
    )


FORMS: dict[str, dict[str, Any]] = {
    "one value head for each key head": {"linear_num_value_heads": 2},
    "biases and half of the rope": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "tied": {"tie_word_embeddings": True},
    "another order of layers": {"layer_types": ["full_attention", *["linear_attention"] * 3]},
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms(tmp_path: Path, form: str) -> None:
    """Keys of files state no order of layers; their tensors do."""
    folder = write_tiny_model(tmp_path / "folder", "qwen3_5", **FORMS[form])
    path = write_hybrid(folder, tmp_path / "m.gguf")
    torch.testing.assert_close(
        forward(load(path), PROMPT), transformers_logits(folder, PROMPT), rtol=1e-4, atol=1e-4
    )


def test_what_other_writers_do(tmp_path: Path) -> None:
    """Projections of a key head together, gate and up of experts in one tensor, a gate without its first
    dimension, the heads of each layer, with 0 for those of layers with states."""
    folder = write_tiny_model(tmp_path / "folder", "qwen3_next")
    config = json.loads((folder / "config.json").read_text())
    tensors, source = stored_tensors(folder), of_folder(folder)
    for layer, kind in enumerate(config["layer_types"]):
        block, name = f"blk.{layer}", f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
        if kind == "linear_attention":
            del tensors[f"{block}.attn_qkv.weight"], tensors[f"{block}.attn_gate.weight"]
            tensors[f"{block}.ssm_in.weight"] = source[name]
        both = [tensors.pop(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"{block}.ffn_gate_up_exps.weight"] = torch.cat(both, dim=1)
        tensors[f"{block}.ffn_gate_inp_shexp.weight"] = tensors[f"{block}.ffn_gate_inp_shexp.weight"][0]
    keys = settings(config) | {"attention.head_count_kv": [0, 0, 2], "attention.head_count": [0, 0, 4]}
    path = write(tmp_path / "m.gguf", tensors, "qwen3next", keys)
    before, after = named(folder), named(path)
    assert after.keys() == before.keys()
    assert all(torch.allclose(after[name], before[name], rtol=0, atol=1e-7) for name in before)


# -- blocks -------------------------------------------------------------------------------------------------


def write_both(folder: Path, target: Path, encode: Encode) -> tuple[Path, Path]:
    """A file with blocks, and a folder with the values of these blocks in float32."""
    config = json.loads((folder / "config.json").read_text())
    values: dict[str, np.ndarray] = {}

    def encoded(name: str, dense: np.ndarray) -> tuple[np.ndarray, Any]:
        raw, kind = encode(name, dense)
        values[name] = gguf.quants.dequantize(raw, kind)
        return raw, kind

    path = write_hybrid(folder, target / "m.gguf", encoded)
    found = {}
    for name, tensor in of_folder(folder).items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        places = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
        own = converted(match[2], places, config) if match is not None else {}
        for stored, order in own.items():
            if match is not None and (dense := values.get(f"blk.{match[1]}.{stored}")) is not None:
                tensor.view(-1)[order.long().flatten()] = torch.from_numpy(dense).flatten()
        if match is None and name != "model.norm.weight":
            plain = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
            tensor = torch.from_numpy(values[plain[name]])
        if ".experts." in name:
            module, last = name.rsplit(".", 1)
            found |= {f"{module}.{n}.{last}.weight": each.clone() for n, each in enumerate(tensor)}
        else:
            found[name] = tensor.contiguous()
    save_file(found, folder / "model.safetensors")
    return path, folder


@pytest.mark.parametrize(
    ("family", "stored_as", "head", "kept_as"),
    [
        ("qwen3_5", "Q4_K", 32, "Q4_K across heads"),
        ("qwen3_5", "Q4_K", 128, "Q4_K in halves"),
        ("qwen3_5", "Q5_K", 128, "Q5_K in halves"),
        ("qwen3_5", "Q6_K", 128, "Q6_K in halves"),
        ("qwen3_5", "Q6_K", 256, "Q6_K"),
        ("qwen3_next", "Q6_K", 32, "Q6_K"),
    ],
)
def test_blocks_that_span_heads(
    tmp_path: Path, family: str, stored_as: str, head: int, kept_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 256 values, and value heads of fewer."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "linear_value_head_dim": head}
    sizes["linear_num_value_heads"] = 8 if head == 32 else 4
    experts = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_experts": 4}
    more = sizes | (experts if family == "qwen3_next" else {})
    source = write_tiny_model(tmp_path / "folder", family, **more)
    path, folder = write_both(source, tmp_path, random_blocks(stored_as))
    types = open_checkpoint(path).config()["quantization_config"]["types"]
    assert types["model.layers.0.linear_attn.out_proj"] == kept_as
    assert {types[f"model.layers.0.linear_attn.in_proj_{name}"] for name in "qkvz"} == {stored_as}
    before, after = named(folder), named(path)
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-7, msg=name)
    answer = greedy(path, dtype="float32", quantization="dequantize")
    assert answer == transformers_greedy(folder, PROMPT, 12)
    monkeypatch.setattr(isa, "has_matrices", lambda: False)
    model = load(path, on_cpu=True)
    kept = [each for each in methods(model) if isinstance(each[1], IntegerLinearMethod)]
    for module, method in kept:
        shards = model.get_submodule(module).shards
        own = torch.cat([after[f"{shard.module_name(module)}.weight"] for shard in shards])  # type: ignore[union-attr]
        assert torch.equal(method.weight.dense(), own), module
    assert kept and ("linear_attn.out_proj" in str([name for name, _ in kept])) == ("across" not in kept_as)
    if head == 128:
        parts = [load(path, on_cpu=True, tp=TPGroup(rank, 2)).state_layers[0] for rank in range(2)]
        dense = [part.out_proj.method.weight.dense() for part in parts]
        assert torch.equal(torch.cat(dense, 1), after["model.layers.0.linear_attn.out_proj.weight"])


@pytest.mark.parametrize("stored_as", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_blocks_stay_as_they_are_stored(tmp_path: Path, family: str, stored_as: str) -> None:
    """Also where rows, or whole blocks of columns, are in another order; gates of states are dequantised."""
    more = BLOCKS | ({} if family == "qwen3_5" else EXPERTS)
    source = write_tiny_model(tmp_path / "folder", family, **more)
    path = write_hybrid(source, tmp_path / "m.gguf", encode_as(stored_as))
    tensors, model = named(path), load(path, on_cpu=True)
    kept = 0
    for module, method in methods(model):
        if isinstance(method, IntegerLinearMethod):
            layer = model.get_submodule(module)
            names = [f"{shard.module_name(module)}.weight" for shard in layer.shards]  # type: ignore[union-attr]
            assert torch.equal(method.weight.dense(), torch.cat([tensors[name] for name in names])), names
            kept += len(names)
        elif isinstance(method, IntegerExpertsMethod):
            down = torch.stack([tensors[f"{module}.{index}.down_proj.weight"] for index in range(10)])
            assert torch.equal(torch.stack([method.down[index].dense() for index in range(10)]), down)
            kept += 1
        else:
            assert "gates_proj" in module or "mlp.gate" in module or "shared_expert_gate" in module, module
    assert kept > 15
    parts = [load(path, on_cpu=True, tp=TPGroup(rank, 2)).state_layers[0] for rank in range(2)]
    dense = [part.out_proj.method.weight.dense() for part in parts]
    assert torch.equal(torch.cat(dense, 1), tensors["model.layers.0.linear_attn.out_proj.weight"])
    own = [part.in_proj.method.weight.dense().split(part.in_proj.output_sizes) for part in parts]
    for name, *halves in zip("qkvz", *own, strict=True):
        whole = tensors[f"model.layers.0.linear_attn.in_proj_{name}.weight"]
        assert torch.equal(torch.cat(halves), whole)


def test_an_engine_with_blocks(tmp_path: Path) -> None:
    """Two ranks, and weights as they are stored."""
    folder = write_tiny_model(tmp_path / "folder", "qwen3_5", **BLOCKS)
    path = write_hybrid(folder, tmp_path / "m.gguf", "Q8_0")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    expected = transformers_logits(folder, PROMPT).log_softmax(-1)
    given = []
    for options in ({}, {"tensor_parallel_size": 2}):
        with make_tiny(path, dtype="float32", **options) as llm:
            [output] = llm.generate([PROMPT], params, use_tqdm=False)
        pairs = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
        given.append(torch.tensor([each[token].logprob for each, token in pairs]))
    own = expected[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(given[0], given[1], rtol=0, atol=0.05)  # activations of 8 bits
    assert (given[0] - own).abs().mean() < 0.5


def test_heads_that_share_blocks_are_dequantised(tmp_path: Path) -> None:
    """Value heads of 16: their columns move in halves of blocks of 32."""
    source = write_tiny_model(tmp_path / "folder", "qwen3_5", linear_value_head_dim=16, **BLOCKS)
    path, folder = write_both(source, tmp_path, encode_as("Q8_0"))
    quant = load_model_config(path).quant
    assert not isinstance(quant.method("model.layers.0.linear_attn.out_proj", "linear"), IntegerLinearMethod)
    assert isinstance(quant.method("model.layers.0.linear_attn.in_proj_q", "linear"), IntegerLinearMethod)
    assert quant.note is not None and "3 Q8_0 across heads" in quant.note
    assert greedy(path, dtype="float32") == transformers_greedy(folder, PROMPT, 12)


@pytest.mark.parametrize("differ", [False, True])
def test_parts_of_a_product_in_several_formats(tmp_path: Path, differ: bool) -> None:
    """They are one product, so all are dequantised."""

    def encode(name: str, dense: np.ndarray) -> tuple[np.ndarray, Any]:
        return encode_as("Q4_0" if differ and name.endswith("attn_gate.weight") else "Q8_0")(name, dense)

    folder = write_tiny_model(tmp_path / "folder", "qwen3_5", **BLOCKS)
    quant = load_model_config(write_hybrid(folder, tmp_path / "m.gguf", encode)).quant
    for name in "qkvz":
        method = quant.method(f"model.layers.0.linear_attn.in_proj_{name}", "linear")
        assert isinstance(method, IntegerLinearMethod) is not differ


# -- refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"ssm__group_count": 0}, r"qwen35\.ssm\.group_count must be a number from 1 on, not 0"),
    "heads": ({"ssm__time_step_rank": 5}, r"ssm\.time_step_rank 5, .* multiple of ssm\.group_count 2"),
    "size of values": ({"ssm__inner_size": 96}, r"'blk\.0\.\w+\.weight' has the shape .* value heads of 16"),
    "too many layers": ({"block_count": 9}, "it has 9 layers, and the file has 4"),
    "all layers speculate": ({"nextn_predict_layers": 4}, "it has 0 layers, and the file has 4"),
    "KV heads": ({"attention__head_count_kv": [0, 0, 1, 2]}, r"head_count_kv \[1, 2\], not one number"),
    "no KV heads": ({"attention__head_count_kv": [0, 0]}, r"head_count_kv \[\], not one number"),
    "a list of numbers": ({"ssm__conv_kernel": [4, 4]}, r"ssm\.conv_kernel must be of type int"),
    "experts by sigmoid": ({"expert_gating_func": 2}, "qwen35.expert_gating_func 2 is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_are_refused(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    path = write_hybrid(write_tiny_model(tmp_path / "f", "qwen3_5"), tmp_path / "x.gguf", **changes)
    with pytest.raises(ModelLoadError, match=rf"x\.gguf: .*{message}"):
        open_checkpoint(path).config()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"blk.0.attn_q.weight": torch.ones(8, 32)},
            r"layer 0 has both of blk\.0\.attn_q and blk\.0\.ssm_out",
        ),
        ({"blk.0.ssm_out.weight": None}, r"layer 0 has none of blk\.0\.attn_q and blk\.0\.ssm_out"),
        ({"blk.1.ffn_norm.weight": torch.ones(32)}, r"tensor 'blk\.1\.ffn_norm\.weight' is none of qwen35"),
        (
            {"blk.0.ssm_in.weight": torch.ones(448, 32)},
            r"'blk\.0\.ssm_in\.weight' is a second model\.layers\.0",
        ),
        ({"blk.0.attn_qkv.weight": torch.ones(9, 32)}, r"attn_qkv\.weight' has the shape \(9, 32\), and 256"),
        (
            {"blk.0.ssm_out.weight": torch.ones(32, 9)},
            r"ssm_out\.weight' has the shape \(32, 9\), and 192 col",
        ),
        ({"blk.0.ssm_conv1d.weight": torch.ones(256, 1, 4)}, r"\(256, 1, 4\), and two dimensions are needed"),
        ({"blk.3.attn_q.weight": torch.ones(129, 32)}, r"attn_q\.weight' has the shape \(129, 32\), and 128"),
        ({"blk.0.ssm_extra.weight": torch.ones(4, 4)}, r"1 unexpected: blk\.0\.ssm_extra\.weight"),
        ({"blk.0.ssm_a": torch.ones(6)}, r"ssm_a must be -exp\(A_log\), finite and below 0, not \[1\.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path / "f", "qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    stored = {name: each for name, each in (stored_tensors(folder) | tensors).items() if each is not None}
    path = write(tmp_path / "x.gguf", stored, "qwen35", settings(config))
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_mutated_headers_load_or_are_refused_by_name(tmp_path: Path) -> None:
    base = write_base(tmp_path, hybrid=True).read_bytes()
    outcomes = Counter(try_file(base, tmp_path / "mutated.gguf", seed, False)[1] for seed in range(30))
    assert outcomes["refused"] > 10 and outcomes["loaded"] > 0
