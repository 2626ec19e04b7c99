"""The benchmark of engines on a CPU runs on nanovllm, and its prompts are the same everywhere."""

from __future__ import annotations

import re

import pytest

from nanovllm import demo_model_path
from tools import bench_cpu


def test_the_prompts_are_fixed() -> None:
    work = bench_cpu.WORKLOADS["mixed"]
    prompts = bench_cpu.prompts_of(work)
    assert prompts == bench_cpu.prompts_of(work) and len(prompts) == 64
    lengths = [len(prompt.split()) for prompt in prompts]
    assert min(lengths) >= 16 and max(lengths) <= 120 and len(set(lengths)) > 30


def test_labels_share_words_that_are_new_in_every_run() -> None:
    work = bench_cpu.WORKLOADS["label-64-200"]
    runs = [[prompt.split() for prompt in bench_cpu.prompts_of(work, run)] for run in (1, 2)]
    for prompts in runs:
        assert len(prompts) == 64 and all(prompt[:200] == prompts[0][:200] for prompt in prompts)
        assert {len(prompt) for prompt in prompts} <= set(range(220, 261))
    assert runs[0][0][:200] != runs[1][0][:200]


@pytest.mark.parametrize("engine", ["nanovllm", "transformers"])
def test_it_measures(
    engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench_cpu.WORKLOADS, "mixed", bench_cpu.Work(5, 2, 4, 6, shared=3))
    options = ["--option", "dtype=float32"]
    bench_cpu.main([engine, str(demo_model_path()), "--only", "mixed", "--runs", "2", *options])
    printed = capsys.readouterr().out
    assert "start of the engine" in printed
    assert re.search(r"^mixed  \d+\.\d / \d+\.\d tokens/s$", printed, re.M)


def test_options_are_numbers_or_words() -> None:
    assert bench_cpu.option("max_num_seqs=4") == ("max_num_seqs", 4)
    assert bench_cpu.option("quantization=int8") == ("quantization", "int8")
