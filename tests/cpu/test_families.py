"""The families whose layers differ: the logits and tokens of transformers from the same files, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_models import check_against_transformers
from tiny_models import MORE_FAMILIES, write_tiny_model


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family))
