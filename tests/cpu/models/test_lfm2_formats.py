"""LFM2 in fewer bits: on the fly, and from files that equal their dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp8_models
import inside
import pytest
import torch
from checked_llm import make_tiny
from fp8_models import tensors_of
from rank_threads import config_of, loaded, on_ranks
from safetensors.torch import load_file, save_file
from test_lfm2 import FAMILIES, GREEDY, check
from test_models import PROMPT, forward, load
from tiny_models import transformers_logits, write_tiny_model

from tools.write_fp8 import write_fp8
from tools.write_int4 import dequantised, rounded, write_int4

# That groups of 32 inputs divide, also on two ranks.
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "vocab_size": 104, "block_auto_adjust_ff_dim": False},
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_on_the_fly(tmp_path: Path, family: str, quantization: str) -> None:
    """Projections are, taps and routers are not."""
    folder = write_tiny_model(tmp_path, family, **SIZES)
    with make_tiny(folder, quantization=quantization, num_kvcache_blocks=30) as llm:
        [first, *_] = inside.model(llm).state_layers
        assert type(first.in_proj.method).__name__ != "UnquantizedLinearMethod"
        assert first.conv.weight.dtype == torch.float32
        assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6


@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_in_fp8(tmp_path: Path, family: str, scales: str) -> None:
    """Scales follow the rows of each third of the first product."""
    plain = write_tiny_model(tmp_path / "plain", family, **SIZES | {"hidden_size": 128, "head_dim": 64})
    folder = write_fp8(plain, tmp_path / "fp8", scales)
    meant, stored = fp8_models.dequantised(tensors_of(folder)), tensors_of(plain)
    assert meant.keys() == stored.keys()
    assert sum(not torch.equal(meant[name], stored[name]) for name in meant) > 10
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors")
    found, expected = forward(load(folder, on_cpu=True), PROMPT), forward(load(plain), PROMPT)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["awq", "gptq", "compressed-tensors"])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_in_4_bits(tmp_path: Path, family: str, format: str) -> None:
    """They equal their dequantised weights, on two ranks too."""
    source = write_tiny_model(tmp_path / "dense", family, **SIZES)
    packed = write_int4(source, tmp_path / "int4", format=format, group=32, symmetric=True)
    tensors, stored = load_file(source / "model.safetensors"), load_file(packed / "model.safetensors")
    assert "model.layers.0.conv.in_proj.weight" not in stored
    for name, tensor in tensors.items():
        if name not in stored:  # in 4 bits
            tensors[name] = dequantised(*rounded(tensor, 32, True, None, torch.float16), 32, None)
    save_file(tensors, source / "model.safetensors")
    expected = transformers_logits(source, PROMPT)
    check(packed, expected)
    on_two = on_ranks(2, lambda tp: loaded(config_of(packed, tensor_parallel_size=2), packed, tp), PROMPT)
    torch.testing.assert_close(on_two, expected, rtol=1e-4, atol=1e-4)
