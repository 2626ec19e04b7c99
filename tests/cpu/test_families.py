"""The families whose layers differ: the logits and tokens of transformers from the same files, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_models import check_against_transformers
from tiny_models import FAMILIES, MORE_FAMILIES, write_tiny_model

from nanovllm.models.registry import get_family, supported_architectures


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
