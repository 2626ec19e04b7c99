"""A quantisation method is one class that creates, loads and applies a weight. Products on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from test_models import PROMPT, forward, load
from tiny_models import edit_json, write_tiny_model
from torch import nn

from nanovllm.attention.reference import ReferenceBackend
from nanovllm.cpu import isa
from nanovllm.cpu.dense import ONEDNN_NUMEL, ReorderedLinearMethod, can_reorder, torch_linear
from nanovllm.cpu.integers import IntegerLinearMethod
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.formats.fp8.method import Fp8LinearMethod
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import load_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.config import QUANTIZATIONS, QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource
from nanovllm.quantization.unquantized import dense_method


class Int8LinearMethod(LinearMethod):
    """Each row of the weight is int8 values and a scale, computed from the checkpoint's floats. Fuses
    nothing.
    """

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        self.codes = nn.Parameter(torch.zeros(shape, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(shape[0], 1, dtype=torch.float32), requires_grad=False)
        layer.register_parameter("codes", self.codes)
        layer.register_parameter("scales", self.scales)
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        rows = self.codes.float() * self.scales
        shard.copy(source, rows)
        self.scales.copy_(rows.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127)
        self.codes.copy_((rows / self.scales).round())

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x @ (self.codes.float() * self.scales).T
        return out if bias is None else out + bias


class Int8Config(QuantConfig):
    """All linear layers are int8."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        """stated: the `quantization_config` of config.json."""

    def method(self, path: str, kind: Kind) -> LinearMethod:
        return Int8LinearMethod() if kind == "linear" else super().method(path, kind)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_quantisation_is_one_linear_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = write_tiny_model(tmp_path, family)
    exact = forward(load(folder), PROMPT)
    monkeypatch.setitem(QUANTIZATIONS, "int8", Int8Config)
    edit_json(folder / "config.json", quantization_config={"quant_method": "int8"})
    model = load(folder)
    kinds = {name.split(".")[-1] for name, _ in model.model.layers.named_parameters() if "proj" in name}
    assert kinds - {"bias"} == {"codes", "scales"}
    logits = forward(model, PROMPT)
    assert 0 < (logits - exact).abs().max() < 0.05 * exact.abs().max()
    assert torch.equal(forward(load(folder), PROMPT), logits)
    init_dummy_weights(model, 0)
    assert model.model.layers[0].mlp.down_proj.codes.any() and forward(model, PROMPT).isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_products_on_a_cpu(dtype: torch.dtype, bias: bool) -> None:
    """oneDNN's product is that of a float64 product, for any number of rows and for rows with gaps."""
    shape = (1024, 512)
    assert shape[0] * shape[1] == ONEDNN_NUMEL
    weight, offset = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if bias else None
    wide = torch.randn(37, 2 * shape[1]).to(dtype)
    for x in (wide[:0, : shape[1]], wide[:1, shape[1] :], wide[::2, 5 : 5 + shape[1]], wide.view(37, 2, -1)):
        out = torch_linear(x, weight, offset)
        exact = nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        assert out.dtype == dtype and out.shape == exact.shape
        torch.testing.assert_close(
            out.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3
        )


def test_which_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    inside.replace_onednn(monkeypatch, lambda product: lambda *args: taken.append(1) or product(*args))
    large, x = torch.randn(1024, 512), torch.randn(3, 512)
    expected = torch_linear(x, large, None)
    assert taken == [1]
    torch_linear(x, large[:-1], None)  # small
    torch_linear(x.bfloat16(), large.bfloat16(), None)  # torch itself takes oneDNN
    assert taken == [1]
    inside.replace_onednn(monkeypatch, lambda product: None)  # a torch without it
    torch.testing.assert_close(torch_linear(x, large, None), expected, rtol=1e-4, atol=1e-3)


def test_weights_that_onednn_reorders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels for this CPU: the same logits, and further loads."""
    folder = write_tiny_model(tmp_path, "llama", intermediate_size=2**14, tie_word_embeddings=True)
    expected = forward(load(folder), PROMPT)
    monkeypatch.setattr(isa, "level", lambda: "torch")
    model = load(folder)
    assert isinstance(model.model.layers[0].mlp.down_proj.method, ReorderedLinearMethod)
    assert not isinstance(model.model.embed_tokens.method, ReorderedLinearMethod)  # read by rows
    logits = forward(model, PROMPT)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    init_dummy_weights(model, 0)
    assert not torch.equal(forward(model, PROMPT), logits)
    load_weights(model, folder)
    assert torch.equal(forward(model, PROMPT), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reordered_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of rows, a bias and a residual; the weight is there as it was loaded, part by part."""
    monkeypatch.setattr(isa, "level", lambda: "torch")
    shape, layer = (1023, 515), nn.Module()
    options = WeightOptions(dtype, torch.device("cpu"))
    if dtype == torch.bfloat16 and not can_reorder(shape, options):
        assert not isinstance(dense_method(shape, options, "linear"), ReorderedLinearMethod)
        return
    method = dense_method(shape, options, "linear")
    assert isinstance(method, ReorderedLinearMethod)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    parts = [WeightShard.rows((rows, shape[1]), offset) for rows, offset in ((500, 0), (523, 500))]
    method.create(layer, shape, parts, options)
    for part, rows in zip(parts, weight.split([500, 523]), strict=True):
        method.load(part, rows)
    method.finish_loading()
    assert torch.equal(method.dense(), weight) and layer.weight.numel() == 0
    method.load(parts[1], weight[:523])
    method.finish_loading()
    weight[500:] = weight[:523].clone()
    assert torch.equal(method.dense(), weight)
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for x in (torch.randn(*each, shape[1]).to(dtype) for each in ((0,), (1,), (37,), (2, 3))):
        exact = nn.functional.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(method.apply(x, bias).double(), exact, rtol=bound, atol=0.1 * bound * 23)
    term, rest = method.apply_and_add(x[0], torch.ones(3, shape[0], dtype=dtype), bias)
    assert rest is not None and torch.equal(term, method.apply(x[0], bias)) and bool((rest == 1).all())


class Int8Everywhere(Int8Config):
    """Also the embedding, for which it has no rows to look up."""

    def method(self, path: str, kind: Kind) -> LinearMethod:
        return Int8LinearMethod()


@pytest.mark.parametrize(
    ("tied", "kind", "lacks"),
    [(False, "embedding", "no embed"), (True, "tied_embedding", "no embed and no first_rows")],
)
def test_an_embedding_needs_a_method_with_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, kind: str, lacks: str
) -> None:
    """Refused before any weight is loaded, with the weight's name."""
    folder = write_tiny_model(tmp_path, "llama", tie_word_embeddings=tied)
    monkeypatch.setitem(QUANTIZATIONS, "int8", Int8Everywhere)
    edit_json(folder / "config.json", quantization_config={"quant_method": "int8"})
    message = (
        f"model.embed_tokens: Int8LinearMethod cannot store a weight of kind '{kind}', as it has {lacks}; "
    )
    with pytest.raises(ValueError, match=message + "leave this weight unquantised"):
        load(folder)


GATES = ("gate", "proj", "router", "shared_expert_gate", "gates_proj")  # of experts and of states
WITH_GATES = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "laguna", "lfm2_moe", "mellum", "minimax_m2"),
    *("gemma4-experts", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
)


@pytest.mark.parametrize("family", WITH_GATES)
def test_routers_and_gates_of_states_stay_as_they_are(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family)
    for quantization, capability in (("int8", (0, 0)), ("fp8", (9, 0))):
        config = load_model_config(folder, quantization=quantization)
        config = replace(config, quant=config.quant.on(capability))
        model = DecoderForCausalLM(config, TPGroup(), ReferenceBackend(), 32)
        allocate(model, WeightOptions(torch.float32, torch.device("cpu")), config.quant)
        kept, own = set(), set()
        for name, layer in model.named_modules():
            if hasattr(layer, "method") and ".layers." in name:
                quantised = isinstance(layer.method, (IntegerLinearMethod, Fp8LinearMethod))
                (own if quantised else kept).add(name.rpartition(".")[2])
        assert kept and kept <= {*GATES} and own and not own & {*GATES}, quantization
