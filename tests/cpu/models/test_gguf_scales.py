"""Scales of GGUF files, of blocks and of whole weights: what is multiplied, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import SCALES, random_blocks
from test_gguf import Type, greedy, write_tensors
from test_models import load
from tiny_models import write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.cpu.integers import IntegerLinearMethod
from nanovllm.formats.gguf.file import TYPES, GGUFFile
from nanovllm.models.registry import load_model_config, open_checkpoint
from tools.write_gguf import write_gguf


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    "stored_as", [each for each in TYPES if "F" not in each[:2] and SCALES.get(each, (0,))]
)
def test_scales_that_are_not_finite(tmp_path: Path, stored_as: str, value: float) -> None:
    """Dequantised or read as stored; only where such a block is read."""
    raw, kind = random_blocks(stored_as)("", np.zeros((6, 512)))
    size = gguf.GGML_QUANT_SIZES[kind][1]
    for place in SCALES.get(stored_as, (0,)):
        bad = raw.copy()
        bad[4, size + place : size + place + 2] = np.array([value], np.float16).view(np.uint8)
        tensor = GGUFFile(write_tensors(tmp_path / "x.gguf", {"odd": (bad, kind)})).tensors["odd"]
        assert tensor[:4].isfinite().all() and tensor[5:].isfinite().all()
        every, message = slice(None), r"x\.gguf: tensor 'odd' has blocks whose scale is infinite or NaN"
        for read in (lambda: tensor[every], lambda: tensor.blocks(every, slice(0, 512))):  # noqa: B023
            with pytest.raises(ModelLoadError, match=message):
                read()


@pytest.mark.parametrize("stored_as", ["Q8_0", "IQ4_NL"])  # the first stays as it is stored
def test_a_model_with_scales_that_are_not_finite(tmp_path: Path, stored_as: str) -> None:
    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        raw, kind = random_blocks(stored_as)(name, values)
        if name == "blk.1.ffn_up.weight":
            raw[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
        return raw, kind

    folder = write_tiny_model(tmp_path / "folder", hidden_size=64, intermediate_size=96)
    path = write_gguf(folder, tmp_path / "m.gguf", encode)
    config = load_model_config(path)
    method = config.quant.method("model.layers.1.mlp.up_proj", "linear")
    assert isinstance(method, IntegerLinearMethod) == (stored_as == "Q8_0")
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 'blk\.1\.ffn_up\.weight' has blocks whose"):
        load(path)


def test_a_weight_is_multiplied_by_its_scale(tmp_path: Path) -> None:
    """NVFP4 has a number for a whole weight, or one for each expert, beside the blocks. It is left out if it
    is 1; the rows of Llama's queries are put in order as those of other types."""
    (matrix, kind), (experts, _) = (
        random_blocks("NVFP4")("", np.zeros(shape)) for shape in [(8, 64), (3, 8, 64)]
    )
    stored = {"attn_q.weight": (matrix, kind), "attn_output.weight": (matrix, kind)}
    stored |= {"ffn_gate_exps.weight": (experts, kind), "attn_q.scale": np.array([0.001])}
    stored |= {"ffn_gate_exps.scale": np.array([2, 3, 0.5]), "attn_q.input_scale": np.array([0.1])}
    keys = {"attention__head_count": 2, "expert_count": 3, "expert_used_count": 2}
    path = write_tensors(
        tmp_path / "x.gguf", {f"blk.0.{name}": each for name, each in stored.items()}, **keys
    )
    plain, several = (torch.from_numpy(gguf.quants.dequantize(each, kind)) for each in (matrix, experts))
    with open_checkpoint(path).tensors() as found:
        assert len(found) == 5
        q = found["model.layers.0.self_attn.q_proj.weight"]
        assert torch.equal(q[:], (plain * torch.tensor(0.001))[[0, 2, 1, 3, 4, 6, 5, 7]])
        assert torch.equal(q[(slice(2, 5), slice(20, 40))], q[:][2:5, 20:40])
        assert torch.equal(found["model.layers.0.self_attn.o_proj.weight"][:], plain)
        for number, factor in enumerate([2.0, 3.0, 0.5]):
            expert = found[f"model.layers.0.block_sparse_moe.experts.{number}.w1.weight"]
            assert torch.equal(expert[:], several[number] * factor)
    types = open_checkpoint(path).config()["quantization_config"]["types"]
    assert types["model.layers.0.self_attn.q_proj"] == "NVFP4 with a scale"
    tensor = GGUFFile(path).tensors["blk.0.ffn_gate_exps.weight"]
    scale = GGUFFile(path).tensors["blk.0.ffn_gate_exps.scale"]
    assert torch.equal(tensor.scaled(scale)[:], several * torch.tensor([2, 3, 0.5])[:, None, None])


@pytest.mark.parametrize("scale", [np.array([1.0, 2.0]), np.array([np.nan]), np.ones((1, 1))])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, scale: np.ndarray) -> None:
    weight = random_blocks("NVFP4")("", np.zeros((8, 64)))
    path = write_tensors(tmp_path / "x.gguf", {"output.weight": weight, "output.scale": scale})
    with pytest.raises(ModelLoadError, match=r"x\.gguf: tensor 'output\.scale' must be one finite number"):
        open_checkpoint(path).config()


@pytest.mark.parametrize("stored_as", ["NVFP4", "MXFP4", "IQ4_XS", "IQ2_XXS", "Q3_K", "TQ2_0"])
def test_a_model_answers_as_with_its_dequantised_weights(tmp_path: Path, stored_as: str) -> None:
    folder = write_tiny_model(tmp_path / "folder", "llama", hidden_size=256, intermediate_size=512)
    encode = random_blocks(stored_as)
    path = write_gguf(folder, tmp_path / "model.gguf", encode)
    encode = random_blocks(stored_as)

    def dequantised(name: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        raw, kind = encode(name, values)
        return (raw if values.ndim == 1 else gguf.quants.dequantize(raw, kind)), Type.F32

    other = write_gguf(folder, tmp_path / "other.gguf", dequantised)
    options: dict[str, Any] = {"dtype": "float32", "quantization": None}
    assert greedy(path, **options) == greedy(other, **options)
    assert (
        load_model_config(path).quant.note
        == f"GGUF weights are dequantised as they are loaded: 16 {stored_as}"
    )
