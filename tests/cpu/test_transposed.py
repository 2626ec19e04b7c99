"""A weight method that stores bf16 in another layout, for the MLPs only: the tokens are the plain ones."""

from __future__ import annotations

from pathlib import Path

import inside
import pytest
from digests import make_digest
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from nanovllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 93, 17, 2, 60], [31, 8, 44], [7]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_those_of_the_plain_method(tmp_path: Path, family: str, ranks: int) -> None:
    biases = {"mlp_bias": True} if family == "llama" else {}
    folder = write_tiny_model(tmp_path, family, intermediate_size=80, **biases)
    stored, quant = load_file(folder / "model.safetensors"), {"quant_method": "transposed"}
    tokens = []
    for overrides in ({}, {"quantization_config": quant}):
        options = {"dtype": "bfloat16", "tensor_parallel_size": ranks, "hf_overrides": overrides}
        with make_digest(folder, **options) as llm:
            tokens.append([each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
            before = llm.on_ranks("digest")
            llm.update_weights({name: tensor * 2 for name, tensor in stored.items()})
            assert llm.on_ranks("digest") != before
            llm.update_weights(stored)
            assert llm.on_ranks("digest") == before
            llm.sleep(2)
            llm.wake_up()
            assert llm.on_ranks("digest") == before
            layer = inside.model(llm).model.layers[0]
    assert tokens[0] == tokens[1]
    assert layer.mlp.down_proj.weight.shape == (80 // ranks, 32) and len(layer.self_attn.o_proj.weight) == 32
    assert type(layer.mlp.gate_up_proj.method).__name__ == "TransposedLinearMethod"
    assert type(layer.self_attn.qkv_proj.method).__name__ == "UnquantizedLinearMethod"
