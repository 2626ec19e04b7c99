"""Experts in NVFP4: what their files mean, ranks, updates, and the kernels, interpreted on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import int4_expert_cases
import pytest
import torch
from checked_llm import make_tiny
from digests import digest, make_digest
from engine_cases import make_prompts, tokens
from int4_cases import NVFP4
from moe_cases import Sizes, exact_experts
from odd_files import edit_quantization, in_floats
from safetensors.torch import load_file
from tensors import BF16, F16, F32, assert_near
from test_int4 import build
from test_models import PROMPT, forward, load
from tiny_models import transformers_logits, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.formats.int4.kernels.experts import choose_int4_experts
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights, weight_bytes
from nanovllm.moe.kernels.grouped_matmul import ExpertChoice, ExpertTile
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import PLAIN_MLP
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.base import Normed
from tools.write_nvfp4 import Tensors, write_nvfp4

interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)
# 5 and 3 groups of 16.
SIZES: dict[str, Any] = {
    **{"hidden_size": 80, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 5},
    **{"num_hidden_layers": 2, "intermediate_size": 64},
}
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TILE = ExpertTile(64, 128, 2, swap=True)
CHOICE = ExpertChoice(16, TILE, TILE)
KINDS = ("modelopt", "nvfp4")
EXPERT = "model.layers.1.mlp.experts.3"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3_moe", **SIZES)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep 4 bits on a CPU too, where plain torch multiplies them."""
    monkeypatch.setattr("nanovllm.formats.int4.loading.keeps_bits", lambda options: True)


def method_of(model: Any) -> Any:
    return model.model.layers[1].mlp.experts.experts_method


# -- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_its_weights(plain: Path, tmp_path: Path, kind: str) -> None:
    """Each projection of each expert has a factor of its own."""
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", kind)
    floats = in_floats(folder, tmp_path / "floats", meant)
    check_weights(load_model_config(folder), folder)
    model, exact = load(folder), load(floats)
    assert digest(model) == digest(exact)
    found = forward(model, PROMPT)
    assert torch.equal(found, forward(exact, PROMPT))
    torch.testing.assert_close(found, transformers_logits(floats, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_other_families(tmp_path: Path, family: str) -> None:
    sizes = SIZES | {"intermediate_size": 48}
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 32
    source = write_tiny_model(tmp_path / "plain", family, **sizes)
    folder, meant = write_nvfp4(source, tmp_path / "nvfp4", "modelopt")
    assert digest(load(folder)) == digest(load(in_floats(folder, tmp_path / "floats", meant)))


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_files(plain: Path, tmp_path: Path, kind: str) -> None:
    """Experts in NVFP4 beside attention in 8 bits; those of one layer in 16 bits. ModelOpt has one entry for
    all experts of a layer."""
    other = {"modelopt": "modelopt-fp8", "nvfp4": "int8"}[kind]
    folder, meant = write_nvfp4(
        plain, tmp_path / "nvfp4", kind, others={"self_attn": other}, skip=("layers.0.mlp.experts",)
    )
    if kind == "modelopt":
        stated = edit_quantization(folder)["quantized_layers"]
        layers = {name: each for name, each in stated.items() if ".experts." not in name}
        layers["model.layers.1.mlp.experts"] = stated[f"{EXPERT}.up_proj"]
        edit_quantization(folder, quantized_layers=layers)
    config = load_model_config(folder)
    check_weights(config, folder)
    model = load(folder)
    names = [type(layer.mlp.experts.experts_method).__name__ for layer in model.model.layers]
    assert names == ["UnquantizedExpertsMethod", "Nvfp4ExpertsMethod"]
    exact = load(in_floats(folder, tmp_path / "floats", meant))
    assert torch.allclose(forward(model, PROMPT), forward(exact, PROMPT), atol=1e-5)
    if kind == "modelopt":
        on_gpu = config.quant.on((9, 0))
        assert (on_gpu.itemsize, on_gpu.expert_itemsize) == (1, 0.5625)
        assert "NVFP4" in str(on_gpu.note)
    else:
        on_gpu = config.quant.on((9, 0))
        assert (on_gpu.itemsize, on_gpu.expert_itemsize) == (None, 0.5625)


def test_which_experts_are_quantised(plain: Path, tmp_path: Path) -> None:
    """By wildcards, and by the block that holds them."""
    folder, _ = write_nvfp4(plain, tmp_path / "skip", "modelopt", skip=("layers.1.mlp.experts",))
    kept = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    for name in ("model.layers.1.mlp.experts*", "model.layers.1.mlp.experts", "*layers.1.mlp*"):
        edit_quantization(folder, ignore=[*kept, name])
        names = [type(each.mlp.experts.experts_method).__name__ for each in load(folder).model.layers]
        assert names == ["Nvfp4ExpertsMethod", "UnquantizedExpertsMethod"]


# -- 4 bits in memory ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_4_bits_in_memory(plain: Path, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", kind)
    method = method_of(build(folder, dtype))
    for index in range(5):
        parts = dict(zip(("gate_proj", "up_proj"), method.gate_up[index].chunk(2), strict=True))
        for projection, found in (parts | {"down_proj": method.down[index]}).items():
            weight = meant[f"model.layers.1.mlp.experts.{index}.{projection}.weight"]
            assert torch.allclose(found.float(), weight.to(dtype).float(), rtol=2**-8, atol=0)
    gate_up, down = method.gate_up, method.down
    assert gate_up.words.nbytes == 5 * 96 * 128 // 2 and gate_up.scales.nbytes == 5 * 96 * 8
    assert gate_up.factors.shape == (5, 96) and len(down.factors.unique()) == 5
    x, logits = torch.randn(5, 80).to(dtype), torch.randn(5, 5)
    routing = Routing(logits, 3, True)
    out = method.apply(Normed.computed(x, x), routing, PLAIN_MLP)
    weights = [torch.stack([each[index].double() for index in range(5)]) for each in (gate_up, down)]
    assert_near(out, exact_experts(x, *weights, routing.chosen()))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_parts_of_experts(tmp_path: Path, kind: str) -> None:
    source = write_tiny_model(tmp_path / "plain", "qwen3_moe", **{**SIZES, "moe_intermediate_size": 96})
    folder, _ = write_nvfp4(source, tmp_path / "nvfp4", kind)
    ranks = (TPGroup(), TPGroup(0, 2), TPGroup(1, 2))
    whole, first, second = (method_of(build(folder, F16, tp)) for tp in ranks)
    for index in range(5):
        halves = [each.gate_up[index].chunk(2) for each in (first, second)]
        both = [torch.cat(each) for each in zip(*halves, strict=True)]
        assert torch.equal(torch.cat(both), whole.gate_up[index])
        assert torch.equal(torch.cat((first.down[index], second.down[index]), 1), whole.down[index])


def test_what_ranks_cannot_split(plain: Path, tmp_path: Path) -> None:
    folder, _ = write_nvfp4(plain, tmp_path / "nvfp4", "modelopt")
    with pytest.raises(
        ValueError, match=r"experts: 48 inputs in groups of 16 .* parts of 24, .* could be 1, 3$"
    ):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "plain", "qwen3_moe", **{**SIZES, "moe_intermediate_size": 96})
    folder, meant = write_nvfp4(source, tmp_path / "nvfp4", "modelopt")
    with make_tiny(in_floats(folder, tmp_path / "floats", meant)) as llm:
        wanted = tokens(llm.generate(make_prompts()[:3], SHORT, use_tqdm=False))
    with make_tiny(folder, tensor_parallel_size=2) as llm:
        assert tokens(llm.generate(make_prompts()[:3], SHORT, use_tqdm=False)) == wanted


def test_updates_and_sleep(plain: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", "qwen3_moe", seed=1, **SIZES)
    folders = {tmp_path / "first": plain, tmp_path / "second": other}
    first, second = (write_nvfp4(source, target, "nvfp4")[0] for target, source in folders.items())
    new: Tensors = load_file(second / "model.safetensors")
    with make_digest(second) as llm:
        wanted = llm.on_ranks("digest")
    with make_digest(first) as llm:
        before = llm.on_ranks("digest")
        llm.sleep(2)
        llm.wake_up()
        assert llm.on_ranks("digest") == before
        llm.update_weights(new.items())
        assert llm.on_ranks("digest") == wanted
        name = f"{EXPERT}.up_proj.weight_scale"
        with pytest.raises(ValueError, match=r"experts\.3\.up_proj: weight_scale came without weight_packed"):
            llm.update_weights({name: new[name]})


@pytest.mark.usefixtures("packed")
def test_dummy_weights(plain: Path, tmp_path: Path) -> None:
    folder, _ = write_nvfp4(plain, tmp_path, "nvfp4")
    model = build(folder, BF16)
    init_dummy_weights(model, 0)
    first, second = method_of(model).gate_up[0], method_of(model).gate_up[1]
    assert 0.015 < first.float().std() < 0.025 and not torch.equal(first, second)


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@interpreted
@pytest.mark.parametrize(
    ("rows", "sizes", "dtype"),
    [
        (1, Sizes(3, 2, 80, 16), F16),
        (2, Sizes(2, 1, 48, 144), BF16),
        (5, Sizes(4, 2, 144, 80, clamped=True), BF16),
        (19, Sizes(4, 2, 176, 48), F16),
    ],
)
def test_kernels(rows: int, sizes: Sizes, dtype: torch.dtype) -> None:
    int4_expert_cases.check_experts(rows, sizes, (NVFP4, NVFP4), dtype, "cpu", CHOICE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@interpreted
def test_rows_are_independent() -> None:
    choices = [CHOICE, ExpertChoice(32, TILE, TILE)]
    sizes = Sizes(5, 2, 80, 48)
    int4_expert_cases.check_rows_are_independent([3, 17], sizes, (NVFP4, NVFP4), F16, "cpu", choices)


def test_deterministic_products_are_never_dequantised() -> None:
    """A dequantised weight contains its factor, and is rounded once more."""
    many = 451 * 128
    assert not choose_int4_experts(many, 128, torch.device("cpu")).gate_up.swap
    choice = choose_int4_experts(many, 128, torch.device("cpu"), True)
    assert choice.gate_up.swap and choice.down.swap and choice.rows == 64


def test_values_are_the_same_in_float32(plain: Path, tmp_path: Path) -> None:
    """What a GPU keeps is what a CPU dequantises, but for one rounding."""
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", "modelopt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.formats.int4.loading.keeps_bits", lambda options: True)
        kept = method_of(build(folder, F32))
    weight = meant[f"{EXPERT}.down_proj.weight"]
    assert torch.allclose(kept.down[3], weight, rtol=1e-6, atol=0)
