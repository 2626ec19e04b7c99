"""Weights in FP8 on a CPU: what their files mean, ranks, products, updates and sleep.

`products` models compute as on a GPU that multiplies FP8 values, with the references of the kernels; the
others with dequantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from digests import DigestLLM, digest, make_digest
from fp8_models import (
    DOWN,
    EXPERT,
    GREEDY,
    KINDS,
    OPTIONS,
    SIZES,
    Tensors,
    dequantised,
    loaded,
    on_gpus,
    tensors_of,
)
from safetensors.torch import save_file
from tensors import F32
from test_models import PROMPT, forward
from test_models import load as load_model
from tiny_models import VOCAB_SIZE, edit_json, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.formats.fp8 import method as fp8
from nanovllm.formats.fp8.kernels.values import FP8, GROUP, quantise_rows
from nanovllm.formats.fp8.loading import Stored, quantise_weight
from nanovllm.formats.fp8.method import Fp8Config, Fp8LinearMethod
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.weights import WeightLayer, finish_loading, weight_slots
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights
from nanovllm.parallel.group import TPGroup
from tools.write_fp8 import write_fp8

# The options of a tiny model of each family.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"intermediate_size": 224},
    "qwen3_moe": {"hidden_size": 144, "head_dim": 32, "moe_intermediate_size": 80, "num_experts": 5},
}


def write_kind(folder: Path, family: str, kind: str, seed: int = 0) -> tuple[Path, str | None]:
    """A tiny model in a format, or with "fly" in floats, and the option `quantization` for it."""
    plain = write_tiny_model(folder / f"plain{seed}", family, seed=seed, **MODELS[family])
    if kind == "fly":
        return plain, "fp8"
    return write_fp8(plain, folder / f"{kind}{seed}", kind), None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path) -> dict[str, Path]:
    """The same model in each format."""
    return {kind: write_fp8(plain, plain.parent / f"{plain.name}-{kind}", kind) for kind in KINDS}


# -- what a checkpoint means --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_dequantised_where_nothing_multiplies_fp8(
    tmp_path: Path, written: dict[str, Path], plain: Path, kind: str
) -> None:
    same = write_fp8(plain, tmp_path, kind)
    tensors = tensors_of(same)
    assert tensors[f"{DOWN}.weight"].dtype == FP8 and tensors["lm_head.weight"].dtype == F32
    save_file(dequantised(tensors), same / "model.safetensors")
    edit_json(same / "config.json", remove=("quantization_config",))
    exact = forward(load_model(same), PROMPT)
    assert torch.equal(forward(load_model(written[kind]), PROMPT), exact)
    assert not torch.equal(forward(load_model(plain), PROMPT), exact)


@pytest.mark.parametrize("products", [False, True])
def test_on_the_fly_is_the_file_with_scales_of_rows(
    written: dict[str, Path], plain: Path, products: bool
) -> None:
    from_file = loaded(written["channel"], products=products)
    assert digest(loaded(plain, products=products, quantization="fp8")) == digest(from_file)


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_fp8(written: dict[str, Path], kind: str) -> None:
    """Codes, scales and the product of each weight, against arithmetic of our own."""
    tensors = tensors_of(written[kind])
    weights, model = dequantised(tensors), loaded(written[kind])
    layer = model.model.layers[0]
    x = torch.randn(5, 144)
    for module, names in ((layer.self_attn.qkv_proj, "qkv"), (layer.mlp.gate_up_proj, ("gate", "up"))):
        path = "self_attn" if names == "qkv" else "mlp"
        rows = torch.cat([weights[f"model.layers.0.{path}.{name}_proj.weight"] for name in names])
        torch.testing.assert_close(module.method.weight.float(), rows, rtol=1e-6, atol=0)
        codes = quantise_rows(x, module.method.weight.group)
        assert (codes.group == GROUP) == (kind == "block")
        out = module.method.apply(x)
        torch.testing.assert_close(out, codes.float() @ rows.T, rtol=1e-5, atol=1e-4)
        assert 0 < (out - x @ rows.T).norm() < 0.06 * out.norm()
    down = weights["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(layer.mlp.down_proj.method.weight.float(), down, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [*KINDS, "fly"])
def test_answers_in_fp8_are_near(
    written: dict[str, Path], plain: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole model with quantised activations: norm, SiLU and residual are written in FP8."""
    folder, asked = (plain, "fp8") if kind == "fly" else (written[kind], None)

    def config_of(folder: Path) -> ModelConfig:
        return on_gpus(load_model_config(folder, quantization=asked))

    exact = forward(load_model(plain), PROMPT)
    monkeypatch.setattr("test_models.load_model_config", config_of)
    model = load_model(folder)
    assert model.model.layers[0].self_attn.o_proj.method.dense is None
    logits = forward(model, PROMPT)
    error = (logits - exact).norm() / exact.norm()
    assert 0.005 < error < 0.2
    one = torch.cat([forward(model, PROMPT[: end + 1])[-1:] for end in range(len(PROMPT))])
    torch.testing.assert_close(one, logits, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2", "phi3", "granite", "glm4"])
def test_families_whose_layers_differ(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms with an offset or after a block, GELU, multipliers and packed tensors, with products in FP8."""
    folder = write_tiny_model(tmp_path, family)
    exact = forward(load_model(folder), PROMPT)
    monkeypatch.setattr(
        "test_models.load_model_config",
        lambda folder: on_gpus(load_model_config(folder, quantization="fp8")),
    )
    model = load_model(folder)
    assert model.model.layers[0].mlp.down_proj.method.dense is None
    logits = forward(model, PROMPT)
    assert 0.005 < (logits - exact).norm() / exact.norm() < 0.2


@pytest.mark.parametrize("kind", ["channel", "tensor"])
def test_packed_tensors(tmp_path: Path, kind: str) -> None:
    """A file's qkv_proj and gate_up_proj in FP8, with scales of rows or one for the whole packed tensor."""
    source = write_tiny_model(tmp_path / "plain", "phi3")
    tensors = tensors_of(folder := write_fp8(source, tmp_path / "fp8", kind))
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].dtype == FP8
    save_file(dequantised(tensors), source / "model.safetensors")
    check_weights(load_model_config(folder), folder)
    assert torch.equal(forward(load_model(folder), PROMPT), forward(load_model(source), PROMPT))


# -- ranks --------------------------------------------------------------------------------------------------


def ranks_layers(tp: TPGroup) -> dict[str, WeightLayer]:
    return {
        "qkv_proj": QKVParallelLinear(144, 32, 4, 2, tp),
        "gate_up_proj": MergedColumnParallelLinear(144, {"gate_proj": 208, "up_proj": 208}, tp),
        "down_proj": RowParallelLinear(288, 144, tp),
        "o_proj": RowParallelLinear(512, 144, tp),
    }


SHAPES = {"q_proj": (128, 144), "k_proj": (64, 144), "v_proj": (64, 144), "gate_proj": (208, 144)} | {
    "up_proj": (208, 144),
    "down_proj": (144, 288),
    "o_proj": (144, 512),
}


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("stored", Stored)
def test_scales_are_split_with_their_rows(stored: Stored, products: bool) -> None:
    """The parts of two ranks are those of the whole weight. Blocks that ranks would share are dequantised."""
    source = Tensors()
    for name, shape in SHAPES.items():
        weight = torch.randn(shape) * torch.linspace(0.1, 2, shape[0])[:, None]
        source[f"{name}.weight"] = weight
        if stored is not Stored.FLOATS:
            codes, scales = quantise_weight(weight, stored)
            last = "weight_scale_inv" if stored is Stored.BLOCKS else "weight_scale"
            source[f"{name}.weight"], source[f"{name}.{last}"] = codes, scales
    parts: list[dict[str, torch.Tensor]] = []
    for tp in (TPGroup(0, 1), TPGroup(0, 2), TPGroup(1, 2)):
        found = {}
        for name, layer in ranks_layers(tp).items():
            layer.allocate(name, OPTIONS, Fp8Config(stored, products=products))
            for shard in layer.shards:
                layer.load(shard, source[f"{shard.module_name(name)}.{shard.param}"])
            finish_loading(layer)
            method = layer.method
            assert isinstance(method, Fp8LinearMethod)
            shared = stored.in_blocks and name == "down_proj" and tp.size == 2  # 144 columns each
            assert (method.dense is None) == (products and not shared)
            found[name] = method.weight.float() if method.dense is None else method.dense.dense()
        parts.append(found)
    whole, first, second = parts
    torch.testing.assert_close(torch.cat((first["down_proj"], second["down_proj"]), 1), whole["down_proj"])
    assert torch.equal(torch.cat((first["o_proj"], second["o_proj"]), 1), whole["o_proj"])
    for name, sizes in (("qkv_proj", (64, 32, 32)), ("gate_up_proj", (104, 104))):
        both = zip(first[name].split(sizes), second[name].split(sizes), strict=True)
        assert torch.equal(torch.cat([torch.cat(pair) for pair in both]), whole[name])


def cells(*first: tuple[str, str]) -> list[Any]:
    """Each family in each kind; all but `first` are marked `full`."""
    every = [(family, kind) for family in MODELS for kind in ("channel", "block", "fly")]
    return [pytest.param(*each, marks=[] if each in first else pytest.mark.full) for each in every]


@pytest.mark.parametrize(
    ("family", "kind"),
    cells(("qwen3", "channel"), ("qwen3", "block"), ("qwen3", "fly"), ("qwen3_moe", "block")),
)
def test_two_ranks_answer_like_one(tmp_path: Path, family: str, kind: str) -> None:
    folder, asked = write_kind(tmp_path, family, kind)
    prompts = [[5, 6, 7, 8], [9] * 11]
    answers = []
    for ranks in (1, 2):
        with make_tiny(folder, tensor_parallel_size=ranks, quantization=asked) as llm:
            answers.append([out["token_ids"] for out in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("gpu_like")
@pytest.mark.parametrize(("family", "kind"), cells(("qwen3_moe", "channel")))
def test_products_of_two_ranks_are_near_those_of_one(tmp_path: Path, family: str, kind: str) -> None:
    """Each rank quantises its part of a row by itself, so the results differ a little."""
    folder, asked = write_kind(tmp_path, family, kind)
    params, found = SamplingParams(max_tokens=0, prompt_logprobs=-1), []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "quantization": asked, "max_logprobs": -1}
        with make_tiny(folder, **options) as llm:
            layer = inside.model(llm).model.layers[0]
            assert layer.self_attn.qkv_proj.method.dense is None
            method = layer.mlp.experts.experts_method if "moe" in family else layer.mlp.down_proj.method
            assert (method.dense is None) == (ranks == 1 or kind != "block")  # ranks would share a block
            [output] = llm.generate([[5, 6, 7, 8] * 4], params, use_tqdm=False)
        rows = [[each[n].logprob for n in range(VOCAB_SIZE)] for each in output.prompt_logprobs[1:]]
        found.append(torch.tensor(rows))
    one, two = (each - each.mean(1, keepdim=True) for each in found)
    assert 0 < (one - two).norm() / one.norm() < 0.12


# -- engines ------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compute as on a GPU that multiplies FP8 values."""
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda capability: True)


@pytest.fixture
def engine(gpu_like: None) -> Iterator[Callable[..., DigestLLM]]:
    made: list[LLM] = []

    def make(folder: Path, **options: Any) -> DigestLLM:
        made.append(llm := make_digest(folder, **options))
        return llm

    yield make
    for llm in made:
        llm.close()


UPDATED = [*(("qwen3", kind) for kind in (*KINDS, "fly")), ("qwen3_moe", "channel"), ("qwen3_moe", "block")]


@pytest.mark.parametrize(("family", "kind"), UPDATED)
def test_an_update_is_a_fresh_load(
    tmp_path: Path, engine: Callable[..., DigestLLM], family: str, kind: str
) -> None:
    """With tensors in 32 bits, and with FP8 tensors and their scales in any order, and after each sleep."""
    (first, asked), (second, _) = (write_kind(tmp_path, family, kind, seed) for seed in range(2))
    plain, other = (tmp_path / f"plain{seed}" for seed in range(2))
    fresh = engine(second, quantization=asked).on_ranks("digest")
    llm = engine(first, quantization=asked)
    before, addresses = llm.on_ranks("digest"), llm.on_ranks("weight_bytes")
    assert before != fresh
    llm.update_weights(tensors_of(other))
    assert llm.on_ranks("digest") == fresh and llm.on_ranks("weight_bytes") == addresses
    llm.update_weights(dict(reversed(tensors_of(first).items())))
    assert llm.on_ranks("digest") == before
    part = f"{DOWN if family == 'qwen3' else EXPERT}.weight"
    llm.update_weights({part: tensors_of(other)[part]})
    assert llm.on_ranks("digest")[0].items() != before[0].items()
    llm.sleep(level=1)
    assert llm.on_ranks("weight_bytes") == [0]
    llm.wake_up()
    llm.update_weights(tensors_of(plain))
    assert llm.on_ranks("digest") == before
    llm.update_weights(tensors_of(other))
    llm.sleep(level=2)
    llm.wake_up()
    assert llm.on_ranks("digest") == before


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_half_an_update_is_refused(
    written: dict[str, Path], plain: Path, kind: str, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(written[kind])
    model = loaded(written[kind], products=products)
    layer, shard = weight_slots(model)[f"{DOWN}.weight"]
    scale = next(name for name in tensors if name.startswith(f"{DOWN}.weight_scale"))
    _, scale_shard = weight_slots(model)[scale]
    layer.load(shard, tensors[f"{DOWN}.weight"])
    with pytest.raises(ValueError, match=rf"{DOWN}: weight in float8_e4m3fn, without weight_scale"):
        finish_loading(model)
    layer.load(scale_shard, tensors[scale])
    with pytest.raises(ValueError, match=r"weight_scale.* is for, is missing; pass both in one update"):
        finish_loading(model)
    layer.load(shard, tensors_of(plain)[f"{DOWN}.weight"])
    layer.load(scale_shard, tensors[scale])
    with pytest.raises(ValueError, match=r"is not in FP8, and weight_scale.* came with it"):
        finish_loading(model)
    finish_loading(model)


def test_dummy_weights(plain: Path, written: dict[str, Path], engine: Callable[..., DigestLLM]) -> None:
    found = []
    for kind in KINDS:
        llm = engine(written[kind], load_format="dummy")
        found.append(llm.on_ranks("digest"))
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"]
    on_the_fly = engine(plain, load_format="dummy", quantization="fp8").on_ranks("digest")
    assert on_the_fly == found[0] != found[1]


def test_the_start_says_that_weights_are_dequantised(
    plain: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(plain, quantization="fp8").close()
    assert caplog.text.count("the FP8 weights are dequantised as they are loaded") == 1
    caplog.clear()
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda capability: True)
    make_tiny(plain, quantization="fp8").close()
    assert "dequantised" not in caplog.text


def test_deterministic(plain: Path, engine: Callable[..., DigestLLM]) -> None:
    llm = engine(plain, quantization="fp8", deterministic=True, kvcache_block_size=16)
    assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"]
