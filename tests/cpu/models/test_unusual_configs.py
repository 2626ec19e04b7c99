"""Valid settings of config.json that no released checkpoint has: the logits of transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_models import check_against_transformers
from tiny_models import write_tiny_model

# What a family's tiny model has besides.
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"hidden_act": "gelu"}),
    ("qwen2_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    ("mixtral", {"hidden_act": "gelu"}),
    ("mellum", {"hidden_act": "gelu"}),
    ("glm4_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    ("minimax_m2", {"hidden_act": "gelu"}),
    ("laguna", {"hidden_act": "gelu"}),
]


@pytest.mark.parametrize(("family", "settings"), CONFIGS)
def test_unusual_settings(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family, **settings))
