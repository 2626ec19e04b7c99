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


@pytest.mark.parametrize("engine", ["nanovllm", "transformers"])
def test_it_measures(
    engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench_cpu.WORKLOADS, "mixed", bench_cpu.Work(5, 2, 4, 6))
    options = ["--option", "dtype=float32"]
    bench_cpu.main([engine, str(demo_model_path()), "--only", "mixed", "--runs", "2", *options])
    printed = capsys.readouterr().out
    assert "start of the engine" in printed
    assert re.search(r"^mixed  \d+\.\d / \d+\.\d tokens/s$", printed, re.M)


def test_options_are_numbers_or_words() -> None:
    assert bench_cpu.option("max_num_seqs=4") == ("max_num_seqs", 4)
    assert bench_cpu.option("quantization=int8") == ("quantization", "int8")
