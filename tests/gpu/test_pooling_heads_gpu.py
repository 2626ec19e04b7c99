"""Models with a head that classifies, on a GPU: their values are those of transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny
from head_models import PROMPTS, SEQUENCE, TOKENS, plain_values, transformers_values, write_head_model

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 7},
    "eager": {"enforce_eager": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("architecture", [SEQUENCE, TOKENS])
@pytest.mark.parametrize("options", OPTIONS)
def test_values_are_those_of_transformers(tmp_path: Path, architecture: str, options: str) -> None:
    folder = write_head_model(tmp_path, "qwen3", architecture, labels=5)
    wanted = transformers_values(folder, PROMPTS)
    given = OPTIONS[options] | {"device": "cuda", "dtype": "float32", "kvcache_block_size": 16}
    with make_tiny(folder, num_kvcache_blocks=64, **given) as llm:
        for _ in range(2):  # also if the prefix cache has the prompts
            for found, values in zip(plain_values(llm, PROMPTS), wanted, strict=True):
                assert found.shape == values.shape
                assert torch.allclose(found, values, atol=1e-2, rtol=1e-2)
