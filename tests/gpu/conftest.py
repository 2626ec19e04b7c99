"""Fixtures of the GPU tests."""

from __future__ import annotations

import pytest
from needs import needs_backend


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """An attention backend that runs here, of `parametrize("backend", ..., indirect=True)`."""
    needs_backend(request.param)
    return request.param
