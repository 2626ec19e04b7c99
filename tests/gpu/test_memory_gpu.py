"""Engines that share a GPU: each takes its share, whatever others hold, also if they start together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import inside
import pytest
import torch

from nanovllm import LLM, SamplingParams
from tools.benchmark.shapes import write_shape

pytestmark = pytest.mark.gpu

# An engine in its own process: it says what it took, and waits for a line before it answers and ends.
ENGINE = """
import sys
from nanovllm import LLM, SamplingParams
llm = LLM({model!r}, load_format="dummy", skip_tokenizer_init=True, enforce_eager={eager}, **{options!r})
print("taken", {taken}, flush=True)
sys.stdin.readline()
outputs = llm.generate([[5] * 300] * 8, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
assert all(len(output["token_ids"]) == 20 for output in outputs)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("qwen3-0.6b", tmp_path_factory.mktemp("model"))


def start(model: Path, share: float, eager: bool = False) -> subprocess.Popen[str]:
    values = {"options": {"gpu_memory_utilization": share}, "taken": inside.KV_CACHE_BYTES}
    code = ENGINE.format(model=str(model), eager=eager, **values)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)


def taken(engine: subprocess.Popen[str]) -> int:
    """Wait until the engine has started; return the bytes of its KV cache."""
    assert engine.stdout is not None and engine.stderr is not None
    for line in engine.stdout:
        if line.startswith("taken"):
            return int(line.split()[1])
    raise AssertionError(engine.stderr.read())


def finish(engines: list[subprocess.Popen[str]]) -> list[str]:
    """Let all engines answer at the same time and end; return what they wrote to standard error."""
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("\n")
        engine.stdin.flush()
    said = [engine.communicate(timeout=300)[1] for engine in engines]
    assert [engine.returncode for engine in engines] == [0] * len(engines), said
    return said


@pytest.mark.parametrize(("share", "count"), [(0.45, 2), (0.16, 5)])
@pytest.mark.parametrize("together", [True, False], ids=["together", "one_by_one"])
def test_engines_take_their_shares_in_any_order(
    model: Path, share: float, count: int, together: bool
) -> None:
    """Each takes about as much as the first, also if they start at the same moment."""
    engines: list[subprocess.Popen[str]] = []
    sizes = []
    try:
        for _ in range(count):
            engines.append(start(model, share, eager=count > 2))
            if not together:
                sizes.append(taken(engines[-1]))
        sizes = sizes or [taken(engine) for engine in engines]
        total = torch.cuda.mem_get_info()[1]
        assert min(sizes) == max(sizes) < share * total
        assert "GiB smaller than" not in "".join(finish(engines))
    finally:
        for engine in engines:
            engine.kill()


def test_a_large_share_beside_another_program_is_what_is_free(model: Path) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    other = torch.empty(int(free - 0.4 * total), dtype=torch.uint8, device="cuda")
    engine = start(model, 0.9)
    try:
        size = taken(engine)
        assert 0.1 * total < size < 0.4 * total
        [said] = finish([engine])
        assert "GiB smaller than gpu_memory_utilization=0.9 allows" in said
    finally:
        engine.kill()
        del other
        torch.cuda.empty_cache()


def test_two_large_shares_at_the_same_moment(model: Path) -> None:
    """One of them takes what is free, and the other one what that leaves, or has a clear error."""
    engines = [start(model, 0.9) for _ in range(2)]
    started, errors = [], []
    try:
        for engine in engines:
            try:
                taken(engine)
                started.append(engine)
            except AssertionError as error:
                errors.append(str(error).splitlines()[-1])
        assert started, errors
        assert all("KVCacheMemoryError" in error for error in errors), errors
        finish(started)
    finally:
        for engine in engines:
            engine.kill()


def test_two_engines_of_one_process(model: Path) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.45}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(model, **options) as first, LLM(model, **options) as second:
        sizes = [inside.runner(llm).kv_cache.nbytes for llm in (first, second)]
        assert max(sizes) < 1.01 * min(sizes)
        for llm in (first, second):
            outputs = llm.generate([[5] * 300] * 8, params, use_tqdm=False)
            assert all(len(output["token_ids"]) == 20 for output in outputs)
