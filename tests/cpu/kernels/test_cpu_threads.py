"""`num_threads`: the threads of an engine on a CPU, shared by its ranks, and given back after each call."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import inside
import pytest
import torch
from rank_functions import num_threads
from replica_answers import OPTIONS

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.config import Config
from nanovllm.cpu import isa
from nanovllm.cpu.kernels.team import team
from nanovllm.device import Device
from nanovllm.engine import startup

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize("asked", [None, 1, 3])
def test_an_engine_uses_its_threads_and_gives_them_back(
    asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    seen = set()
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=8, num_threads=asked) as llm:
        launch = inside.runner(llm).launch

        def watched(batch: object) -> object:
            seen.add((torch.get_num_threads(), team().size))
            return launch(batch)

        monkeypatch.setattr(inside.runner(llm), "launch", watched)
        llm.generate("1 + 1 =", GREEDY, use_tqdm=False)
        assert torch.get_num_threads() == before
    assert seen == {(asked or before,) * 2}


def test_answers_do_not_depend_on_threads() -> None:
    texts = []
    for number in (1, 2, 3):
        with LLM(demo_model_path(), num_threads=number, **OPTIONS) as llm:
            outputs = llm.generate(["12 + 3 =", "Sort: d b a"], GREEDY, use_tqdm=False)
            texts.append([each["text"] for each in outputs])
    assert texts[0] == texts[1] == texts[2]


SCORED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=2)
TEXTS = ["12 + 3 =", "Sort: d b a", "Add 21 and 49, then add " + "1 and " * 60 + "2."]


def scores(llm: LLM, texts: list[str]) -> list[tuple[object, ...]]:
    """The tokens and texts of answers with all log-probabilities, also those of the prompts' tokens."""
    outputs = llm.generate(texts, SCORED, use_tqdm=False)
    return [(each.prompt_logprobs, each.outputs[0].logprobs, each.outputs[0].text) for each in outputs]


@pytest.mark.skipif(not isa.has_kernels(), reason="torch's sums depend on threads")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_log_probabilities_depend_neither_on_threads_nor_on_other_prompts(quantization: str | None) -> None:
    found = []
    for number in (1, 2, 3):
        with LLM(demo_model_path(), num_threads=number, quantization=quantization, **OPTIONS) as llm:
            found.append(scores(llm, TEXTS))
            found.append([each for text in TEXTS for each in scores(llm, [text])])
            found.append(scores(llm, TEXTS[::-1])[::-1])
    assert all(each == found[0] for each in found)


def test_ranks_of_an_engine_share_its_threads() -> None:
    with LLM(demo_model_path(), tensor_parallel_size=2, num_threads=6, **OPTIONS) as llm:
        assert llm.collective_rpc(num_threads) == [(3, 3)] * 2
        llm.generate("1 + 1 =", GREEDY, use_tqdm=False)
        assert llm.collective_rpc(num_threads) == [(3, 3)] * 2


@pytest.mark.parametrize(
    ("ranks", "asked", "share"), [(1, None, 5), (2, None, 2), (2, 8, 4), (4, 2, 1), (1, 7, 7)]
)
def test_ranks_share_the_threads(ranks: int, asked: int | None, share: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        with Device("cpu").share_of_threads(ranks, asked):
            assert torch.get_num_threads() == team().size == share
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


def test_on_a_gpu_it_does_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = SimpleNamespace(is_cuda=True, capability=(9, 0), ranks=lambda size, replicas: ["cuda:0"])
    monkeypatch.setattr(startup, "Device", lambda spec: gpu)
    with caplog.at_level(logging.WARNING):
        startup.open_model(Config(demo_model_path(), num_threads=2))
        assert "num_threads=2 does nothing on a GPU" in caplog.text
        caplog.clear()
        startup.open_model(Config(demo_model_path()))
    assert "num_threads" not in caplog.text
