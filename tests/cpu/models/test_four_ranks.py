"""Families whose layers are split in a way of their own, over four ranks: hybrids, Gemma 4, and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_llm import make_tiny
from engine_cases import make_prompts
from tiny_models import transformers_greedy, write_tiny_model

from nanovllm import SamplingParams

STATES: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
FAMILIES: dict[str, dict[str, Any]] = {  # heads that four ranks can split, three value heads for a key head
    "qwen3_5": STATES,
    "qwen3_5_moe": STATES,
    "qwen3_next": STATES,
    "olmo_hybrid": STATES,
    "gemma4": {},
    "gemma4-small": {"hidden_size_per_layer_input": 8},
    "gemma4-experts": {},
    "gpt_oss": {},
    "granite_swa": {},
    "ministral3": {"num_attention_heads": 8},
}


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_gives_transformers_tokens(tmp_path: Path, family: str) -> None:
    """With few blocks, prompts in parts, and prompts that share beginnings; twice: some are cached."""
    folder, prompts = write_tiny_model(tmp_path, family, **FAMILIES[family]), make_prompts()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [transformers_greedy(folder, prompt, 6) for prompt in prompts]
    options = {"max_num_batched_tokens": 11, "num_kvcache_blocks": 30}
    with make_tiny(folder, tensor_parallel_size=4, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [each["token_ids"] for each in outputs] == expected
