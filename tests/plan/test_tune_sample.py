"""The sample of `nanovllm tune`: which rows it has, and the job that runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import write_rows

from nanovllm import demo_model_path
from nanovllm.jobs.main import parse_args
from nanovllm.tune.sample import MOST_ROWS, job_arguments, write_sample


def test_the_sample_is_the_same_each_time_and_from_all_of_the_input(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{number}"} for number in range(2 * MOST_ROWS)])
    args = parse_args(["tune", demo_model_path(), str(rows)])
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    assert [write_sample(args, path) for path in paths] == [(MOST_ROWS, 2 * MOST_ROWS)] * 2
    assert paths[0].read_bytes() == paths[1].read_bytes()
    found = [int(json.loads(line)["prompt"]) for line in paths[0].read_text().splitlines()]
    assert len(set(found)) == MOST_ROWS
    first = found[:200]  # a smaller sample is the beginning of a larger one
    assert len([each for each in first if each < MOST_ROWS]) == pytest.approx(100, abs=30)
    job = job_arguments(args, paths[0], tmp_path / "out.jsonl")
    assert job["inputs"] == [str(paths[0])] and job["model"] == demo_model_path()
    json.dumps(job)
