"""K-quants of GGUF files on CPUs: several types in one product, split, replaced, refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny
from gguf_files import random_blocks
from integer_models import PROMPT, SCORED, load, prompt_logprobs, without_matrices  # noqa: F401
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from nanovllm.cpu import isa
from nanovllm.cpu.integers import IntegerLinearMethod, StoredConfig
from nanovllm.parallel.group import TPGroup
from tools.write_gguf import write_gguf

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512}  # two ranks have whole blocks


def as_q4_k_m(folder: Path, target: Path) -> Path:
    """Types as llama.cpp mixes them: values and the second matrix of an MLP have 6 bits in some layers."""
    encoders = {name: random_blocks(name) for name in ("Q4_K", "Q6_K")}

    def encode(name: str, values: Any) -> Any:
        more = "token_embd" in name or (("attn_v" in name or "ffn_down" in name) and "blk.0." in name)
        return encoders["Q6_K" if more else "Q4_K"](name, values)

    return write_gguf(folder, target, encode)


@pytest.mark.usefixtures("without_matrices")
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
def test_a_file_of_mixed_types_is_used_as_it_is_stored(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Modules of one product that have several types are multiplied one after the other."""
    folder = write_tiny_model(tmp_path / "folder", family, tie_word_embeddings=True, **SIZES)
    path = as_q4_k_m(folder, tmp_path / "m.gguf")
    model, exact = load(path), load(path, "dequantize")
    name = "model.layers.0.self_attn.qkv_proj"
    mixed = model.get_submodule(name).method
    assert [each.format.name for each in mixed.parts.values()] == ["Q4_K", "Q4_K", "Q6_K"]
    own = torch.cat([each.dense() for each in mixed.parts.values()])
    assert torch.equal(own, exact.get_submodule(name).method.apply(torch.eye(512)).T)
    found, wanted = prompt_logprobs(path), prompt_logprobs(path, quantization="dequantize")
    assert 0 < (found - wanted).abs().max() < 2
    with caplog.at_level(logging.WARNING, "nanovllm"), make_tiny(path) as llm:
        ones = {key: torch.ones(each.shape) for key, each in load_file(folder / "model.safetensors").items()}
        llm.update_weights(ones)
        output = llm.generate([PROMPT], SCORED, use_tqdm=False)[0].outputs[0]
        assert all(each.isfinite().all() for each in torch.tensor([output.cumulative_logprob]))
    assert "GGUF weights are used as they are stored: " in caplog.text and "dequantised" not in caplog.text
    parts = [load(path, tp=TPGroup(rank, 2)).get_submodule(name).method.parts for rank in range(2)]
    halves = [
        torch.cat([part.dense() for part in pair]) for pair in zip(*(p.values() for p in parts), strict=True)
    ]
    assert torch.equal(torch.cat(halves), own)


@pytest.mark.usefixtures("without_matrices")
def test_ranks_that_would_split_a_block_of_k_quants_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "folder", "llama", hidden_size=256, intermediate_size=768)
    path = as_q4_k_m(folder, tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"inputs in groups of 256 cannot be split into parts of \d+; use"):
        load(path, tp=TPGroup(0, 2))
    load(path, "dequantize", TPGroup(0, 2))


def test_amx_keeps_formats_that_are_as_fast_as_their_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"model.layers.0.mlp.down_proj": "Q4_K", "model.layers.1.mlp.down_proj": "Q8_0"}
    for matrices, kept in ((True, [None, "Q8_0"]), (False, ["Q4_K", "Q8_0"])):
        monkeypatch.setattr(isa, "has_matrices", lambda found=matrices: found)
        quant = StoredConfig(types).on((0, 0))
        methods = [quant.method(path, "linear") for path in types]
        found = [each.format.name if isinstance(each, IntegerLinearMethod) else None for each in methods]
        assert found == kept
