"""What holds for a GGUF file beside the folder that it was made of."""

from __future__ import annotations

from pathlib import Path

import torch
from checked_llm import make_tiny
from gguf_dense import named
from gguf_files import random_blocks
from test_models import PROMPT, forward, load
from tiny_models import transformers_greedy, transformers_logits

from nanovllm import SamplingParams
from nanovllm.cpu.integers import StoredConfig
from nanovllm.models.registry import load_model_config
from tools.write_gguf import Encode, encode_as


def check_answers(path: Path, folder: Path) -> None:
    """Logits, and tokens in an engine with steps and blocks of few tokens, are those of transformers."""
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(path), PROMPT), expected, rtol=1e-4, atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make_tiny(path, dtype="float32", kvcache_block_size=4, max_num_batched_tokens=5) as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output["token_ids"] == transformers_greedy(folder, PROMPT, 12, output["token_ids"])


def encoding(stored_as: str) -> Encode:
    return random_blocks("Q4_K") if stored_as == "Q4_K" else encode_as(stored_as)


def check_blocks(path: Path, dense: Path, stored_as: str, matrices: int, packed: bool = False) -> None:
    """All matrices stay as they are stored, with the values of `dense`, whose tokens an engine gives.

    packed: `dense` holds queries, keys and values in one tensor, and both projections of a gate.
    """
    quant, ours, theirs = load_model_config(path).quant, named(path), named(dense)
    assert isinstance(quant, StoredConfig) and len(quant.types) == matrices
    assert {*quant.types.values()} == {stored_as}
    for prefix in ("model.layers.0", "model.layers.1") if packed else ():
        heads = [ours.pop(f"{prefix}.self_attn.{name}_proj.weight") for name in "qkv"]
        ours[f"{prefix}.self_attn.qkv_proj.weight"] = torch.cat(heads)
        parts = [ours.pop(f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        ours[f"{prefix}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_tiny(path, dtype="float32", quantization="dequantize") as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output["token_ids"] == transformers_greedy(dense, PROMPT, 8, output["token_ids"])
