"""Checkpoints as other writers have them: other names of modules, and other keys and scales.

Each loads exactly as the same weights in floats do, or is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_models import Tensors, dequantised, tensors_of
from odd_files import GLM, SIZES, check_same, edit_quantization, edit_tensors, in_floats
from safetensors.torch import save_file
from test_models import PROMPT, forward, load
from tiny_models import edit_json, transformers_logits, write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.formats.fp8.kernels.values import FP8
from nanovllm.formats.int4.configs import from_awq, from_gptq
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights
from nanovllm.quantization.shards import FileNames
from tools.write_fp8 import write_fp8
from tools.write_int4 import write_int4

# -- names of modules ---------------------------------------------------------------------------------------


def test_all_names_of_a_module() -> None:
    packed = {"qkv_proj": {"q_proj": 8, "k_proj": 4, "v_proj": 4}}
    prefixes = {"model.language_model.": "model.", "language_model.": "", "vision_tower.": None}
    names = FileNames(packed, prefixes, "w2")
    assert names.of("model.layers.0.self_attn.k_proj") == (
        "model.layers.0.self_attn.qkv_proj",
        "model.language_model.layers.0.self_attn.qkv_proj",
        "language_model.model.layers.0.self_attn.qkv_proj",
        "layers.0.self_attn.qkv_proj",
    )
    assert names.of("lm_head") == ("lm_head", "language_model.lm_head")
    assert names.of_experts("model.layers.0.mlp.experts")[0] == "model.layers.0.mlp.experts.0.w2"


@pytest.mark.parametrize("kind", ["channel", "tensor", "block"])
def test_a_packed_module_that_is_left_alone(tmp_path: Path, kind: str) -> None:
    plain = write_tiny_model(tmp_path / "plain", "glm4", **GLM)
    folder = write_fp8(plain, tmp_path / "fp8", kind, ignore=("model.layers.0.mlp.gate_up_proj",))
    stored = tensors_of(folder)
    assert stored["model.layers.0.mlp.gate_up_proj.weight"].dtype == torch.float32
    assert stored["model.layers.1.mlp.gate_up_proj.weight"].dtype == FP8
    check_same(folder, in_floats(folder, tmp_path / "exact", dequantised(stored)))


@pytest.mark.parametrize("stated", ["model.language_model.", "language_model.model.", "model.", "re:.*"])
def test_modules_of_a_decoder_within_a_larger_model(tmp_path: Path, stated: str) -> None:
    """transformers has changed the beginning of these names, and files keep the older one."""
    plain = write_tiny_model(tmp_path / "plain", "gemma3", **GLM)
    left = "layers.0.mlp.down_proj"
    folder = write_fp8(plain, tmp_path / "fp8", "channel", ignore=(f"model.{left}",))
    exact = in_floats(folder, tmp_path / "exact", dequantised(tensors_of(folder)))
    edit_quantization(folder, ignore=[f"{stated}{left}"])
    text = json.loads((folder / "config.json").read_text())
    quant = text.pop("quantization_config")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": quant}))
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors_of(folder).items()}
    save_file(tensors | {"vision_tower.weight": torch.ones(2)}, folder / "model.safetensors")
    check_same(folder, exact)


def test_a_module_that_is_called_otherwise_and_left_alone(tmp_path: Path) -> None:
    """Gemma 4 has a matrix beside its layers, whose name in files is no beginning of other names."""
    plain = write_tiny_model(tmp_path / "plain", "gemma4-small", **GLM)
    left = "model.per_layer_model_projection"
    folder = write_fp8(plain, tmp_path / "fp8", "channel", ignore=(left,))
    stored = tensors_of(folder)
    assert stored[f"{left}.weight"].dtype == torch.float32
    exact = in_floats(folder, tmp_path / "exact", dequantised(stored))
    expected = transformers_logits(exact, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_experts_by_the_names_of_their_projections(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "mixtral", **GLM | {"head_dim": 32})
    names = [
        name.removesuffix(".weight") for name in tensors_of(plain) if ".0.block_sparse_moe.experts." in name
    ]
    folder = write_fp8(plain, tmp_path / "fp8", "channel", ignore=tuple(names))
    assert any(name.endswith(".0.w2") for name in names)
    check_same(folder, in_floats(folder, tmp_path / "exact", dequantised(tensors_of(folder))))


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("model.layers.1", {1}),
        ("layers.1", {1}),
        ("down_proj", set(range(11))),
        ("mlp", set(range(11))),
        ("proj", set()),
        (r"model\.layers\.(0|1)", {0, 1}),
        ("model.layers.1.*", {1, 10}),
        ("model.layers.1.mlp.down", set()),
    ],
)
def test_names_that_fp8_leaves_alone(tmp_path: Path, pattern: str, left: set[int]) -> None:
    """Whole parts of names, as transformers reads them: layers.1 is not layers.10."""
    config = {"quant_method": "fp8", "modules_to_not_convert": [pattern]}
    quant = load_model_config(
        write_tiny_model(tmp_path, num_hidden_layers=11), overrides={"quantization_config": config}
    ).quant
    kinds = [type(quant.method(f"model.layers.{n}.mlp.down_proj", "linear")).__name__ for n in range(11)]
    assert {n for n, kind in enumerate(kinds) if kind != "Fp8LinearMethod"} == left


# -- FP8 in blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("phi3", {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2}),
        ("glm4", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32}),
    ],
)
def test_blocks_of_packed_modules(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """Each part of a packed tensor has whole blocks."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} if family == "phi3" else {}
    kv = {"num_key_value_heads": 1} if family == "phi3" else {}
    plain = write_tiny_model(tmp_path / "plain", family, **sizes, **rope, **kv)
    folder = write_fp8(plain, tmp_path / "fp8", "block")
    check_same(folder, in_floats(folder, tmp_path / "exact", dequantised(tensors_of(folder))))


def test_blocks_that_lie_in_two_parts_are_refused(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "glm4", **GLM | {"intermediate_size": 192})
    message = r"mlp\.gate_up_proj\.weight_scale_inv has scales of blocks of 128 rows, and gate_proj, up_proj"
    with pytest.raises(ModelLoadError, match=message):  # by the writer, which reads the file as a start does
        write_fp8(plain, tmp_path / "fp8", "block")


def write_scaled_blocks(plain: Path, target: Path) -> Path:
    """compressed-tensors' FP8_BLOCK: scales in bfloat16, named weight_scale."""
    folder = write_fp8(plain, target, "block")

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name).bfloat16()

    edit_tensors(folder, rename)
    float8 = {"type": "float", "num_bits": 8, "symmetric": True}
    weights = {**float8, "strategy": "block", "block_structure": [128, 128], "dynamic": False}
    inputs = {**float8, "strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    edit_json(folder / "config.json", quantization_config=stated | {"config_groups": {"group_0": group}})
    return folder


@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_moe"])
def test_blocks_of_compressed_tensors(tmp_path: Path, family: str) -> None:
    plain = write_tiny_model(tmp_path / "plain", family, **GLM, **{"num_key_value_heads": 4})
    folder = write_scaled_blocks(plain, tmp_path / "fp8")
    if family == "qwen3_moe":
        edit_quantization(folder, ignore=["lm_head", "re:.*mlp.gate$"])
    tensors = tensors_of(folder)
    as_blocks = {
        f"{name}_inv" if name.endswith("_scale") else name: each.float() if "scale" in name else each
        for name, each in tensors.items()
    }
    check_same(folder, in_floats(folder, tmp_path / "exact", dequantised(as_blocks)))


def test_other_blocks_are_refused(tmp_path: Path) -> None:
    folder = write_scaled_blocks(write_tiny_model(tmp_path / "plain", **SIZES), tmp_path / "fp8")
    groups = edit_quantization(folder)["config_groups"]
    for wrong in ([64, 128], None):
        groups["group_0"]["weights"]["block_structure"] = wrong
        edit_quantization(folder, config_groups=groups)
        with pytest.raises(ValueError, match=r"block_structure .* not supported; supported: \[128, 128\]"):
            load_model_config(folder)


# -- scales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8], ids=["F8_E8M0", "U8"])
def test_scales_that_are_powers_of_two(tmp_path: Path, dtype: torch.dtype) -> None:
    """scale_fmt "ue8m0": a byte is an exponent, also where the dtype does not say so."""
    folder = write_fp8(write_tiny_model(tmp_path / "plain", **SIZES), tmp_path / "fp8", "block")

    def powers(tensors: Tensors) -> None:
        for name in [name for name in tensors if "scale" in name]:
            tensors[name] = tensors[name].log2().round().exp2()

    edit_tensors(folder, powers)
    exact = in_floats(folder, tmp_path / "exact", dequantised(tensors_of(folder)))
    edit_tensors(
        folder,
        lambda t: t.update({n: s.to(torch.float8_e8m0fnu).view(dtype) for n, s in t.items() if "scale" in n}),
    )
    edit_quantization(folder, scale_fmt="ue8m0", fmt="float8_e4m3fn")
    check_same(folder, exact)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    edit_tensors(folder, lambda t: t[name].view(torch.uint8).fill_(255))
    with pytest.raises(ModelLoadError, match=rf"{name} has nan, which must be finite"):
        check_weights(load_model_config(folder), folder)


SHAPES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "[]": ("tensor", lambda scale: scale.reshape([])),
    "[1, 1]": ("tensor", lambda scale: scale.reshape(1, 1)),
    "[N]": ("channel", lambda scale: scale.flatten()),
    "4-D": ("block", lambda scale: scale[:, None, :, None]),
}


@pytest.mark.parametrize(("kind", "reshape"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("family", ["qwen3", "glm4"])
def test_shapes_of_scales(tmp_path: Path, family: str, kind: str, reshape: Any) -> None:
    plain = write_tiny_model(tmp_path / "plain", family, **GLM)
    folder, usual = (write_fp8(plain, tmp_path / name, kind) for name in ("odd", "usual"))
    edit_tensors(folder, lambda t: t.update({n: reshape(s) for n, s in t.items() if "scale" in n}))
    check_same(folder, usual)


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors"])
def test_negative_scales_of_4_bits(tmp_path: Path, format: str) -> None:
    """AutoRound's symmetric files have them: 16 - code with the other sign is the same value."""
    plain = write_tiny_model(tmp_path / "plain", "qwen2", **SIZES)
    usual = write_int4(plain, tmp_path / "usual", format, group=32, symmetric=True)
    folder = write_int4(plain, tmp_path / "odd", format, group=32, symmetric=True)
    rows = {"awq": 16, "gptq": 4, "compressed-tensors": 0}[format]  # of codes, for a group of inputs
    codes, scales = ("weight_packed", "weight_scale") if not rows else ("qweight", "scales")

    def flip(tensors: Tensors) -> None:
        """Of the first group of all rows."""
        for name in [name for name in tensors if name.endswith(codes)]:
            words, scale = tensors[name], tensors[name.removesuffix(codes) + scales]
            part = words[:, :4] if not rows else words[: {"awq": 32, "gptq": 4}[format]]
            octets = part.contiguous().view(torch.uint8).int()
            low, high = (16 - (octets & 15)) & 15, (16 - (octets >> 4)) & 15
            part.copy_((low | high << 4).to(torch.uint8).view(torch.int32).view(part.shape))
            (scale[:, 0] if not rows else scale[0]).neg_()

    edit_tensors(folder, flip)
    assert any((tensor < 0).any() for name, tensor in tensors_of(folder).items() if name.endswith(scales))
    check_weights(load_model_config(folder), folder)
    ours, theirs = load(folder), load(usual)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)  # -0 is 0
    assert torch.equal(forward(ours, PROMPT), forward(theirs, PROMPT))


# -- 4 bits in part -----------------------------------------------------------------------------------------


def in_part(plain: Path, target: Path, format: str, **stated: Any) -> Path:
    folder = write_int4(plain, target, format, group=32, skip=("down_proj",))
    edit_quantization(folder, **{"modules_to_not_convert": None} | stated)
    return folder


def test_gptq_of_some_modules(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "qwen2", **SIZES)
    usual = in_part(plain, tmp_path / "usual", "awq", modules_to_not_convert=["down_proj"])
    assert torch.equal(
        tensors_of(usual)["model.layers.0.mlp.down_proj.weight"],
        tensors_of(plain)["model.layers.0.mlp.down_proj.weight"],
    )
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    blocks = [attention[:3], attention[3:], ["mlp.gate_proj", "mlp.up_proj"]]
    for name, stated in {
        "lists": {"modules_in_block_to_quantize": blocks},
        "names": {"modules_in_block_to_quantize": [name for names in blocks for name in names]},
        "dynamic": {"dynamic": {r"-:.*\.down_proj": {}}},
    }.items():
        check_same(in_part(plain, tmp_path / name, "gptq", **stated), usual)
    folder = in_part(plain, tmp_path / "all", "gptq")
    with pytest.raises(ModelLoadError, match=r"missing: .*down_proj\.qweight"):
        check_weights(load_model_config(folder), folder)


def test_awq_by_the_names_of_llm_awq(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "qwen2", **SIZES)
    folder, usual = (write_int4(plain, tmp_path / name, "awq", group=32) for name in ("odd", "usual"))
    stated = edit_quantization(folder)
    stated["w_bit"], stated["q_group_size"] = stated.pop("bits"), stated.pop("group_size")
    edit_json(folder / "config.json", quantization_config=stated)
    check_same(folder, usual)


@pytest.mark.parametrize(
    ("read", "stated", "message"),
    [
        (from_awq, {"w_bit": 3}, "bits 3 is not supported"),
        (from_awq, {"q_group_size": 100, "bits": 4}, "group_size 100 is not supported"),
        (from_awq, {"w_bit": 4, "bits": 8}, "w_bit 4 and bits 8 mean the same, and differ"),
        (from_gptq, {"bits": 4, "modules_in_block_to_quantize": []}, r"must be names .* not \[\]"),
        (from_gptq, {"bits": 4, "modules_in_block_to_quantize": [[5]]}, r"must be names .* not \[\[5\]\]"),
        (from_gptq, {"bits": 4, "dynamic": {"-:(": {}}}, r"dynamic: .* is no regular expression"),
        (from_gptq, {"bits": 4, "dynamic": {"-:a": {}, "b": {"bits": 8}}}, "settings of their own"),
    ],
)
def test_keys_that_are_refused(read: Any, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(stated)
