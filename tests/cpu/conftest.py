"""The checkpoint that most of these tests load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 97, which no number of ranks divides, and 2 KV heads, which 4 ranks must share."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))
