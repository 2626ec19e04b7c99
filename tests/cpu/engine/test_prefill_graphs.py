"""Prefill steps in pieces on a CPU: in place of CUDA graphs, operations are recorded and run again.

`tests/gpu/test_prefill_graphs_gpu.py` has the graphs themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import inside
import inside_kinds
import pytest
import torch
from prefix_cases import branching_prompts
from tiny_models import write_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nanovllm import LLM, SamplingParams
from nanovllm.cpu import isa
from nanovllm.cuda_graphs import prefill

PROMPTS = [
    [token % 90 + 2 for token in each[:90]] for each in branching_prompts(random.Random(1), 16, 80, 90)
]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


class RecordedGraph(TorchDispatchMode):
    """As a CUDA graph: a replay computes from the present content of all tensors, into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        made: dict[
            int, Any
        ] = {}  # by what was recorded in its place; the twins have shapes that follow from slots
        for func, args, kwargs, out in self.calls:
            args, kwargs = tree_map(lambda each: made.get(id(each), each), (args, kwargs))
            for before, now in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(now, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    made[id(before)] = now
                    if now.shape == before.shape:
                        before.copy_(now)


@pytest.fixture
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    inside_kinds.own_memory_in_pieces(monkeypatch)
    with isa.compiling_for("torch"):  # operations that torch sees
        yield


def rounds(folder: Path, captures: bool, **options: Any) -> tuple[list[Any], dict[int, Any]]:
    """Tokens and logprobs of five calls, before each of which nothing is cached; what was captured."""
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "kvcache_block_size": 16}
    defaults |= {"max_model_len": 128, "num_kvcache_blocks": 400, "max_num_batched_tokens": 160}
    with LLM(folder, **defaults | options) as llm:
        runner = inside.runner(llm)
        if captures:
            groups = len(runner.layout.groups)
            runner.prefills = prefill.PrefillGraphs(runner.model, runner.device, None, 160, groups)
        found = []
        for _ in range(5):
            llm.reset_prefix_cache()
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            found.append([(each["token_ids"], str(each.outputs[0].logprobs)) for each in outputs])
        return found, getattr(runner.prefills, "captured", {})


@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("family", ["qwen3", "gemma4-small", pytest.param("gemma3", marks=pytest.mark.full)])
def test_pieces_give_the_bits_of_launched_steps(tmp_path: Path, family: str) -> None:
    """With copied cells, several steps a call, layers with windows, and inputs of layers. Not with experts:
    their twin loops on the host."""
    folder = write_tiny_model(tmp_path, family)
    expected, _ = rounds(folder, False)
    found, captured = rounds(folder, True)
    assert 160 in captured and all(pieces is not None for pieces in captured.values())
    assert all(each == expected[0] for each in [*expected, *found])
