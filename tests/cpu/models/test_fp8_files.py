"""FP8 checkpoints: what config.json may say, and what is refused before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import digest
from fp8_models import DOWN, EXPERT, KINDS, SIZES, Tensors, build, dequantised, loaded, tensors_of
from safetensors.torch import save_file
from tensors import BF16
from tiny_models import edit_json, write_tiny_model

from nanovllm import LLM
from nanovllm.cpu.packed import PackedLinearMethod
from nanovllm.errors import ModelLoadError
from nanovllm.formats.fp8.kernels.values import FP8
from nanovllm.formats.fp8.loading import Stored, quantise_weight
from nanovllm.formats.fp8.method import Fp8LinearMethod
from nanovllm.layers.weights import WeightLayer
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights, load_weights
from nanovllm.quantization.unquantized import UnquantizedLinearMethod
from nanovllm.residency.updates import UpdateChecker
from tools.write_fp8 import write_fp8

DENSE = UnquantizedLinearMethod.__name__, PackedLinearMethod.__name__


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.fixture(scope="module")
def written(plain: Path) -> dict[str, Path]:
    """The same model in each format."""
    return {kind: write_fp8(plain, plain.parent / f"{plain.name}-{kind}", kind) for kind in KINDS}


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
    assert found["self_attn.qkv_proj"] == found["lm_head"] in DENSE
    assert found["self_attn.o_proj"] == Fp8LinearMethod.__name__
    load_weights(build(folder), folder)
    if kind == "block":
        edit_quantization(folder, modules_to_not_convert=["self_attn"])
    else:
        edit_quantization(folder, ignore=["lm_head", r"re:.*\.1\.self_attn\..*"])
    assert methods(folder)["self_attn.o_proj"] in DENSE
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
    "a cache": ({"kv_cache_scheme": 8}, "kv_cache_scheme must be an object, not 8"),
    "zeros": ({"sparsity_config": {"format": "2:4"}}, "sparsity_config .* is not supported; supported: null"),
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
    (zeroed, "1 with wrong values: {} has 0.0"),
    (negative, "1 with wrong values: {} has -"),
    (nan, "1 with wrong values: {} has nan"),
    (infinite, "1 with wrong values: {} has inf"),
    (missing, "1 missing: {}"),
    (longer, r"1 wrong shape: {} is \(7, 1\), but the model needs"),
    (integers, "1 of a dtype that does not fit its quantization_config: {} is I32"),
    (
        unquantised_weight,
        f"1 of a dtype that does not fit its quantization_config: {DOWN}.weight is BF16",
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
    with pytest.raises(ModelLoadError, match=message.format(name)):
        check_weights(load_model_config(folder), folder)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 144, "moe_intermediate_size": 40, "num_experts": 5}
    return write_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", **sizes)


@pytest.mark.parametrize(("break_", "message"), BAD[:-1], ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_scales_of_experts_that_are_refused(
    tmp_path: Path, moe: Path, kind: str, break_: Callable[[Tensors, str], None], message: str
) -> None:
    folder = write_fp8(moe, tmp_path, kind)
    tensors = tensors_of(folder)
    [name] = (name for name in tensors if name.startswith(f"{EXPERT}.weight_scale"))
    break_(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message.format(name)):
        check_weights(load_model_config(folder), folder)


@pytest.mark.parametrize("break_", [zeroed, nan], ids=lambda each: each.__name__)
def test_scales_that_an_update_may_not_have(written: dict[str, Path], break_: Any) -> None:
    tensors = tensors_of(written["channel"])
    name = f"{DOWN}.weight_scale"
    break_(tensors, name)
    checker = UpdateChecker(build(written["channel"]))
    with pytest.raises(ValueError, match=f"{name} has .*, which must be finite and above 0"):
        list(checker.accept(tensors.items()))


def test_a_config_and_tensors_of_different_formats(
    tmp_path: Path, plain: Path, written: dict[str, Path]
) -> None:
    fp8_config = json.loads((written["channel"] / "config.json").read_text())["quantization_config"]
    over_floats = write_tiny_model(tmp_path / "floats", dtype="bfloat16", **SIZES)
    edit_json(over_floats / "config.json", quantization_config=fp8_config)
    with pytest.raises(ModelLoadError, match=r"14 missing: .*weight_scale.*14 of a dtype .* is BF16"):
        LLM(over_floats, device="cpu", skip_tokenizer_init=True)
    over_fp8 = write_fp8(plain, tmp_path / "codes", "channel")
    edit_json(over_fp8 / "config.json", remove=("quantization_config",))
    for asked in (None, "fp8"):
        config = load_model_config(over_fp8, quantization=asked)
        with pytest.raises(
            ModelLoadError, match=r"14 unexpected: .*weight_scale.*14 of a dtype .* is F8_E4M3"
        ):
            check_weights(config, over_fp8)
    blocks = write_fp8(plain, tmp_path / "blocks", "block")
    edit_json(blocks / "config.json", quantization_config=fp8_config)
    with pytest.raises(
        ModelLoadError, match=r"14 missing: .*weight_scale.*14 unexpected: .*weight_scale_inv"
    ):
        check_weights(load_model_config(blocks), blocks)
