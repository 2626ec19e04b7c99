"""The checkpoint that most of these tests load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No number of ranks divides the vocabulary of 97, and four ranks share 2 KV heads."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))
