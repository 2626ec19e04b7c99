"""The most tokens of a prefill step for which graphs pay."""

from __future__ import annotations

from pathlib import Path

import inside
import pytest
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.cuda_graphs.prefill import most_tokens


def test_a_model_of_many_weights_launches_large_steps(tmp_path: Path) -> None:
    """The most tokens times the weights of a layer are constant."""
    options = {"skip_tokenizer_init": True, "device": "cpu", "load_format": "dummy"}
    counts = []
    for width in (64, 256):
        sizes = {"num_hidden_layers": 2, "hidden_size": width, "intermediate_size": 8 * width, "head_dim": 64}
        with LLM(write_tiny_model(tmp_path / str(width), **sizes), **options) as llm:
            model = inside.runner(llm).model
            weights = sum(each.numel() for each in model.model.layers.parameters()) / 2
            counts.append(most_tokens(model, 2**40) * weights)
            assert most_tokens(model, 16384) == 16384
    assert counts == pytest.approx([5e11, 5e11], rel=1e-4)
