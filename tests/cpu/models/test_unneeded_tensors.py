"""Tensors and keys of checkpoints that change nothing are left out; those that would are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_models import Tensors, tensors_of
from odd_files import SIZES, check_same, edit_quantization, edit_tensors
from test_models import load
from tiny_models import edit_json, write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.config import Config
from nanovllm.engine.startup import open_model
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights
from nanovllm.residency.updates import UpdateChecker
from tools.write_fp8 import write_fp8
from tools.write_int4 import write_int4

# -- tensors that change nothing ----------------------------------------------------------------------------


def zero_biases(tensors: Tensors) -> None:
    names = [name for name in tensors if name.endswith("qweight")]
    tensors |= {n.replace("qweight", "bias"): torch.zeros(tensors[n].shape[1]) for n in names}
    tensors["model.norm.bias"] = -torch.zeros(128)


BIAS = "model.layers.1.mlp.up_proj.bias"


def test_biases_of_zeros(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "llama", **SIZES)
    folder, usual = (write_int4(plain, tmp_path / name, "gptq", group=32) for name in ("odd", "usual"))
    edit_tensors(folder, zero_biases)
    check_same(folder, usual)
    checker = UpdateChecker(load(folder))
    assert {name for name, _ in checker.accept(tensors_of(folder).items())} == set(tensors_of(usual))
    for value in (1e-30, torch.nan):
        edit_tensors(folder, lambda t, value=value: t[BIAS][5:6].fill_(value))
        with pytest.raises(ModelLoadError, match=rf"1 unexpected: {BIAS} \(a bias that is not zero\)"):
            check_weights(load_model_config(folder), folder)
        with pytest.raises(ValueError, match=rf"{BIAS} is a bias that is not zero"):
            list(checker.accept(tensors_of(folder).items()))


def test_a_bias_of_no_module_is_unexpected(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.mlp.extra.bias": torch.zeros(4)}))
    with pytest.raises(ModelLoadError, match=r"1 unexpected: model\.layers\.0\.mlp\.extra\.bias$"):
        check_weights(load_model_config(folder), folder)


@pytest.mark.parametrize("where", ["model.layers.0.self_attn.", "model.", "", "layers.1.self_attn."])
def test_what_rope_computes(tmp_path: Path, where: str) -> None:
    usual = write_tiny_model(tmp_path / "usual")
    folder = write_tiny_model(tmp_path / "odd")
    cached = [f"{where}rotary_emb.{name}" for name in ("cos_cached", "sin_cached", "inv_freq")]
    edit_tensors(folder, lambda t: t.update({name: torch.ones(4) for name in cached}))
    check_same(folder, usual)
    edit_tensors(folder, lambda t: t.update({f"{where}rotary_emb.scale": torch.ones(4)}))
    with pytest.raises(ModelLoadError, match=r"1 unexpected: .*rotary_emb\.scale"):
        check_weights(load_model_config(folder), folder)


def test_an_index_that_lists_more_or_another_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What counts is the tensors that the files have."""
    usual = write_tiny_model(tmp_path / "usual", tie_word_embeddings=True)
    folder = write_tiny_model(tmp_path / "odd", tie_word_embeddings=True, max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    listed = json.loads(path.read_text())["weight_map"]
    first, *_, last = sorted(set(listed.values()))
    swapped = {"model.norm.weight": first if listed["model.norm.weight"] != first else last}
    unneeded = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    edit_json(path, weight_map=listed | swapped | dict.fromkeys(unneeded, first))
    check_same(folder, usual)
    assert not caplog.records
    edit_json(path, weight_map=listed | {"model.layers.9.mlp.up_proj.weight": first})
    check_same(folder, usual)
    [record] = caplog.records
    assert "no file has, and that Qwen3ForCausalLM does not need: model.layers.9.mlp" in record.getMessage()


# -- keys of quantization_config ----------------------------------------------------------------------------


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_scales_of_a_quantised_cache(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    plain = write_tiny_model(tmp_path / "plain", **SIZES)
    folder, usual = (write_fp8(plain, tmp_path / name, kind) for name in ("odd", "usual"))
    scales = {f"model.layers.{layer}.self_attn.{name}": torch.ones(1) for layer in (0, 1) for name in names}
    edit_tensors(folder, lambda t: t.update(scales))
    with pytest.raises(ModelLoadError, match=r"4 unexpected: .*k_scale"):
        check_weights(load_model_config(folder), folder)
    edit_quantization(folder, kv_cache_scheme=CACHE)
    check_same(folder, usual)
    assert any(
        "scales of a quantised KV cache are for kv_cache_dtype='fp8'" in x
        for x in load_model_config(folder).quant.notes
    )


def test_a_word_about_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_fp8(write_tiny_model(tmp_path / "plain", **SIZES), tmp_path / "fp8", "channel")
    edit_quantization(folder, kv_cache_scheme=CACHE)
    open_model(Config(str(folder), device="cpu", skip_tokenizer_init=True))
    assert "are for kv_cache_dtype='fp8', and not used without it" in caplog.text


def rotation(*locations: str) -> dict[str, Any]:
    applied = [{"targets": ["Linear"], "location": each} for each in locations]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}


def test_rotations(tmp_path: Path) -> None:
    """Those of weights are in the stored weights."""
    folder = write_fp8(write_tiny_model(tmp_path / "plain", **SIZES), tmp_path / "fp8", "channel")
    for offline in ({}, None, {"config_groups": {}}, rotation("weight_input", "weight_output")):
        edit_quantization(folder, transform_config=offline)
        check_weights(load_model_config(folder), folder)
    for location in ("input", "output", "q_attn", "k_cache"):
        edit_quantization(folder, transform_config=rotation("weight_input", location))
        with pytest.raises(ValueError, match=rf"transform_config: R1 at location '{location}' is computed"):
            load_model_config(folder)
    for malformed in (5, {"config_groups": 5}, {"config_groups": {"R1": {}}}):
        edit_quantization(folder, transform_config=malformed)
        with pytest.raises(ValueError, match="transform_config"):
            load_model_config(folder)


def test_the_file_of_modelopt_alone(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "hf_quant_config.json"
    stated = {"quant_algo": "NVFP4_AWQ", "kv_cache_quant_algo": "FP8", "group_size": 16}
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": stated}))
    for asked, message in ((None, "ModelOpt: quant_algo 'NVFP4_AWQ' is not supp"), ("fp8", "contradicts")):
        with pytest.raises(ValueError, match=message):
            load_model_config(folder, quantization=asked)
    edit_json(path, quantization=stated | {"quant_algo": None})  # only the cache
    scales = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    edit_tensors(folder, lambda t: t.update(scales))
    check_weights(config := load_model_config(folder), folder)
    assert len(config.quant.notes) == 1
    edit_json(path, quantization={})
    with pytest.raises(ValueError, match="quant_algo 'unknown'"):
        load_model_config(folder)
