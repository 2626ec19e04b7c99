"""Blocks of GGUF files whose scales are infinite or NaN are refused when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import SCALES, random_blocks
from test_gguf import write_tensors
from test_models import load
from tiny_models import write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.models.gguf_file import TYPES, GGUFFile
from nanovllm.models.registry import load_model_config
from nanovllm.quantization.cpu_integers import IntegerLinearMethod
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


@pytest.mark.parametrize("stored_as", ["Q8_0", "Q5_0"])  # the first stays as it is stored
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
