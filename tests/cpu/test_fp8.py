"""Weights in FP8: their formats, loading on one and several ranks, products, updates and bad input, on a CPU.

`products` models compute as on a GPU that multiplies FP8 values, with the references of the kernels; the
others with dequantised weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fp8_cases
import pytest
import torch
from checked_llm import make_tiny
from digests import DigestLLM, digest, make_digest
from safetensors.torch import load_file, save_file
from tensors import BF16, F32
from test_models import PROMPT, forward
from test_models import load as load_model
from tiny_models import edit_json, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention.backends import ReferenceBackend
from nanovllm.distributed.group import TPGroup
from nanovllm.errors import ModelLoadError
from nanovllm.kernels.compat import INTERPRET
from nanovllm.kernels.fp8 import FP8, GROUP, quantise_rows
from nanovllm.kernels.fp8_matmul import fp8_linear
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.weights import WeightLayer, allocate, finish_loading, weight_slots
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import WeightChecker, check_weights, load_weights
from nanovllm.quantization import fp8
from nanovllm.quantization.base import WeightOptions
from nanovllm.quantization.fp8 import Fp8Config, Fp8LinearMethod, Stored, quantise_weight
from nanovllm.quantization.unquantized import UnquantizedLinearMethod
from tools.write_fp8 import SCALES, write_fp8

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
OPTIONS = WeightOptions(F32, CPU)
KINDS = tuple(SCALES)
# Blocks of 128 that these sizes do not fill, in rows and columns.
SIZES: dict[str, Any] = {"hidden_size": 144, "intermediate_size": 208, "head_dim": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path) -> dict[str, Path]:
    """The same model in each format."""
    return {kind: write_fp8(plain, plain.parent / f"{plain.name}-{kind}", kind) for kind in KINDS}


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def dequantised(tensors: Tensors) -> Tensors:
    """The weights that an FP8 checkpoint means, by arithmetic of our own."""
    found = {}
    for name, tensor in tensors.items():
        if "scale" in name:
            continue
        if tensor.dtype == FP8:
            scale = tensors.get(f"{name}_scale")
            if scale is None:
                blocks = tensors[f"{name}_scale_inv"]
                scale = blocks.kron(torch.ones(128, 128))[: tensor.shape[0], : tensor.shape[1]]
            tensor = tensor.float() * scale
        found[name] = tensor
    return found


def on_gpus(config: ModelConfig) -> ModelConfig:
    """The config as on a GPU that multiplies FP8 values."""
    return replace(config, quant=config.quant.on((9, 0)))


def build(
    folder: Path, tp: TPGroup | None = None, products: bool = True, quantization: str | None = None
) -> DecoderForCausalLM:
    config = load_model_config(folder, quantization=quantization)
    config = on_gpus(config) if products else config
    model = DecoderForCausalLM(config, tp or TPGroup(), ReferenceBackend(), 32)
    allocate(model, OPTIONS, config.quant)
    return model


def loaded(folder: Path, **options: Any) -> DecoderForCausalLM:
    model = build(folder, **options)
    load_weights(model, folder)
    return model


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
            shared = stored is Stored.BLOCKS and name == "down_proj" and tp.rank == 1  # begins at column 144
            assert (method.dense is None) == (products and not shared)
            found[name] = method.weight.float() if method.dense is None else method.dense.weight
        parts.append(found)
    whole, first, second = parts
    torch.testing.assert_close(torch.cat((first["down_proj"], second["down_proj"]), 1), whole["down_proj"])
    assert torch.equal(torch.cat((first["o_proj"], second["o_proj"]), 1), whole["o_proj"])
    for name, sizes in (("qkv_proj", (64, 32, 32)), ("gate_up_proj", (104, 104))):
        both = zip(first[name].split(sizes), second[name].split(sizes), strict=True)
        assert torch.equal(torch.cat([torch.cat(pair) for pair in both]), whole[name])


@pytest.mark.parametrize("kind", ["channel", "block", "fly"])
def test_two_ranks_answer_like_one(written: dict[str, Path], plain: Path, kind: str) -> None:
    folder, asked = (plain, "fp8") if kind == "fly" else (written[kind], None)
    prompts = [[5, 6, 7, 8], [9] * 11]
    answers = []
    for ranks in (1, 2):
        with make_tiny(folder, tensor_parallel_size=ranks, quantization=asked) as llm:
            answers.append([out["token_ids"] for out in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert answers[0] == answers[1]


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


@pytest.mark.parametrize("kind", [*KINDS, "fly"])
def test_an_update_is_a_fresh_load(
    tmp_path: Path, plain: Path, engine: Callable[..., DigestLLM], kind: str
) -> None:
    """With tensors in 32 bits, and with FP8 tensors and their scales in any order, and after each sleep."""
    other = write_tiny_model(tmp_path / "other", seed=1, **SIZES)
    asked = "fp8" if kind == "fly" else None
    first, second = (
        (plain, other)
        if kind == "fly"
        else [write_fp8(folder, tmp_path / f"{n}", kind) for n, folder in enumerate((plain, other))]
    )
    fresh = engine(second, quantization=asked).on_ranks("digest")
    llm = engine(first, quantization=asked)
    before, addresses = llm.on_ranks("digest"), llm.on_ranks("weight_bytes")
    assert before != fresh
    llm.update_weights(tensors_of(other))
    assert llm.on_ranks("digest") == fresh and llm.on_ranks("weight_bytes") == addresses
    llm.update_weights(dict(reversed(tensors_of(first).items())))
    assert llm.on_ranks("digest") == before
    part = f"{DOWN}.weight"
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


# -- configs ------------------------------------------------------------------------------------------------


def edit_quantization(folder: Path, **changes: Any) -> None:
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_json(folder / "config.json", quantization_config=stated | changes)


def methods(folder: Path, **options: Any) -> dict[str, str]:
    """What multiplies the weights of the last layer and the head, by module."""
    model = build(folder, **options)
    return {
        path.removeprefix("model.layers.1."): type(layer.method).__name__
        for path, layer in model.named_modules()
        if isinstance(layer, WeightLayer) and hasattr(layer, "method") and "layers.0." not in path
    }


@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_are_left_alone(tmp_path: Path, plain: Path, kind: str) -> None:
    ignored = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    folder = write_fp8(plain, tmp_path, kind, tuple(ignored))
    found = methods(folder)
    assert found["self_attn.qkv_proj"] == found["lm_head"] == UnquantizedLinearMethod.__name__
    assert found["self_attn.o_proj"] == Fp8LinearMethod.__name__
    load_weights(build(folder), folder)
    if kind == "block":
        edit_quantization(folder, modules_to_not_convert=["self_attn"])
    else:
        edit_quantization(folder, ignore=["lm_head", r"re:.*\.1\.self_attn\..*"])
    assert methods(folder)["self_attn.o_proj"] == UnquantizedLinearMethod.__name__
    edit_quantization(folder, **({"modules_to_not_convert": None} if kind == "block" else {"ignore": []}))
    assert (methods(folder)["lm_head"] == Fp8LinearMethod.__name__) == (kind != "block")


def test_the_head_and_targets(tmp_path: Path, plain: Path) -> None:
    folder = write_fp8(plain, tmp_path, "channel", ignore=())
    tensors = tensors_of(folder)
    tensors["lm_head.weight"], tensors["lm_head.weight_scale"] = quantise_weight(
        tensors["lm_head.weight"], Stored.ROWS
    )
    save_file(tensors, folder / "model.safetensors")
    edit_quantization(folder, ignore=[])
    for products in (True, False):
        model = loaded(folder, products=products)
        hidden = torch.randn(3, 144)
        exact = hidden @ dequantised(tensors)["lm_head.weight"].T
        assert (model.compute_logits(hidden) - exact).norm() < (0.06 if products else 1e-5) * exact.norm()
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = stated["config_groups"]["group_0"] | {"targets": ["re:.*down_proj", "model.layers.1.mlp.up_proj"]}
    edit_quantization(folder, config_groups={"group_0": group})
    with pytest.raises(ValueError, match=r"gate_proj, .*up_proj are one product; quantise them in the same"):
        methods(folder)


def test_static_scales_of_activations_are_not_needed(tmp_path: Path, plain: Path) -> None:
    folder = write_fp8(plain, tmp_path, "tensor")
    inputs = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = stated["config_groups"]["group_0"] | {"input_activations": inputs}
    edit_quantization(folder, config_groups={"group_0": group})
    with pytest.raises(ModelLoadError, match=r"14 missing: .*q_proj.input_scale"):
        check_weights(load_model_config(folder), folder)
    tensors = tensors_of(folder)
    scales = {f"{name}.input_scale": torch.tensor(0.5) for name in modules(tensors)}
    save_file(tensors | scales, folder / "model.safetensors")
    plain_file = write_fp8(plain, tmp_path / "dynamic", "tensor")
    assert digest(loaded(folder)) == digest(loaded(plain_file))
    edit_json(
        folder / "config.json", quantization_config={"quant_method": "fp8", "activation_scheme": "static"}
    )
    assert digest(loaded(folder)) == digest(loaded(plain_file))


def modules(tensors: Tensors) -> list[str]:
    return [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype == FP8]


FLOAT = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a format": (
        {"format": "marlin-24"},
        r"format 'marlin-24' of group_0 is not supported; .*float-quantized",
    ),
    "a cache": ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme .* is not supported; supported: null"),
    "no groups": ({"config_groups": {}}, r"config_groups must be an object with groups, not \{\}"),
    "a group": ({"config_groups": {"a": 5}}, "a must be an object with weights, not 5"),
    "targets": (
        {"config_groups": {"a": {"weights": FLOAT, "targets": "Linear"}}},
        "targets must be a list of names, not 'Linear'",
    ),
    "integers": (
        {"config_groups": {"a": {"weights": FLOAT | {"type": "int"}, "targets": ["Linear"]}}},
        "a: weights: type 'int' is not supported; supported: 'float'",
    ),
    "groups of columns": (
        {"config_groups": {"a": {"weights": FLOAT | {"strategy": "group"}, "targets": ["Linear"]}}},
        "strategy 'group' is not supported; supported: 'channel', 'tensor'",
    ),
    "inputs of 16 bits": (
        {
            "config_groups": {
                "a": {
                    "weights": FLOAT,
                    "targets": ["Linear"],
                    "input_activations": FLOAT | {"num_bits": 16, "dynamic": True},
                }
            }
        },
        "input_activations: num_bits 16 is not supported; supported: 8",
    ),
    "a pattern": ({"ignore": ["re:("]}, r"ignore: 're:\(' is no regular expression"),
    "names": ({"ignore": [5]}, r"ignore must be a list of names, not \[5\]"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_schemes_that_are_refused(tmp_path: Path, plain: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_fp8(plain, tmp_path, "channel")
    edit_quantization(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\] is not supported; .*\[128, 128\]"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: 'e4m3'"),
        ({"activation_scheme": "odd"}, "activation_scheme 'odd' is not supported; supported: 'dynamic', 'st"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be names, not 'lm_head'"),
    ],
)
def test_fp8_configs_that_are_refused(
    tmp_path: Path, plain: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_fp8(plain, tmp_path, "block")
    edit_quantization(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


def test_what_quantization_may_be(written: dict[str, Path], plain: Path) -> None:
    assert load_model_config(written["block"], quantization="fp8") == load_model_config(written["block"])
    same = load_model_config(written["channel"], quantization="compressed-tensors")
    assert same == load_model_config(written["channel"])
    with pytest.raises(
        ValueError, match=r"quantization='fp8' contradicts config.json, .* 'compressed-tensors'"
    ):
        load_model_config(written["channel"], quantization="fp8")
    with pytest.raises(ValueError, match=r"quantization='awq' contradicts config.json, .* 'fp8'; leave"):
        load_model_config(written["block"], quantization="awq")
    with pytest.raises(ValueError, match=r"quantization='awq', but config.json has no .* None or 'fp8'"):
        load_model_config(plain, quantization="awq")
    with pytest.raises(TypeError, match="quantization must be a string that is not empty, not 8"):
        LLM(plain, quantization=8)


# -- bad input ----------------------------------------------------------------------------------------------


def zeroed(tensors: Tensors, name: str) -> None:
    tensors[name].view(-1)[0] = 0


def negative(tensors: Tensors, name: str) -> None:
    tensors[name].mul_(-1)


def nan(tensors: Tensors, name: str) -> None:
    tensors[name].fill_(float("nan"))


def infinite(tensors: Tensors, name: str) -> None:
    tensors[name].fill_(float("inf"))


def missing(tensors: Tensors, name: str) -> None:
    del tensors[name]


def longer(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.ones(7, 1)


def integers(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].int()


def unquantised_weight(tensors: Tensors, name: str) -> None:
    weight = name.partition("_scale")[0]
    tensors[weight] = tensors[weight].to(BF16)


BAD: list[tuple[Callable[[Tensors, str], None], str]] = [
    (zeroed, "1 not positive and finite: {} has 0.0"),
    (negative, "1 not positive and finite: {} has -"),
    (nan, "1 not positive and finite: {} has nan"),
    (infinite, "1 not positive and finite: {} has inf"),
    (missing, "1 missing: {}"),
    (longer, r"1 wrong shape: {} is \(7, 1\), but the model needs"),
    (integers, "1 of a dtype that does not fit its quantization_config: {} is torch.int32"),
    (
        unquantised_weight,
        f"1 of a dtype that does not fit its quantization_config: {DOWN}.weight is torch.bf",
    ),
]


@pytest.mark.parametrize(("break_", "message"), BAD, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_refused_before_memory_is_taken(
    tmp_path: Path,
    plain: Path,
    kind: str,
    break_: Callable[[Tensors, str], None],
    message: str,
) -> None:
    folder = write_fp8(plain, tmp_path, kind)
    tensors = tensors_of(folder)
    name = next(name for name in tensors if name.startswith(f"{DOWN}.weight_scale"))
    break_(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    found = message.replace("bf", "bfloat16") if message.endswith("bf") else message
    with pytest.raises(ModelLoadError, match=found.format(name)):
        check_weights(load_model_config(folder), folder)


@pytest.mark.parametrize("break_", [zeroed, nan], ids=lambda each: each.__name__)
def test_scales_that_an_update_may_not_have(written: dict[str, Path], break_: Any) -> None:
    tensors = tensors_of(written["channel"])
    name = f"{DOWN}.weight_scale"
    break_(tensors, name)
    checker = WeightChecker(build(written["channel"]))
    with pytest.raises(ValueError, match=f"{name} has .*; scales are positive and finite"):
        list(checker.accept(tensors.items()))


def test_a_config_and_tensors_of_different_formats(
    tmp_path: Path, plain: Path, written: dict[str, Path]
) -> None:
    fp8_config = json.loads((written["channel"] / "config.json").read_text())["quantization_config"]
    over_floats = write_tiny_model(tmp_path / "floats", dtype="bfloat16", **SIZES)
    edit_json(over_floats / "config.json", quantization_config=fp8_config)
    with pytest.raises(
        ModelLoadError, match=r"14 missing: .*weight_scale.*14 of a dtype .* is torch.bfloat16"
    ):
        LLM(over_floats, device="cpu", skip_tokenizer_init=True)
    over_fp8 = write_fp8(plain, tmp_path / "codes", "channel")
    edit_json(over_fp8 / "config.json", remove=("quantization_config",))
    for asked in (None, "fp8"):
        config = load_model_config(over_fp8, quantization=asked)
        with pytest.raises(
            ModelLoadError, match=r"14 unexpected: .*weight_scale.*14 of a dtype .* is torch.float8_e4m"
        ):
            check_weights(config, over_fp8)
    blocks = write_fp8(plain, tmp_path / "blocks", "block")
    edit_json(blocks / "config.json", quantization_config=fp8_config)
    with pytest.raises(
        ModelLoadError, match=r"14 missing: .*weight_scale.*14 unexpected: .*weight_scale_inv"
    ):
        check_weights(load_model_config(blocks), blocks)


# -- weights and kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", Stored)
def test_quantised_weights(stored: Stored) -> None:
    weight = torch.randn(200, 300)
    weight[5], weight[:, 7] = 0, 1e-6
    codes, scales = quantise_weight(weight, stored)
    again, same = quantise_weight(weight, stored, scales)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8)) and torch.equal(scales, same)
    shapes = {Stored.BLOCKS: (2, 3), Stored.TENSOR: (1,)}
    assert scales.shape == shapes.get(stored, (200, 1)) and (scales > 0).all()
    wide = scales.kron(torch.ones(128, 128))[:200, :300] if stored is Stored.BLOCKS else scales
    error = (codes.float() * wide - weight).abs()
    assert (error <= (weight.abs() / 16).maximum(wide * 2**-10)).all()
    assert codes.float().abs().max() == 448
    zeros, ones = quantise_weight(torch.zeros(4, 16), stored)
    assert not zeros.float().any() and (ones == 1).all()


def test_a_row_of_nan_stays_alone() -> None:
    weight = fp8_cases.make_weight(16, 32, None, "cpu")
    x = torch.randn(3, 32)
    x[1, 4] = float("nan")
    out = fp8_linear(quantise_rows(x), weight, dtype=F32)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


needs_interpreter = pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs these cases")


@needs_interpreter
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [0, 1, 3, 5])
def test_rows_in_fp8(rows: int, group: int | None) -> None:
    for columns in (48, 200, 256):
        fp8_cases.check_rows(rows, columns, group, "cpu")


@needs_interpreter
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_kernels_of_products(rows: int, group: int | None) -> None:
    fp8_cases.check_linear(rows, (160, 208), group, "cpu", full=True)
    fp8_cases.check_linear(rows, (72, 64), group, "cpu", group_rows=1)


@needs_interpreter
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [1, 2])
def test_fused_vector_products(rows: int, group: int | None) -> None:
    fp8_cases.check_gemv(rows, (256, 208), group, "cpu", F32)
