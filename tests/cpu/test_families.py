"""The families whose layers differ: the logits and tokens of transformers from the same files, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_llm import make_tiny
from engine_cases import make_prompts
from test_models import check_against_transformers
from tiny_models import FAMILIES, MORE_FAMILIES, transformers_greedy, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.models.registry import get_family, supported_architectures

# Cells of the matrix: chunks of prompts, few blocks, no prefix cache, two ranks, blocks of other sizes.
CELLS: dict[str, dict[str, Any]] = {
    "tight": {"max_num_batched_tokens": 7, "num_kvcache_blocks": 7},
    "whole": {"num_kvcache_blocks": 100},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 1},
    "in step": {"async_scheduling": False, "kvcache_block_size": 3, "max_num_batched_tokens": 11},
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 9, "num_kvcache_blocks": 9},
}
# CI runs one cell for each family, and each cell for some family.
FIRST = {family: [*CELLS][index % len(CELLS)] for index, family in enumerate(MORE_FAMILIES)}


def params_of_matrix() -> list[Any]:
    return [
        pytest.param(family, cell, marks=() if FIRST[family] == cell else pytest.mark.full)
        for family in MORE_FAMILIES
        for cell in CELLS
    ]


@pytest.mark.parametrize(("family", "cell"), params_of_matrix())
def test_the_engine_gives_transformers_tokens(tmp_path: Path, family: str, cell: str) -> None:
    """Twice, so that the second pass hits the prefix cache; unwritten cells of the cache are NaN."""
    extra = {"num_attention_heads": 6, "hidden_size": 36} if cell == "two ranks" and family == "olmo2" else {}
    folder = write_tiny_model(tmp_path, family, **extra)
    prompts = make_prompts()
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    # Phi-3 starts with the factors for long sequences, which transformers takes only for those.
    lengths = [len(prompt) for prompt in prompts]
    kept = [prompt for prompt in prompts if family != "phi3" or len(prompt) > 8]
    expected = [transformers_greedy(folder, prompt, 14) for prompt in kept]
    assert max(lengths) == 24
    with make_tiny(folder, **CELLS[cell]) as llm:
        for _ in range(2):
            outputs = llm.generate(kept, params, use_tqdm=False)
            assert [each["token_ids"] for each in outputs] == expected


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family))


def test_every_registered_architecture_is_tested() -> None:
    tested = {each[1].__name__ for each in (*FAMILIES.values(), *MORE_FAMILIES.values())}
    assert tested | {"Gemma3ForConditionalGeneration"} == set(supported_architectures())


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_absent_keys_take_the_defaults_of_transformers(family: str) -> None:
    config_class, model_class, _ = MORE_FAMILIES[family]
    reader = get_family(model_class.__name__)
    absent = reader.model_config("X", {})
    stated = reader.model_config("X", config_class().to_dict())
    specs = [[config.spec(layer) for layer in range(config.num_layers)] for config in (absent, stated)]
    assert specs[0] == specs[1]
    assert replace(absent, attention=stated.attention) == stated
