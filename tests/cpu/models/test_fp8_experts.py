"""Experts in FP8: what their files mean, ranks, updates, and the kernels, interpreted on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp8_cases
import pytest
import torch
from digests import digest
from fp8_models import EXPERT, Tensors, build, dequantised, loaded, tensors_of
from moe_cases import SWAPPED, WIDE
from safetensors.torch import save_file
from test_models import PROMPT, forward
from test_models import load as load_model
from tiny_models import edit_json, write_tiny_model

from nanovllm.formats.fp8.kernels.values import GROUP
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import INTERPRET
from nanovllm.layers.weights import finish_loading, weight_slots
from nanovllm.models.weights import load_weights
from nanovllm.moe.kernels.grouped_matmul import choose_experts
from nanovllm.parallel.group import TPGroup
from tools.write_fp8 import SCALES, write_fp8

SIZES: dict[str, Any] = {"hidden_size": 144, "head_dim": 32, "moe_intermediate_size": 40, "num_experts": 5}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3_moe", **SIZES)


@pytest.mark.parametrize("kind", SCALES)
def test_experts_of_a_file(tmp_path: Path, plain: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantised, the answers are those of the floats that the file means; in FP8 they are near."""
    folder = write_fp8(plain, tmp_path / "fp8", kind)
    tensors = tensors_of(folder)
    assert tensors[f"{EXPERT}.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    floats = write_fp8(plain, tmp_path / "floats", kind)
    save_file(dequantised(tensors), floats / "model.safetensors")
    edit_json(floats / "config.json", remove=("quantization_config",))
    exact = forward(load_model(floats), PROMPT)
    assert torch.equal(forward(load_model(folder), PROMPT), exact)

    def as_gpu(folder: Path) -> Any:
        return build(folder).config

    monkeypatch.setattr("test_models.load_model_config", as_gpu)
    model = load_model(folder)
    assert model.model.layers[0].mlp.experts.experts_method.dense is None
    logits = forward(model, PROMPT)
    assert 0.005 < (logits - exact).norm() / exact.norm() < 0.3  # a changed route is far away


@pytest.mark.parametrize("products", [True, False])
def test_on_the_fly_and_updates(tmp_path: Path, plain: Path, products: bool) -> None:
    folder = write_fp8(plain, tmp_path / "fp8", "channel")
    expected = digest(loaded(folder, products=products))
    assert digest(loaded(plain, products=products, quantization="fp8")) == expected
    model = build(folder, products=products)
    other = write_tiny_model(tmp_path / "other", "qwen3_moe", seed=1, **SIZES)
    for tensors in (tensors_of(other), tensors_of(plain)):
        update(model, tensors)
    assert digest(model) == expected
    with pytest.raises(ValueError, match=r"experts: experts\.3\.down_proj\.weight in float8_e4m3fn, without"):
        update(model, {f"{EXPERT}.weight": tensors_of(folder)[f"{EXPERT}.weight"]})


def update(model: Any, tensors: Tensors) -> None:
    slots = weight_slots(model)
    for name, tensor in tensors.items():
        layer, shard = slots[name]
        layer.load(shard, tensor)
    finish_loading(model)


@pytest.mark.parametrize("kind", SCALES)
def test_ranks_hold_parts_of_experts(tmp_path: Path, plain: Path, kind: str) -> None:
    folder = write_fp8(plain, tmp_path, kind)
    whole, first, second = (
        values(folder, tp, kind != "block") for tp in (TPGroup(), TPGroup(0, 2), TPGroup(1, 2))
    )
    gate_up, down = whole
    halves = [torch.cat((a, b), 1) for a, b in zip(first[0], second[0], strict=True)]
    assert torch.equal(torch.cat(halves, 1), torch.cat(list(gate_up), 1))
    assert torch.equal(torch.cat((first[1], second[1]), 2), down)


def values(folder: Path, tp: TPGroup, products: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The weights of the experts of a layer, without padding: gate and up, and down."""
    model = build(folder, tp)
    load_weights(model, folder)
    method, width = model.model.layers[1].mlp.experts.experts_method, 40 // tp.size
    assert (method.dense is None) == (products or tp.size == 1)
    if method.dense is None:
        stacks = [
            torch.stack([each.expert(index).float() for index in range(5)])
            for each in (method.gate_up, method.down)
        ]
    else:
        stacks = list(method.dense.dense())
    gate_up, down = stacks
    assert not down[:, :, width:].any()
    return [each[:, :width] for each in gate_up.chunk(2, 1)], down[:, :, :width]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs these cases")
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_kernels_of_experts(rows: int, group: int | None) -> None:
    plain = choose_experts(1, 5, torch.float32, torch.device("cpu"))
    for choice in (plain, SWAPPED, WIDE):
        fp8_cases.check_experts(rows, group, "cpu", choice)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs these cases")
@pytest.mark.parametrize("group", [None, GROUP])
def test_experts_with_another_activation(group: int | None) -> None:
    """GELU, as in Gemma 4."""
    plain = choose_experts(1, 5, torch.float32, torch.device("cpu"))
    fp8_cases.check_experts(3, group, "cpu", plain, Activation.GELU_TANH)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs these cases")
@pytest.mark.parametrize("group", [None, GROUP])
def test_rows_are_independent(group: int | None) -> None:
    """Also with tiles that compute the transposed product."""
    choices = [choose_experts(1, 5, torch.float32, torch.device("cpu")), SWAPPED]
    fp8_cases.check_rows_of_experts_are_independent([1, 5], (144, 32), group, "cpu", choices)
