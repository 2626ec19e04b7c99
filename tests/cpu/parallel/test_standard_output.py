"""Whole programs whose standard output is closed, or whose reader has left: no traceback of this library, and
the exit code says what happened. tests/cpu/jobs/test_jobs.py has `nanovllm check` and `nanovllm run` on one
rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 120  # against hangs
SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams, demo_model_path
if __name__ == "__main__":
    print("the answers:")
    greedy, answers = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), []
    for sizes in ({}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
        options = {"device": "cpu", "load_format": "dummy", "num_kvcache_blocks": 64}
        with LLM(demo_model_path(), **options, **sizes) as llm:
            answers += llm.generate(["a", "b"], greedy, use_tqdm=False)
    print(*[len(answer["token_ids"]) for answer in answers], file=sys.stderr)
"""


def run(argv: list[object], way: str) -> tuple[int, str]:
    """Run Python with a standard output that is closed, or a pipe that nobody reads; return the exit code and
    the standard error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [
                "sh",
                "-c",
                'exec "$0" "$@" >&-' if way == "closed" else 'exec "$0" "$@"',
                sys.executable,
                *argv,
            ],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            timeout=SECONDS,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.full
def test_a_script_with_ranks_and_replicas(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, errors = run([script], "closed")
    assert "Traceback" not in errors and "Error" not in errors, errors
    assert code == 0 and errors.splitlines()[-1] == "2 2 2 2 2 2"


BENCHMARK = """
import runpy
from tools.benchmark import roofline
roofline.device_speed = lambda *place: roofline.Speed(1e15, 1e15)  # measuring it takes seconds
runpy.run_path("bench.py", run_name="__main__")
"""


def test_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sizes = ["--workload", "demo", "--num-seqs", "1", "--device", "cpu", "--repeat", "1"]
    code, errors = run(["-c", BENCHMARK, *sizes], "broken")
    assert code == 141 and "Traceback" not in errors and "Exception" not in errors, errors
