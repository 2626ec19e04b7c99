"""A job of labels as a process that SIGKILL ends: what is written stays, and totals are those of all rows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Lent, read_rows, run, write_rows
from killed_jobs import SLOW_STEPS
from report_pages import parse, rows, words

from nanovllm import LLM, demo_model_path

COUNT = 250
ASKED = ["--chat", "--template", "Is {number} even or odd?"]
CHOICES = ["--choice", "odd,even,neither of them"]  # of several tokens: a row takes several requests


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), dtype="float32", device="cpu") as llm:
        yield llm


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, of which a process may be writing the last one."""
    found = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in found]


def kill_after_first_rows(command: list[str], out: Path) -> int:
    """Run a job until its output has rows, and end it by SIGKILL; return their number."""
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            while not lines_of(out):
                assert process.poll() is None, process.stderr and process.stderr.read().decode()
                time.sleep(0.002)
            seen = len(lines_of(out))
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL, "it was not done yet"
    return seen


def totals_of(page: Path) -> dict[str, str]:
    found = rows(parse(page.read_text()), "totals")
    return {name: found[name] for name in ("Requests", "Requests finished", "Prompt tokens", "Output tokens")}


def test_a_kill_leaves_the_first_rows_and_the_resumed_job_is_as_one_without(tmp_path: Path, llm: LLM) -> None:
    """With the settings that a user has: 16 prompts at first, on a CPU."""
    source = write_rows(
        tmp_path / "rows.jsonl", [{"id": number, "number": number} for number in range(COUNT)]
    )
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    pages = [tmp_path / "whole.html", tmp_path / "out.html"]
    assert run(source, "-o", whole, *ASKED, *CHOICES, "--report", pages[0], make_llm=Lent(llm)) == 0

    flags = [*ASKED, *CHOICES, "--dtype", "float32", "--device", "cpu"]
    options = ["--model", demo_model_path(), *flags]
    slow = SLOW_STEPS.format(quick=2, seconds=0.5)
    seen = kill_after_first_rows(
        [sys.executable, "-c", slow, "run", str(source), "-o", str(out), *options], out
    )
    left = lines_of(out)
    assert 0 < seen <= len(left) < COUNT / 2, "the first rows came early"
    expected = {row["index"]: row for row in read_rows(whole)}
    assert all(row["text"] == expected[row["index"]]["text"] for row in left)

    flags += ["--report", str(pages[1])]
    assert run(source, "-o", out, *flags, make_llm=Lent(llm)) == 0
    found = read_rows(out)
    assert [row["index"] for row in found] == [*range(COUNT)]
    for row in found:
        scores, other = row.pop("choice_scores"), expected[row["index"]].pop("choice_scores")
        logs, others = row.pop("choice_logprobs"), expected[row["index"]].pop("choice_logprobs")
        assert scores == pytest.approx(other, abs=1e-4) and logs == pytest.approx(others, abs=1e-3)
        assert row == expected[row["index"]]

    assert totals_of(pages[0]) == totals_of(pages[1])
    totals = totals_of(pages[1])
    assert totals["Requests"] == totals["Requests finished"] == f"{COUNT:,}", "rows, not what they take"
    assert totals["Output tokens"] == f"{sum(row['completion_tokens'] for row in found):,}"
    assert totals["Prompt tokens"] == f"{sum(row['prompt_tokens'] for row in found):,}"
    counts = Counter(row["text"] for row in found)
    for page in map(parse, (each.read_text() for each in pages)):
        bars = [words(each) for each in page.findall(".//table[@class='bars']")]
        assert any(
            f"even {counts['even']:,} " in each and "neither of them 0 (0.0%)" in each for each in bars
        )
