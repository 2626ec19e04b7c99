"""Weights of 4 bits: what is refused, with the tensor or the setting; and the kernels, interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import int4_cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensors import BF16, F16
from test_models import PROMPT, forward, load
from tiny_models import edit_json, write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.formats.compressed_tensors import CompressedTensorsConfig
from nanovllm.formats.int4.configs import from_awq, from_gptq
from nanovllm.formats.int4.kernels.layout import Int4Weight
from nanovllm.formats.int4.kernels.matmul import Int4Tile, choose_int4_tile
from nanovllm.kernels.compat import INTERPRET
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightOptions
from tools.write_fp8 import write_fp8
from tools.write_int4 import write_int4

interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dense"), "qwen2", hidden_size=128, intermediate_size=256)


# -- bad input ----------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj"
BAD_TENSORS: dict[str, tuple[str, Any, str]] = {
    "scales that are missing": ("awq", lambda t: t.pop(f"{UP}.scales"), rf"1 missing: {UP}.scales"),
    "zero": (
        "awq",
        lambda t: t[f"{UP}.scales"].zero_(),
        rf"{UP}.scales has 0.0, which must be finite and not 0",
    ),
    "NaN": ("gptq", lambda t: t[f"{UP}.scales"][1].fill_(torch.nan), rf"{UP}.scales has nan"),
    "another shape": (
        "awq",
        lambda t: t.update({f"{UP}.scales": torch.ones(1, 256)}),
        rf"{UP}.scales is \(1, 256\)",
    ),
    "floats": ("awq", lambda t: t.update({f"{UP}.qweight": torch.ones(128, 32)}), rf"{UP}.qweight is F32"),
    "bf16 weights": (
        "gptq",
        lambda t: t.update({f"{UP}.weight": torch.ones(256, 128)}),
        rf"unexpected: {UP}.weight",
    ),
    "groups": (
        "gptq",
        lambda t: t[f"{UP}.g_idx"].add_(1),
        rf"{UP}.g_idx has 2, which must be a group from 0 to 1",
    ),
    "uneven": (
        "gptq",
        lambda t: t[f"{UP}.g_idx"][:1].add_(1),
        rf"{UP}.g_idx has group 0 63 times, which must be 64",
    ),
    "order": (
        "gptq",
        lambda t: t[f"{UP}.g_idx"].copy_(t[f"{UP}.g_idx"].flip(0)),
        rf"{UP}.g_idx has groups that are no",
    ),
    "w4a16's shape": (
        "compressed-tensors",
        lambda t: t[f"{UP}.weight_shape"].add_(8),
        rf"{UP}.weight_shape has 264",
    ),
}


@pytest.mark.parametrize(("format", "edit", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(dense: Path, tmp_path: Path, format: str, edit: Any, message: str) -> None:
    folder = write_int4(dense, tmp_path / "int4", format, group=64)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
WEIGHTS: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 128}
SCHEME: dict[str, Any] = {"targets": ["Linear"], "weights": WEIGHTS}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
BAD_CONFIGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "awq bits": (from_awq, AWQ | {"bits": 8}, "bits 8 is not supported; supported: 4"),
    "awq version": (
        from_awq,
        AWQ | {"version": "GEMV"},
        "version 'gemv' is not supported; supported: 'gemm'",
    ),
    "awq group": (
        from_awq,
        AWQ | {"group_size": 48},
        "group_size 48 is not supported; supported: 32, 64, 128, -1",
    ),
    "awq names": (from_awq, AWQ | {"modules_to_not_convert": "lm_head"}, "must be a list of names"),
    "gptq bits": (from_gptq, GPTQ | {"bits": 3}, "bits 3 is not"),
    "gptq true": (from_gptq, GPTQ | {"desc_act": 1}, "desc_act 1 is not supported; supported: False, True"),
    "marlin": (
        from_gptq,
        GPTQ | {"checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not supported",
    ),
    "dynamic": (
        from_gptq,
        GPTQ | {"dynamic": {"+:up": {"bits": 8}}},
        r"dynamic \{.*\} gives modules settings",
    ),
    "w4a16 bits": (
        CompressedTensorsConfig.of,
        PACKED | {"config_groups": {"0": SCHEME | {"weights": WEIGHTS | {"num_bits": 8}}}},
        "num_bits 8 is not",
    ),
    "w4a8": (
        CompressedTensorsConfig.of,
        PACKED | {"config_groups": {"0": SCHEME | {"input_activations": {"num_bits": 8}}}},
        "input_activations .* is not supported with 4 bits",
    ),
    "w4a16 format": (
        CompressedTensorsConfig.of,
        PACKED | {"format": "int-packed", "config_groups": {"0": SCHEME}},
        "format 'int-packed' of 0 is not",
    ),
    "w4a16 nothing": (
        CompressedTensorsConfig.of,
        PACKED,
        "config_groups must be an object with groups, not None",
    ),
    "w4a16 names": (
        CompressedTensorsConfig.of,
        PACKED | {"config_groups": {"0": SCHEME}, "ignore": ["re:("]},
        r"'re:\(' is no regular expression",
    ),
}


@pytest.mark.parametrize(("read", "stated", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_configs(read: Any, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"config.json: quantization_config.*{message}"):
        read(stated)


def test_which_weights_are_quantised(dense: Path, tmp_path: Path) -> None:
    """Modules that a config names stay as they are; weights of one product must be alike."""
    for format in ("awq", "compressed-tensors"):
        folder = write_int4(dense, tmp_path / format, format, skip=("layers.0.mlp",))
        model = load(folder)
        left, quantised = (type(layer.mlp.down_proj.method).__name__ for layer in model.model.layers[:2])
        assert left in ("UnquantizedLinearMethod", "PackedLinearMethod")
        assert quantised == "DequantisedLinear"
        forward(model, PROMPT)
    edit_json(folder / "config.json", quantization_config=AWQ | {"modules_to_not_convert": ["q_proj"]})
    with pytest.raises(ValueError, match=r"q_proj, .*k_proj, .*v_proj are one product"):
        load(folder)
    head = from_gptq(GPTQ | {"lm_head": True})
    with pytest.raises(ValueError, match="quantises lm_head, which is also the embedding"):
        head.method("model.embed_tokens", "tied_embedding")


def test_dequantised_weights_of_deterministic_steps(dense: Path, tmp_path: Path) -> None:
    """Packed ones need no aligned rows."""
    folders = write_int4(dense, tmp_path / "int4", "awq"), write_fp8(dense, tmp_path / "fp8", "block")
    for folder in folders:
        config = load_model_config(folder)
        model = DecoderForCausalLM(config, TPGroup(), ReferenceBackend(), 32)
        allocate(model, WeightOptions(BF16, torch.device("cpu"), deterministic=True), config.quant)


def test_sizes_that_a_format_cannot_hold(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "dense")  # 32 and 48 inputs
    folder = write_int4(source, tmp_path / "int4", "awq", group=16)
    edit_json(folder / "config.json", quantization_config=AWQ)
    with pytest.raises(
        ValueError,
        match=r"q_proj has 64 outputs and 32 inputs, which AWQ with groups of 128, of config\.json, cannot",
    ):
        check_weights(load_model_config(folder), folder)


# -- kernels ------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("n", "k", "group"), [(70, 160, 32), (40, 192, 64), (33, 256, 128), (16, 384, 384)])
def test_dequantise_kernel(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    int4_cases.check_dequantise(n, k, group, dtype, "cpu")


@interpreted
@pytest.mark.parametrize(
    ("rows", "n", "k", "group", "dtype", "tile"),
    [
        (1, 70, 160, 32, F16, Int4Tile(16, 64)),
        (3, 70, 192, 64, BF16, Int4Tile(16, 64, split=2)),
        (17, 70, 384, 128, F16, Int4Tile(16, 64, tma=False)),
        (40, 136, 256, 256, BF16, Int4Tile(32, 64, more=16, split=3)),
        (97, 24, 288, 32, F16, Int4Tile(32, 128, more=16)),
        (5, 24, 128, 64, F16, None),
    ],
)
def test_product_kernel(
    rows: int, n: int, k: int, group: int, dtype: torch.dtype, tile: Int4Tile | None
) -> None:
    int4_cases.check_product(rows, n, k, group, dtype, "cpu", tile)


def test_which_tile_is_chosen() -> None:
    """The sum is split where there are few tiles, and never with `deterministic`."""
    large, small = (Int4Weight.empty(n, 4096, 128, torch.device("meta")) for n in (24576, 4096))
    for rows in (1, 2, 3, 16, 17, 33, 65, 131, 193, 256, 512):
        tiles = [choose_int4_tile(rows, weight, 132) for weight in (large, small)]
        assert all(tile is not None for tile in tiles)
        wide, narrow = (tile for tile in tiles if tile is not None)
        assert wide.split <= narrow.split <= 6 and wide._replace(split=narrow.split) == narrow
        assert rows <= 16 or -(-rows // wide.height) <= 4
        assert choose_int4_tile(rows, small, 132, deterministic=True) == narrow._replace(split=1)
        assert rows > 64 or narrow.split > 1
    assert choose_int4_tile(513, large, 132) is None
    short = Int4Weight.empty(256, 256, 128, torch.device("meta"))
    assert [choose_int4_tile(rows, short, 132).split for rows in (1, 64, 256)] == [1, 1, 1]  # type: ignore[union-attr]
