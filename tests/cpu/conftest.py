"""The checkpoint and the engines that several of these files use. Fixtures import what takes seconds, because
some tests run others in processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from forked_spawn import forked_spawn

if TYPE_CHECKING:
    from nanovllm import LLM


@pytest.fixture(autouse=True, scope="module")
def _processes_share_one_import_of_torch() -> Iterator[None]:
    with forked_spawn():
        yield


@pytest.fixture(autouse=True, scope="module")
def _kernels_are_compiled_here() -> Iterator[None]:
    """`test_cpu_ahead.py` has the processes that a start compiles in: each imports torch, and numba warms up
    in it. Here that is done once."""
    from inside_kinds import compile_in_this_process

    with pytest.MonkeyPatch.context() as patch:
        compile_in_this_process(patch)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No number of ranks divides the vocabulary of 97, and four ranks share 2 KV heads."""
    from tiny_models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))


def make_llm(replicas: int) -> LLM:
    """An engine of the demo model."""
    from replica_answers import OPTIONS

    from nanovllm import LLM, demo_model_path

    return LLM(demo_model_path(), data_parallel_size=replicas, **OPTIONS)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    """The demo model."""
    with make_llm(1) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    """The same with two replicas, which are idle at the end."""
    with make_llm(2) as llm:
        yield llm
        assert llm.is_finished()
