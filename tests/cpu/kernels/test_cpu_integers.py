"""Weights of 8 and 4 bits on CPUs: from any checkpoint, as stored in GGUF files, split, replaced, refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny
from cpu_kernel_cases import int_linear_reference
from gguf_files import random_blocks
from integer_models import LARGE, PROMPT, SCORED, load, prompt_logprobs, without_matrices  # noqa: F401
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from nanovllm import SamplingParams
from nanovllm.cpu import isa
from nanovllm.cpu.integers import IntegerExpertsMethod, StoredConfig
from nanovllm.cpu.kernels.activation import silu_and_mul
from nanovllm.cpu.kernels.int_layout import FORMATS, HALVES, IntExperts, dequantised
from nanovllm.cpu.kernels.int_matmul import int_linear
from nanovllm.cpu.kernels.int_quantise import quantise
from nanovllm.kernels.activation import silu_and_mul_reference
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import load_weights
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.reference import experts_in_turn
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import PLAIN_MLP
from nanovllm.parallel.group import TPGroup
from tools.write_gguf import write_gguf

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dense"), "qwen2", **SIZES)


@pytest.mark.parametrize(
    ("quantization", "dtype", "bound"),
    [
        *(("int8", dtype, 0.4) for dtype in ("float32", "bfloat16")),
        *(("int4", dtype, 4.0) for dtype in ("float32", "bfloat16")),
        (None, "bfloat16", 0.15),
    ],
)
def test_log_probabilities_are_near_those_of_float32(
    dense: Path, quantization: str | None, dtype: str, bound: float
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


@pytest.mark.usefixtures("without_matrices")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("stored_as", [name for name in FORMATS if name not in HALVES])
def test_a_file_is_used_as_it_is_stored(tmp_path: Path, family: str, stored_as: str) -> None:
    """The weights are those of the file, bit for bit, and answers differ as int8 activations make them."""
    sizes = {**LARGE, **({"head_dim": 64} if family == "qwen3" else {})} if "_K" in stored_as else SIZES
    folder = write_tiny_model(tmp_path / "folder", family, tie_word_embeddings=True, **sizes)
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
    encoders = {name: random_blocks(name) for name in ("Q4_0", "Q3_K", "Q2_K")}

    def encode(name: str, values: Any) -> Any:
        kind = (
            "Q3_K" if "ffn_down" in name or "token_embd" in name else "Q2_K" if "attn_v" in name else "Q4_0"
        )
        return encoders[kind](name, values)

    path = write_gguf(folder, tmp_path / "m.gguf", encode)
    model = load(path)
    kept = {name for name, each in model.named_modules() if hasattr(getattr(each, "method", None), "format")}
    # q_proj, k_proj and v_proj are one product, and no kernel reads a part of it.
    layers = {
        f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.gate_up_proj")
    }
    assert kept == layers | {"lm_head"}
    with caplog.at_level(logging.WARNING, "nanovllm"), make_tiny(path):
        pass
    expected = "GGUF weights are used as they are stored: 7 Q4_0; dequantised: 2 Q2_K, 3 Q3_K, 4 Q4_0; the "
    expected += (
        "activations that they multiply are rounded to 8 bits, 16 values with a scale (exact, and slower: "
    )
    expected += "quantization='dequantize' with dtype='float32')"
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


# -- experts ------------------------------------------------------------------------------------------------

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 64}


def experts_of(model: DecoderForCausalLM, layer: int = 0) -> IntegerExpertsMethod:
    [block] = [each for each in model.model.layers[layer].modules() if hasattr(each, "experts_method")]
    method = block.experts_method
    assert isinstance(method, IntegerExpertsMethod)
    return method


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.2), ("int4", 2.0)])
def test_a_mixture_of_experts(tmp_path: Path, quantization: str, bound: float) -> None:
    """Experts are quantised, each row of each expert by itself; routers are not. Shared ones are layers."""
    more = {"shared_expert_intermediate_size": 96, "intermediate_size": 96}
    folder = write_tiny_model(tmp_path / "folder", "qwen2_moe", **EXPERTS, **more)
    exact, found = prompt_logprobs(folder), prompt_logprobs(folder, quantization=quantization)
    assert 0 < (found - exact).abs().max() < bound
    model, tensors = load(folder, quantization), load_file(folder / "model.safetensors")
    floats = {name for name, each in model.named_parameters() if each.is_floating_point()}
    assert {name.split(".", 4)[4] for name in floats if ".mlp." in name} == {
        "gate.weight",
        "shared_expert_gate.weight",
    }
    method, format = experts_of(model, 1), FORMATS["Q8_0" if quantization == "int8" else "Q4_0"]
    for expert in range(EXPERTS["num_experts"]):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        gate, up, down = (tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        for weight, own in ((torch.cat([gate, up]), method.gate_up), (down, method.down)):
            assert torch.equal(own[expert].dense(), dequantised(format, *quantise(format, weight)))
    before = [each.data.clone() for each in (method.gate_up, method.down)]
    for each in model.parameters():
        each.data.fill_(1)
    load_weights(model, folder)
    assert all(map(torch.equal, before, (method.gate_up.data, method.down.data)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_products_of_experts(dtype: torch.dtype, rows: int) -> None:
    """Against the twin in plain torch; with rows that are routed nowhere, and an expert without rows."""
    torch.manual_seed(rows)
    hidden, width, experts = 72, 40, 5
    gate_up = IntExperts.zeros(FORMATS["Q4_1"], experts, 2 * width, hidden, torch.device("cpu"))
    down = IntExperts.zeros(FORMATS["Q8_0"], experts, hidden, width, torch.device("cpu"))
    for weights in (gate_up, down):
        for expert in range(experts):
            values = torch.randn(weights.n, weights.k) / 8
            weights[expert].store(0, quantise(weights.format, values))
    x = torch.randn(rows, hidden).to(dtype)
    logits = torch.randn(rows, experts).index_fill(1, torch.tensor([3]), -100.0)
    slots = torch.arange(rows).index_fill(0, torch.arange(0, rows, 4), -1) if rows > 1 else None
    chosen = Routing(logits, 2, True, slots).chosen()
    kernels = PLAIN_MLP, int_linear, silu_and_mul
    found = experts_in_turn(x, gate_up, down, chosen, *kernels)
    plain = PLAIN_MLP, int_linear_reference, silu_and_mul_reference
    wanted = experts_in_turn(x, gate_up, down, chosen, *plain)
    assert (found - wanted).abs().max() <= (1e-5 if dtype is torch.float32 else 2e-2)
    alone = [
        experts_in_turn(
            x[i : i + 1], gate_up, down, chosen.__class__(*(c[i : i + 1] for c in chosen)), *kernels
        )
        for i in range(rows)
    ]
    assert torch.equal(torch.cat(alone), found)
    if slots is not None:
        assert not found[slots < 0].any()


@pytest.mark.usefixtures("without_matrices")
@pytest.mark.parametrize("stored_as", [name for name in FORMATS if name not in HALVES])
def test_experts_of_a_file_are_used_as_they_are_stored(tmp_path: Path, stored_as: str) -> None:
    sizes = {**EXPERTS, "head_dim": 16}
    if "K" in stored_as:
        sizes |= {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    folder = write_tiny_model(tmp_path / "folder", "qwen3_moe", **sizes)
    path = write_gguf(folder, tmp_path / "m.gguf", random_blocks(stored_as))
    method, exact = experts_of(load(path), 1), load(path, "dequantize").model.layers[1]
    [block] = [each for each in exact.modules() if hasattr(each, "experts_method")]
    for own, wanted in zip((method.gate_up, method.down), block.experts_method.dense(), strict=True):
        assert own.format.name == stored_as
        assert torch.equal(torch.stack([each.dense() for each in own]), wanted)
    found, wanted = prompt_logprobs(path), prompt_logprobs(path, quantization="dequantize")
    assert 0 < (found - wanted).abs().max() < 2


def test_experts_that_cannot_all_stay_are_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {**EXPERTS, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 32}
    folder = write_tiny_model(tmp_path / "folder", "qwen3_moe", **sizes)
    encoders = {name: random_blocks(name) for name in ("Q4_0", "Q4_1", "Q3_K")}

    def encode(name: str, values: Any) -> Any:
        if "blk.0.ffn_down_exps" in name:
            return encoders["Q3_K"](name, values)
        return encoders["Q4_1" if "ffn_down_exps" in name else "Q4_0"](name, values)

    path = write_gguf(folder, tmp_path / "m.gguf", encode)
    model = load(path)
    method = experts_of(model, 1)
    assert (method.gate_up.format.name, method.down.format.name) == ("Q4_0", "Q4_1")
    assert type(model.model.layers[0].mlp.experts.experts_method) is UnquantizedExpertsMethod
    with caplog.at_level(logging.WARNING, "nanovllm"), make_tiny(path):
        pass
    assert "1 Q4_1; dequantised: 1 Q3_K, 4 Q4_0; the activations that" in caplog.text  # also routers
    path = "model.layers.0.block_sparse_moe.experts"  # Mixtral's
    config = StoredConfig({f"{path}.{name}_proj": "Q8_0" for name in ("gate", "up", "down")})
    assert type(config.experts(path)) is IntegerExpertsMethod
    assert type(config.experts("model.layers.1.mlp.experts")) is UnquantizedExpertsMethod


@pytest.mark.parametrize("quantization", ["int4", None])
def test_two_ranks_hold_parts_of_experts(tmp_path: Path, quantization: str | None) -> None:
    folder = write_tiny_model(tmp_path / "folder", "qwen3_moe", **EXPERTS, head_dim=16)
    path = folder if quantization else write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    whole = experts_of(load(path, quantization))
    parts = [experts_of(load(path, quantization, TPGroup(rank, 2))) for rank in range(2)]
    for expert in (0, 5):
        split = torch.cat([each.down[expert].dense() for each in parts], 1)
        assert torch.equal(split, whole.down[expert].dense())
        gates, ups = zip(*(each.gate_up[expert].dense().chunk(2) for each in parts), strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), whole.gate_up[expert].dense())
    answers = [
        prompt_logprobs(path, quantization=quantization, dtype="float32", tensor_parallel_size=ranks)
        for ranks in (1, 2)
    ]
    assert (answers[0] - answers[1]).abs().max() < 2e-2


def test_ranks_that_would_split_groups_of_experts_are_refused(tmp_path: Path) -> None:
    sizes = EXPERTS | {"moe_intermediate_size": 32, "head_dim": 16}
    folder = write_tiny_model(tmp_path / "folder", "qwen3_moe", **sizes)
    path = write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ValueError, match=r"32 inputs in groups of 32 cannot be split into parts of 16; use"):
        load(path, tp=TPGroup(0, 2))
    load(path, "dequantize", TPGroup(0, 2))
    load(folder, "int8", TPGroup(0, 2))


def test_experts_sleep_and_take_new_weights(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "folder", "qwen3_moe", **EXPERTS, head_dim=16)
    tensors = load_file(folder / "model.safetensors")
    with make_tiny(folder, quantization="int8") as llm:
        first = llm.generate([PROMPT], SCORED, use_tqdm=False)[0].outputs[0]
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                llm.update_weights(tensors)
            again = llm.generate([PROMPT], SCORED, use_tqdm=False)[0].outputs[0]
            assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs)
