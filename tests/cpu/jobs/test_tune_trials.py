"""A trial of `nanovllm tune`, in a process of its own: what it measures, and why it fails."""

from __future__ import annotations

from pathlib import Path

from jobs import write_rows

from nanovllm import demo_model_path
from nanovllm.jobs.main import parse_args
from nanovllm.tune.halving import Failed, Measured
from nanovllm.tune.sample import job_arguments, write_sample
from nanovllm.tune.trial import Trials

HANG_SECONDS = 500.0


def trials_of(tmp_path: Path, rows: list[object]) -> Trials:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    args = parse_args(["tune", demo_model_path(), str(source), "--sampling", "temperature=0,max_tokens=4"])
    write_sample(args, tmp_path / "sample.jsonl")
    return Trials(job_arguments(args, tmp_path / "sample.jsonl", tmp_path / "out.jsonl"))


def test_a_trial_counts_rows_and_tokens(tmp_path: Path) -> None:
    """Of the first rows of the sample; another setting needs too much memory, as its reason says."""
    trials = trials_of(tmp_path, [{"prompt": f"What is {number} + 3?"} for number in range(20)])
    found = trials.measure((("max_num_seqs", 4),), 5, HANG_SECONDS)
    assert isinstance(found, Measured)
    assert found.rows == 5 and found.written <= 20 and found.read >= 5 * 8
    assert found.seconds > 0 and found.loading > 0
    refused = trials.measure((("num_kvcache_blocks", 10**9),), 5, HANG_SECONDS)
    assert isinstance(refused, Failed) and "no room for the KV cache" in refused.reason


def test_a_trial_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, [{"prompt": "a"}])
    found = trials.measure((), 1, 0.01)
    assert isinstance(found, Failed) and found.is_late and found.reason == "not done after 0 s"
