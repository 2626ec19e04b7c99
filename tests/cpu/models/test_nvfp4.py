"""Weights in NVFP4: files of ModelOpt and compressed-tensors are read by their bytes, split, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import int4_cases
import numpy as np
import pytest
import torch
from checked_llm import make_tiny
from digests import digest, make_digest
from engine_cases import make_prompts, tokens
from int4_cases import NVFP4
from odd_files import edit_quantization, edit_tensors, in_floats
from safetensors.torch import load_file
from tensors import BF16, F16, F32, assert_near
from test_int4 import build
from test_models import PROMPT, forward, load
from tiny_models import edit_json, transformers_logits, write_tiny_model

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.formats.gathered import DequantisedLinear
from nanovllm.formats.int4.kernels.layout import dequantise_reference
from nanovllm.formats.int4.kernels.matmul import Int4Tile, choose_int4_tile
from nanovllm.formats.nvfp4.kernels.values import dequantise_nvfp4
from nanovllm.jobs.main import main
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights, weight_bytes
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.base import Normed
from tools.write_nvfp4 import Tensors, modelopt_nvfp4, write_nvfp4

interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)
# Widths of 3, 5 and 7 groups of 16: no power of two divides them.
SIZES: dict[str, Any] = {"hidden_size": 80, "intermediate_size": 112, "head_dim": 24, "vocab_size": 104}
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
KINDS = ("modelopt", "nvfp4")
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3", **SIZES)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep 4 bits on a CPU too, where plain torch multiplies them."""
    monkeypatch.setattr("nanovllm.formats.int4.loading.keeps_bits", lambda options: True)


# -- bytes --------------------------------------------------------------------------------------------------


def test_what_bytes_mean() -> None:
    """Element by element, by the definitions of E2M1 and E4M3."""
    rng = np.random.default_rng(0)
    octets = rng.integers(0, 256, (5, 24), dtype=np.uint8)
    scales = rng.integers(0, 127, (5, 3), dtype=np.uint8)
    scales[0] = [0, 1, 126]
    factor = 0.37

    def e4m3(bits: int) -> float:
        exponent, fraction = bits >> 3, (bits & 7) / 8
        return fraction * 2.0**-6 if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 7)

    def e2m1(code: int) -> float:
        sign, exponent, fraction = 1 - 2 * (code >> 3), (code >> 1) & 3, code & 1
        size = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
        return sign * size

    wanted = np.zeros((5, 48))
    for n in range(5):
        for k in range(48):
            code = int(octets[n, k // 2]) >> 4 * (k % 2) & 15
            wanted[n, k] = e2m1(code) * e4m3(int(scales[n, k // 16])) * factor
    wide = torch.from_numpy(scales).view(torch.float8_e4m3fn).float() * factor
    found = dequantise_nvfp4(torch.from_numpy(octets), wide)
    assert torch.allclose(found.double(), torch.from_numpy(wanted), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_its_weights(plain: Path, tmp_path: Path, kind: str) -> None:
    """Bit for bit in float32, with other factors for q, k and v; logits are those of transformers."""
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", kind)
    floats = in_floats(folder, tmp_path / "floats", meant)
    check_weights(load_model_config(folder), folder)
    model, exact = load(folder), load(floats)
    assert digest(model) == digest(exact)
    assert torch.equal(forward(model, PROMPT), forward(exact, PROMPT))
    torch.testing.assert_close(
        forward(model, PROMPT), transformers_logits(floats, PROMPT), rtol=1e-4, atol=1e-4
    )


def test_the_file_of_modelopt_alone(plain: Path, tmp_path: Path) -> None:
    """Older folders have no quantization_config."""
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", "modelopt")
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    names = stated.pop("ignore")
    content = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": names,
    }
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": content}))
    edit_json(folder / "config.json", remove=("quantization_config",))
    config = load_model_config(folder)
    assert config.quant.cache_scales and "NVFP4" in " ".join(config.quant.notes)
    assert digest(load(folder)) == digest(load(in_floats(folder, tmp_path / "floats", meant)))
    with pytest.raises(ValueError, match=r"quantization='fp8' contradicts config.json"):
        load_model_config(folder, quantization="fp8")


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_files(plain: Path, tmp_path: Path, kind: str) -> None:
    """Attention in 8 bits, or in floats, MLPs in NVFP4."""
    other = {"modelopt": "modelopt-fp8", "nvfp4": "int8"}[kind]
    for name, options in {
        "other": {"others": {"self_attn": other}},
        "both": {"others": {"self_attn": other}, "skip": ("layers.0.mlp",)},
        "floats": {"skip": ("self_attn", "layers.1.mlp.down_proj")},
    }.items():
        folder, meant = write_nvfp4(plain, tmp_path / name, kind, **options)
        check_weights(load_model_config(folder), folder)
        floats = in_floats(folder, tmp_path / f"{name} floats", meant)
        assert torch.allclose(forward(load(folder), PROMPT), forward(load(floats), PROMPT), atol=1e-5)


def test_names_of_modules_that_are_not_quantised(plain: Path, tmp_path: Path) -> None:
    """Wildcards, modules that hold others, and parts of names, as older files have them."""
    folder, _ = write_nvfp4(plain, tmp_path / "nvfp4", "modelopt", skip=("layers.0.self_attn",))
    for names in (
        ["lm_head", "model.layers.0.self_attn*"],
        ["lm_head", "model.layers.0.self_attn"],
        ["lm_head", "*.0.self_attn.*"],
        ["lm_head", "layers.0.self_attn"],
    ):
        edit_quantization(folder, ignore=names)
        check_weights(load_model_config(folder), folder)
    for names in (["lm_head"], ["lm_head", "model.layers.1.self_attn*"], ["lm_head", "layers.0.self"]):
        edit_quantization(folder, ignore=names)
        with pytest.raises(ModelLoadError, match=r"missing: .*layers\.0\.self_attn\.\w_proj\.weight_scale"):
            check_weights(load_model_config(folder), folder)


def test_a_head_in_nvfp4(plain: Path, tmp_path: Path) -> None:
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", "modelopt")
    made = modelopt_nvfp4(load_file(plain / "model.safetensors")["lm_head.weight"].numpy())
    meant["lm_head.weight"] = torch.from_numpy(made.weight)
    edit_tensors(folder, lambda t: t.update({f"lm_head.{name}": each for name, each in made.tensors.items()}))
    edit_quantization(folder, ignore=[])
    floats = in_floats(folder, tmp_path / "floats", meant)
    assert torch.equal(forward(load(folder), PROMPT), forward(load(floats), PROMPT))


def test_a_matrix_of_zeros(plain: Path, tmp_path: Path) -> None:
    """ModelOpt gives it a factor of 0, and scales that are NaN."""
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", "modelopt")

    def clear(tensors: Tensors) -> None:
        tensors[f"{UP}.weight_scale_2"].zero_()
        tensors[f"{UP}.weight_scale"].view(torch.uint8).fill_(0x7F)

    edit_tensors(folder, clear)
    meant[f"{UP}.weight"].zero_()
    floats = in_floats(folder, tmp_path / "floats", meant)
    assert torch.equal(forward(load(folder), PROMPT), forward(load(floats), PROMPT))
    edit_tensors(folder, lambda t: t[f"{UP}.weight_scale_2"].fill_(0.1))
    with pytest.raises(ModelLoadError, match=rf"{UP}.*weight_scale has nan, and weight_scale_2 is 0.1"):
        load(folder)


# -- 4 bits in memory ---------------------------------------------------------------------------------------


def values(method: Any, dtype: torch.dtype) -> torch.Tensor:
    return dequantise_reference(method.weight.words, method.weight, dtype)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_4_bits(plain: Path, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder, meant = write_nvfp4(plain, tmp_path / "nvfp4", kind)
    model = build(folder, dtype, fuse=True)
    layer = model.model.layers[1]
    for module, names in ((layer.mlp.gate_up_proj, ("gate", "up")), (layer.self_attn.qkv_proj, "qkv")):
        room = "mlp" if len(names) == 2 else "self_attn"
        parts = [meant[f"model.layers.1.{room}.{name}_proj.weight"] for name in names]
        method, weight = module.method, torch.cat(parts)
        assert len(method.weight.factors.unique()) == len(names)
        assert torch.allclose(values(method, F32), weight, rtol=1e-6, atol=0)
        x, bias = torch.randn(5, 80).to(dtype), torch.randn(len(weight)).to(dtype)
        wanted = x.double() @ weight.double().T
        assert_near(method.apply(x), wanted)
        assert_near(method.apply(x[:, None], bias)[:, 0], wanted + bias.double())
        normed = Normed(x, None, torch.ones(80, dtype=dtype), 1e-6)
        assert_near(method.apply_to_normed(normed), normed.tensor().double() @ weight.double().T)
        residual = torch.randn(5, len(weight)).to(dtype)
        total, none = method.apply_and_add(x, residual.clone())
        assert none is None
        assert_near(total, wanted + residual.double())
    assert layer.mlp.down_proj.method.weight.words.nbytes == 80 * 128 // 2  # 112 inputs, in blocks of 128


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_parts_of_the_weights(tmp_path: Path, kind: str) -> None:
    source = write_tiny_model(
        tmp_path / "plain", "qwen3", **{**SIZES, "intermediate_size": 96, "head_dim": 16}
    )
    folder, _ = write_nvfp4(source, tmp_path / "nvfp4", kind)
    whole, *parts = (build(folder, BF16, TPGroup(rank, size)) for rank, size in ((0, 1), (0, 2), (1, 2)))
    layers = [each.model.layers[0] for each in (whole, *parts)]
    for name in ("mlp.down_proj", "self_attn.o_proj"):
        one, *halves = (values(layer.get_submodule(name).method, F32) for layer in layers)
        assert torch.equal(torch.cat(halves, 1), one)
    for name in ("mlp.gate_up_proj", "self_attn.qkv_proj"):
        modules = [layer.get_submodule(name) for layer in layers]
        one, *halves = (values(each.method, F32).split(each.output_sizes) for each in modules)
        for index, part in enumerate(one):
            assert torch.equal(torch.cat([half[index] for half in halves]), part)


def test_what_ranks_cannot_split(plain: Path, tmp_path: Path) -> None:
    folder, _ = write_nvfp4(plain, tmp_path / "nvfp4", "nvfp4")
    named = r"^model\.layers\.0\.mlp\.down_proj: 112 inputs in groups of 16 .* parts of 56, .* could be 1, 7$"
    sizes = {**SIZES, "head_dim": 16}
    source = write_tiny_model(tmp_path / "other", "qwen3", **sizes)
    folder, _ = write_nvfp4(source, tmp_path / "parts", "nvfp4")
    with pytest.raises(ValueError, match=named):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)
    with pytest.raises(ValueError, match=named):
        make_tiny(folder, tensor_parallel_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_answer_as_one(tmp_path: Path, kind: str) -> None:
    source = write_tiny_model(
        tmp_path / "plain", "qwen3", **{**SIZES, "intermediate_size": 96, "head_dim": 16}
    )
    folder, meant = write_nvfp4(source, tmp_path / "nvfp4", kind)
    with make_tiny(in_floats(folder, tmp_path / "floats", meant)) as llm:
        wanted = tokens(llm.generate(make_prompts()[:3], SHORT, use_tqdm=False))
    for ranks in (1, 2):
        with make_tiny(folder, tensor_parallel_size=ranks) as llm:
            assert tokens(llm.generate(make_prompts()[:3], SHORT, use_tqdm=False)) == wanted


def test_updates_and_sleep(plain: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", "qwen3", seed=1, **SIZES)
    first, second = (
        write_nvfp4(each, tmp_path / name, "modelopt")[0] for each, name in ((plain, "a"), (other, "b"))
    )
    new = load_file(second / "model.safetensors")
    with make_digest(second) as llm:
        wanted = llm.on_ranks("digest")
    with make_digest(first) as llm:
        before = llm.on_ranks("digest")
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert llm.on_ranks("digest") == before
        llm.update_weights(new.items())
        assert llm.on_ranks("digest") == wanted
        with pytest.raises(ValueError, match=r"up_proj: weight came without weight_scale, weight_scale_2"):
            llm.update_weights({f"{UP}.weight": new[f"{UP}.weight"]})
        with pytest.raises(ValueError, match=rf"{UP}.weight_scale_2 has nan, which must be finite"):
            llm.update_weights({f"{UP}.weight_scale_2": torch.tensor(torch.nan)})


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights(plain: Path, tmp_path: Path, kind: str) -> None:
    folder, _ = write_nvfp4(plain, tmp_path, kind)
    model = build(folder, BF16)
    init_dummy_weights(model, 0)
    first, second = (values(layer.mlp.down_proj.method, F32) for layer in model.model.layers)
    assert 0.015 < first.std() < 0.025 and not torch.equal(first, second)


def test_bytes_of_a_weight_and_notes(plain: Path, tmp_path: Path) -> None:
    """A GPU keeps 4 bits and a byte for 16; a CPU says that it dequantises."""
    for kind in KINDS:
        folder, _ = write_nvfp4(plain, tmp_path / kind, kind)
        quant = load_model_config(folder).quant
        on_gpu, on_cpu = quant.on((9, 0)), quant.on((0, 0))
        assert on_gpu.itemsize == on_gpu.expert_itemsize == 0.5625 and on_cpu.itemsize is None
        assert "activations stay in 16 bits" in str(on_gpu.note)
        assert "NVFP4 are dequantised as they are loaded" in str(on_cpu.note)
        method = quant.on((0, 0)).method(UP, "linear")
        options = load(folder, on_cpu=True).model.layers[1].mlp.gate_up_proj.method
        assert not method.packs and isinstance(options, DequantisedLinear)


def test_doctor_names_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_tiny_model(
        tmp_path / "plain", "qwen3", **{**SIZES, "hidden_size": 96, "intermediate_size": 160}
    )
    for kind, name in (("modelopt", "NVFP4"), ("mxfp8", "MXFP8"), ("int8", "INT8")):
        folder, _ = write_nvfp4(plain, tmp_path / kind, kind)
        assert main(["doctor", str(folder), "--device", "cpu", "--skip-tokenizer-init"]) == 0
        shown = capsys.readouterr().out
        assert f"quantised weights: weights in {name} are dequantised as they are loaded" in shown
        assert "files: all weights are there, with the right shapes" in shown


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{UP}.weight_scale"), rf"1 missing: {UP}.weight_scale$"),
        (lambda t: t[f"{UP}.weight_scale_2"].fill_(-1), rf"{UP}.weight_scale_2 has -1.0, which must be"),
        (lambda t: t[f"{UP}.weight_scale"].view(torch.uint8)[3, 2:3].fill_(0x81), "has -0.00195"),
        (lambda t: t.update({f"{UP}.weight_scale": torch.ones(112, 5)}), rf"{UP}.weight_scale is F32"),
        (lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][:, :8]}), rf"{UP}.weight is \(112, 8\)"),
        (lambda t: t.update({f"{UP}.pre_quant_scale": torch.ones(80)}), rf"unexpected: {UP}.pre_quant_scale"),
    ],
    ids=["missing", "factor", "negative", "dtype", "shape", "AWQ"],
)
def test_bad_tensors(plain: Path, tmp_path: Path, edit: Any, message: str) -> None:
    folder, _ = write_nvfp4(plain, tmp_path, "modelopt")
    edit_tensors(folder, edit)
    with pytest.raises(ModelLoadError, match=message):
        check_weights(load_model_config(folder), folder)


def test_variants_that_are_refused(plain: Path, tmp_path: Path) -> None:
    folder, _ = write_nvfp4(plain, tmp_path / "modelopt", "modelopt")
    for changes, message in (
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not supported; supported: 'NVFP4'"),
        ({"quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}, "quant_algo 'W4A8_NVFP4_FP8' is not"),
        ({"group_size": 32}, "group_size 32 of quant_algo 'NVFP4' is not supported; supported: 16"),
        ({"quant_algo": None}, "quant_algo None is not supported"),
        ({"ignore": "lm_head"}, "ignore must be a list of names, not 'lm_head'"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers must be an object of modules, not None"),
    ):
        stated = edit_quantization(folder)
        edit_quantization(folder, **changes)
        with pytest.raises(ValueError, match=message):
            load_model_config(folder)
        edit_json(folder / "config.json", quantization_config=stated)
    folder, _ = write_nvfp4(plain, tmp_path / "compressed", "nvfp4")
    group = edit_quantization(folder)["config_groups"]["group_0"]
    for changes, message in (
        ({"weights": None}, "group_0 must be an object with weights"),
        ({"weights": group["weights"] | {"group_size": 32}}, "weights: group_size 32 is not supported"),
        ({"weights": group["weights"] | {"symmetric": False}}, "weights: symmetric False is not supported"),
        ({"weights": group["weights"] | {"type": "int"}}, "weights: type 'int' is not supported"),
        ({"input_activations": group["input_activations"] | {"num_bits": 8}}, "num_bits 8 is not supported"),
        ({"output_activations": group["weights"]}, "output_activations are not supported"),
    ):
        edit_quantization(folder, config_groups={"group_0": group | changes})
        with pytest.raises(ValueError, match=message):
            load_model_config(folder)


def test_widths_that_groups_do_not_divide(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "plain", "qwen3", **SIZES)
    folder, _ = write_nvfp4(source, tmp_path / "nvfp4", "nvfp4")
    edit_json(folder / "config.json", intermediate_size=120)
    with pytest.raises(ValueError, match=r"down_proj: 120 inputs are no multiple of 16, the size of a group"):
        check_weights(load_model_config(folder), folder)


# -- kernels ------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(70, 160), (34, 16)])
def test_kernels(n: int, k: int, dtype: torch.dtype) -> None:
    int4_cases.check_dequantise(n, k, NVFP4, dtype, "cpu")
    for rows, tile in ((1, Int4Tile(16, 64)), (33, Int4Tile(16, 64, more=16, split=2, tma=False))):
        int4_cases.check_product(rows, n, k, NVFP4, dtype, "cpu", tile)


def test_deterministic_products_are_never_dequantised() -> None:
    """The weight times its factor is rounded once more, so its product has other bits."""
    weight, _ = int4_cases.make_weight(64, 512, NVFP4, BF16)
    assert choose_int4_tile(513, weight, 100) is None
    tile = choose_int4_tile(513, weight, 100, deterministic=True)
    assert tile is not None and tile.split == 1
