"""Programs that run the engine without a device: steps of an order, and text beside a device that waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import inside_kinds
import pytest

from tools import bench_order, bench_text


@pytest.fixture(autouse=True)
def tokens_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs change them for their process."""
    inside_kinds.keep_tokens_of_a_step(monkeypatch)


@pytest.mark.parametrize("job", [[], ["--job"]], ids=["generate", "job"])
def test_an_order(
    job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With known lengths the steps are few more than the work of full slots."""
    command = ["order", "--rows", "120", "--max-num-seqs", "8", "--cache", "65536", *job]
    monkeypatch.setattr(sys, "argv", command)
    bench_order.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["work"] < found["steps"] < 1.15 * found["work"]
    assert found["tail"] < 0.1 * found["steps"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux alone")
@pytest.mark.parametrize("job", [[], ["--job"]], ids=["generate", "job"])
def test_text_beside_a_device(
    job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six groups of 32 rows end after 6 tokens each, whose first ones come with the prompts."""
    command = ["text", "--prompts", "192", "--tokens-out", "6", "--max-num-seqs", "32", "--step", "0.0001"]
    monkeypatch.setattr(sys, "argv", [*command, "--launch", "0.0001", *job])
    bench_text.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["prompts"] == 192 and found["of prompts"] >= 6
    assert found["steps"] - found["of prompts"] >= 30
