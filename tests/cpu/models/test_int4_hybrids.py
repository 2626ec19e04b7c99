"""AWQ, GPTQ and compressed-tensors files of Qwen3-Next and Qwen3.5 equal their dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_models import transformers_greedy, transformers_logits, write_tiny_model

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.formats.int4.kernels.layout import dequantise_reference
from nanovllm.formats.int4.method import Int4LinearMethod
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import load_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightOptions
from tools.write_int4 import dequantised, random_order, rounded, write_int4

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 104, "head_dim": 16}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"format": "awq"},
    "awq without zero points": {"format": "awq", "symmetric": True},
    "gptq": {"format": "gptq"},
    "gptq v2 whole rows": {"format": "gptq_v2", "group": -1},
    "gptq act-order": {"format": "gptq", "act_order": True},
    "w4a16": {"format": "compressed-tensors", "symmetric": True},
    "w4a16 zero points": {"format": "compressed-tensors"},
}


def write_pair(
    folder: Path,
    family: str,
    skip: tuple[str, ...] = (),
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Path, Path]:
    """A file in 4 bits, and what it stands for in float32."""
    more = SIZES | (EXPERTS if family != "qwen3_5" else {})
    source = write_tiny_model(folder / "dense", family, **more if sizes is None else sizes)
    options = {"group": 32} | options
    packed = write_int4(source, folder / "int4", skip=skip, **options)
    group, act_order = options["group"], options.get("act_order", False)
    tensors, stored = load_file(source / "model.safetensors"), load_file(packed / "model.safetensors")
    for name, tensor in tensors.items():
        if name not in stored:  # in 4 bits
            order = random_order(tensor.shape[1], group) if act_order else None
            parts = rounded(tensor, group, options.get("symmetric", False), order, torch.float16)
            tensors[name] = dequantised(*parts, group, order)
    assert sum(name not in stored for name in tensors) > 5
    save_file(tensors, source / "model.safetensors")
    return packed, source


def check_pair(packed: Path, dense: Path) -> None:
    """The weights are equal bit for bit, and the logits are those of transformers."""
    ours, theirs = load(packed), load(dense)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    expected = transformers_logits(dense, PROMPT)
    torch.testing.assert_close(forward(ours, PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_file_is_its_dequantised_weights(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Also those of queries and gates, and of q, k, v and z of each key head; gates of states in floats."""
    packed, dense = write_pair(tmp_path, family, **options)
    stored = load_file(packed / "model.safetensors")
    module = "in_proj_qkvz" if family == "qwen3_next" else "in_proj_qkv"
    assert f"model.layers.0.linear_attn.{module}.weight" not in stored
    check_pair(packed, dense)


@pytest.mark.parametrize("skip", [("linear_attn",), ("linear_attn", "self_attn", "shared_expert")], ids=str)
@pytest.mark.parametrize("format", ["awq", "compressed-tensors"])
def test_what_published_files_leave_in_16_bits(tmp_path: Path, format: str, skip: tuple[str, ...]) -> None:
    packed, dense = write_pair(tmp_path, "qwen3_5_moe", skip, format=format)
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in load_file(packed / "model.safetensors")
    expected = transformers_logits(dense, PROMPT)
    torch.testing.assert_close(forward(load(packed), PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["awq", "gptq", "compressed-tensors"])
def test_ranks_hold_their_heads(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 bits in memory, and in an engine of two ranks."""
    packed, dense = write_pair(tmp_path, "qwen3_next", format=format)
    monkeypatch.setattr("nanovllm.formats.int4.loading.keeps_bits", lambda options: True)

    def weights(tp: TPGroup) -> list[torch.Tensor]:
        config = load_model_config(packed)
        model = DecoderForCausalLM(config, tp, ReferenceBackend(), 64)
        allocate(model, WeightOptions(torch.float16, torch.device("cpu")), config.quant)
        load_weights(model, packed)
        [first, *_], attention = model.state_layers, model.model.layers[2].self_attn
        found = []
        for layer in (first.in_proj, attention.qkv_proj, attention.g_proj):
            method = layer.method
            assert isinstance(method, Int4LinearMethod)
            whole = dequantise_reference(method.weight.words, method.weight, torch.float16)
            found += whole.split(layer.output_sizes)
        return found

    whole, *halves = (weights(TPGroup(rank, size)) for rank, size in ((0, 1), (0, 2), (1, 2)))
    assert len(whole) == 8
    for one, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat([first, second]), one)
    if format != "awq":
        return
    monkeypatch.undo()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_tiny(packed, tensor_parallel_size=2) as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output["token_ids"] == transformers_greedy(dense, PROMPT, 8)


def test_new_weights_in_4_bits(tmp_path: Path) -> None:
    """The tensors of an update have the names of the files."""
    packed, dense = write_pair(tmp_path, "qwen3_next", format="awq")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_tiny(packed) as llm:
        before = {name: value.clone() for name, value in inside.model(llm).state_dict().items()}
        llm.update_weights(load_file(packed / "model.safetensors").items())
        after = inside.model(llm).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output["token_ids"] == transformers_greedy(dense, PROMPT, 8)


def test_what_is_refused(tmp_path: Path) -> None:
    """Words that hold rows of two heads, parts of one product in several formats, gates in 4 bits."""
    packed, _ = write_pair(tmp_path / "a", "qwen3_next", format="awq")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj_ba"
    gates = tensors | {f"{name}.qweight": torch.zeros(64, 1, dtype=torch.int32)}
    gates |= {f"{name}.scales": torch.ones(2, 12, dtype=torch.float16)}
    del gates[f"{name}.weight"]
    save_file(gates, packed / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing: .*linear_attn\.in_proj_b\.weight"):
        load(packed)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    head = {"head_dim": 12, "rope_parameters": rope}
    source = write_tiny_model(tmp_path / "odd", "qwen3_5", **SIZES | head)
    folder = write_int4(source, tmp_path / "odd4", "awq", group=32, skip=("o_proj",))
    with pytest.raises(ValueError, match=r"q_proj\.qweight: its words of 8 outputs hold rows of several"):
        load(folder)
    source = write_tiny_model(tmp_path / "half", "qwen3_5", **SIZES)
    folder = write_int4(source, tmp_path / "half4", "awq", group=32, skip=("in_proj_z",))
    with pytest.raises(ValueError, match=r"in_proj_z are one product; quantise them in the same way"):
        load(folder)
