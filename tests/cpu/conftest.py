"""The checkpoint and the engines that several of these files use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_spawn import forked_spawn
from replica_answers import OPTIONS
from tiny_models import write_tiny_model

from nanovllm import LLM, demo_model_path


@pytest.fixture(autouse=True, scope="module")
def _processes_share_one_import_of_torch() -> Iterator[None]:
    with forked_spawn():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No number of ranks divides the vocabulary of 97, and four ranks share 2 KV heads."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    """The demo model."""
    with LLM(demo_model_path(), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    """The same with two replicas, which are idle at the end."""
    with LLM(demo_model_path(), data_parallel_size=2, **OPTIONS) as llm:
        yield llm
        assert llm.is_finished()
