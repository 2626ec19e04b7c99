"""The report of a job that was resumed covers the whole job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import run, write_rows
from report_pages import SVG, named, parse, pictures, rows, words

from nanovllm import LLM, demo_model_path
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.output import Output
from nanovllm.jobs.progress import MAX_POINTS, History
from nanovllm.stats.summary import TimelinePoint, coarser

SAMPLING = "temperature=0,max_tokens=8"


class Stopped:
    """Creates engines, of which those before the last are interrupted after some answers."""

    def __init__(self, *stops: int, how: Callable[[], None]) -> None:
        self._stops = [*stops]
        self._how = how

    def __call__(self, *args: Any, **options: Any) -> Any:
        llm = LLM(*args, **options)
        if self._stops:
            stream, stop = llm.stream, self._stops.pop(0)

            def stopping(*args: Any, **options: Any) -> Iterator[Any]:
                for number, output in enumerate(stream(*args, **options)):
                    if number == stop:
                        self._how()
                    yield output

            llm.stream = stopping
        return llm


def interrupt() -> None:
    raise KeyboardInterrupt


def page_of(path: Path) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """The totals, the facts and the pictures."""
    page = parse(path.read_text())
    return rows(page, "totals"), rows(page, "about"), pictures(page)


@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_the_report_of_a_resumed_job_has_the_totals_of_an_unbroken_one(tmp_path: Path, kind: str) -> None:
    prompts = [f"What is {index} + 3?" if index % 6 else "" for index in range(30)]
    lines: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    if kind == "openai":
        lines = [
            {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": prompt}} for prompt in prompts
        ]
        lines += [{"custom_id": "e", "url": "/v1/embeddings", "body": {"input": ["a b", "c"]}}]
    source = write_rows(tmp_path / "in.jsonl", lines)
    whole, broken = tmp_path / "whole.html", tmp_path / "broken.html"
    argv = ["--sampling", SAMPLING, "--device", "cpu", "--max-num-seqs", 4, "--num-kvcache-blocks", 99]
    assert run(source, "-o", tmp_path / "whole.jsonl", *argv, "--report", whole, make_llm=LLM) == 1
    stopped = Stopped(7, 5, how=interrupt)
    out = tmp_path / "broken.jsonl"
    assert run(source, "-o", out, *argv, make_llm=stopped) == 130  # without a report
    assert run(source, "-o", out, *argv, "--report", broken, make_llm=stopped) == 130
    assert run(source, "-o", out, *argv, "--report", broken, make_llm=stopped) == 1
    totals, about, charts = page_of(broken)
    expected, unbroken, _ = page_of(whole)
    for name in ("Requests", "Requests finished", "Requests unfinished", "Prompt tokens", "Output tokens"):
        assert totals[name] == expected[name], name
    assert about["Error rows"] == unbroken["Error rows"] == "5" and "Resumed" not in unbroken
    tables = [
        words(page.find(".//table[@class='errors']"))
        for page in map(parse, [p.read_text() for p in (broken, whole)])
    ]
    assert tables[0] == tables[1]
    pages = [
        path.read_text().partition("<h2>Answers</h2>")[2].partition("<h2>Over") for path in (broken, whole)
    ]
    assert pages[0][0] == pages[1][0] and "Longest answers" in pages[0][0], "samples and lengths of all runs"
    parameters = rows(parse(broken.read_text()), "parameters")
    assert parameters["temperature"] == "0.0" and parameters["max_tokens"] == "8"
    # A line for each resumption, within the time of the runs.
    assert about["Resumed"].count(" s") == 2
    for title, chart in charts.items():
        marks = [each for each in chart.iter(f"{SVG}path") if each.get("class") == "mark"]
        assert len(marks) == (0 if "lengths" in title else 2), named(chart, "title")
    assert int(totals["Prompt tokens computed"].replace(",", "")) > 0


def whole_numbers(totals: dict[str, str]) -> list[int]:
    """Requests, those finished and those unfinished."""
    names = ("Requests", "Requests finished", "Requests unfinished")
    return [int(totals[name].replace(",", "")) for name in names]


@pytest.mark.parametrize("kind", ["n", "choices", "embeddings", "long"])
def test_the_report_of_a_broken_job_counts_rows(tmp_path: Path, kind: str) -> None:
    """A row takes several answers, several requests one after the other, or several at once; and an input of
    which only the first rows were read."""
    number = 200 if kind == "long" else 9
    lines: list[dict[str, Any]] = [{"prompt": f"What is {index} + 3?"} for index in range(number)]
    more: tuple[Any, ...] = ("--sampling", "temperature=1,n=3,max_tokens=4", "--window", 16)
    if kind == "choices":
        more = ("--choice", "4,12 or more")
    elif kind == "embeddings":
        kinds = [("completions", each | {"n": 2, "max_tokens": 4}) for each in lines[:6]]
        kinds = [("embeddings", {"input": ["a b", "c"]})] * 3 + kinds
        lines = [{"custom_id": "r", "url": f"/v1/{name}", "body": body} for name, body in kinds]
        more = ("--ordered",)
    source, page, out = write_rows(tmp_path / "in.jsonl", lines), tmp_path / "r.html", tmp_path / "out.jsonl"
    argv = (source, "-o", out, *more, "--device", "cpu", "--max-num-seqs", 2)
    argv += ("--num-kvcache-blocks", 99, "--report", page)
    stopped = Stopped(2 if kind == "embeddings" else 5, 1, how=interrupt)  # leaves rows for two more runs
    for resumed in (False, True):
        assert run(*argv, make_llm=stopped) == 130
        totals, about, _ = page_of(page)
        done = len(out.read_text().splitlines())
        finished = f"{done} finished, 0 of them with an error"
        left = f"9: {finished}; {9 - done} unfinished"
        if kind == "long":
            left = f"{finished}; at least # unfinished: the input was not read to its end"
        assert re.sub(r"at least \d+", "at least #", about["Rows"]) == left
        requests = whole_numbers(totals)
        assert requests[0] == requests[1] + requests[2]
        if kind == "choices":  # a request is a row
            assert requests == [9, done, 9 - done] and about["Requests"].startswith("a request is a row")
        if resumed and kind != "embeddings":
            assert requests[1] == done
        assert ("Requests" in about) == (kind == "choices")
    assert done > 0 or kind == "choices"


def test_a_run_without_a_last_word_leaves_what_was_saved(tmp_path: Path) -> None:
    """As after `kill -9`: no end is noted. Time, steps and the timeline add up."""
    path, now = tmp_path / "out.jsonl", 0.0
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=99, max_num_seqs=4) as llm:
        llm.generate(["What is 1 + 2?"] * 3, use_tqdm=False)
        stats = llm.stats()
    journal = Journal(path, path)
    journal.begin({name: {} for name in ("input", "model", "options", "sampling", "prompt", "format")})
    output = Output(path, range(9))
    history = History(journal, output, clock=lambda: now)
    assert history.marks == [] and history.whole(stats) is stats
    history.save_when_due(lambda: stats)
    assert "statistics" not in journal.state
    now = 31.0
    output.write(0, {"index": 0, "prompt_tokens": 4, "completion_tokens": 7, "error": None})
    history.save_when_due(lambda: stats)
    output.close()
    journal.state = json.loads(journal.path.read_text())
    output = Output(path, range(9))
    found = History(journal, output)
    assert found.marks == [pytest.approx(stats.uptime)]
    whole = found.whole(stats)
    assert (
        whole.uptime == pytest.approx(2 * stats.uptime)
        and whole.num_decode_steps == 2 * stats.num_decode_steps
    )
    assert (whole.num_finished_requests, whole.num_prompt_tokens, whole.num_output_tokens) == (1, 4, 7)
    assert whole.points[: len(stats.points)] == stats.points and len(whole.points) == 2 * len(stats.points)
    assert whole.points[-1].time == pytest.approx(stats.points[-1].time + stats.uptime)
    long = replace(stats, points=tuple(replace(stats.points[0], time=each / 10) for each in range(5000)))
    found.save(long)
    assert len(journal.state["statistics"]["stats"]["points"]) <= MAX_POINTS
    journal.state["statistics"]["stats"]["other"] = 1  # of another version
    assert History(journal, output).whole(stats).uptime == stats.uptime
    output.close()


def test_coarser_timelines_keep_sums_and_means() -> None:
    def point(time: float, steps: int, seconds: float, rate: float) -> TimelinePoint:
        values = {
            "time": time,
            "num_steps": steps,
            "seconds": seconds,
            "output_tokens_per_s": rate,
            "batch_size": rate,
        }
        rest = [each for each in TimelinePoint.__dataclass_fields__ if each not in values]
        return TimelinePoint(**values | dict.fromkeys(rest, 3))  # type: ignore[arg-type]

    one, two = coarser([point(0.0, 1, 2.0, 10.0), point(0.1, 3, 6.0, 30.0), point(0.2, 1, 1.0, 1.0)], 0.2)
    assert (one.time, one.num_steps, one.seconds, one.num_cached_tokens) == (0.0, 4, 8.0, 6)
    assert one.output_tokens_per_s == 25.0 and one.batch_size == 25.0 and two.time == 0.2
