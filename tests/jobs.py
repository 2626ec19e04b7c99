"""Helpers for tests of jobs: files of rows, a command in this process, an engine that computes nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm import demo_model_path
from nanovllm.engine.executor import Load
from nanovllm.engine.stats import History
from nanovllm.jobs.errors import REFUSED, JobRefusedError
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.run import run as run_job
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.stats.summary import EngineStats, summary


class FakeLLM:
    """Answers a prompt with its length and its seed, in random order; reads ahead as far as an LLM.

    `sample`: called with the number of each answer.
    """

    tokenizer = None
    model_config = SimpleNamespace(max_model_len=64, head=None)
    config = SimpleNamespace(max_num_seqs=8, data_parallel_size=1)
    on_step: Any = None
    ahead = 64

    def __init__(self, *args: object, **options: object) -> None:
        self.sample: Callable[[int], object] = lambda number: None
        self._rng = random.Random(0)

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0)

    def stream(
        self, prompts: Iterable[dict[str, Any]], params: Iterator[SamplingParams], on_error: str
    ) -> Iterator[RequestOutput]:
        assert on_error == "return"
        held: list[RequestOutput] = []
        number = 0
        for index, prompt in enumerate(prompts):
            held.append(self.answer(index, prompt, next(params)))
            while len(held) > self.ahead:
                self.sample(number)
                number += 1
                yield held.pop(self._rng.randrange(len(held)))
        assert next(params, None) is None
        yield from held

    def answer(self, index: int, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        text = prompt["prompt"]
        error = f"prompts[{index}] is empty; a prompt needs at least one token" if not text else None
        reason = "error" if error else "stop"
        answer = CompletionOutput(0, f"{len(text)} {params.seed}", [1, 2], finish_reason=reason)
        return RequestOutput(index, text, [1], None, [answer], error=error, index=index)

    def stats(self) -> EngineStats:
        return summary(History(), Load(0, 0, 0, 0.0, 0.0))

    def close(self) -> None:
        pass


def watched(watch: Callable[[int], object], ahead: int = FakeLLM.ahead) -> Callable[..., FakeLLM]:
    """A function that creates a FakeLLM, which calls `watch` with the number of each answer."""

    def make(*args: object, **options: object) -> FakeLLM:
        llm = FakeLLM()
        llm.sample, llm.ahead = watch, ahead
        return llm

    return make


class Lent:
    """Gives a job an engine that stays open."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __call__(self, *args: object, **options: object) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def close(self) -> None:
        pass


def no_model(*args: object, **options: object) -> FakeLLM:
    raise AssertionError("a job whose rows are all answered loads no model")


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{index}", "prompt": f"prompt {index}"} for index in range(count)]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON Lines; write bytes unchanged."""
    with path.open("wb") as file:
        for row in rows:
            file.write(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n")
    return path


def run(*argv: object, make_llm: Callable[..., Any] = FakeLLM) -> int:
    """Run `nanovllm run` in this process; return its exit code."""
    args = parse_args(["run", *map(str, argv), "--model", demo_model_path()])
    try:
        return run_job(args, make_llm)
    except JobRefusedError as error:
        print(f"refused: {error}")
        return REFUSED


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
