"""The shapes of bench.py have the parameters that the makers of these models state."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.models.registry import load_model_config
from nanovllm.report.roofline import Cost
from tools.benchmark.shapes import MORE, write_shape

PUBLISHED = {  # 10^9 parameters of the decoder, and of these those that a token is multiplied with
    "gemma4-12b": (11.9, 11.9),
    "gemma4-26b-a4b": (25.2, 3.8),
    "laguna-xs": (33.4, 2.8),
    "lfm2-1.2b": (1.17, 1.17),
    "lfm2-8b-a1b": (8.34, 1.56),
    "ministral3-8b": (8.5, 7.9),
    "muse-glimmer-30b": (27.9, 26.5),
    "olmo-hybrid-7b": (7.4, 7.0),
}


@pytest.mark.parametrize("name", MORE)
def test_the_parameters_of_a_shape(tmp_path: Path, name: str) -> None:
    config = load_model_config(write_shape(name, tmp_path, 300_000))
    cost = Cost.of(config, 2, 2)
    unused = (cost.num_experts - cost.top_k) * cost.expert_params
    embedding = 0 if config.ties_head else cost.head_params
    active = cost.layer_params + cost.head_params
    found = (active + unused + embedding) / 1e9, active / 1e9
    assert found == pytest.approx(PUBLISHED[name], rel=0.01)
    assert config.max_position_embeddings >= 262144
