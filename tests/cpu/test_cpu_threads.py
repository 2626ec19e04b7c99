"""`num_threads`: the threads of an engine on a CPU, shared by its ranks, and given back after each call."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import inside
import pytest
import torch
from replica_answers import OPTIONS

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine import startup
from nanovllm.kernels.cpu.team import team

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
