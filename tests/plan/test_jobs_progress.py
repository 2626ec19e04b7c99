"""The progress of a job: its line in a terminal, a notebook and a file, and the time that is left."""

from __future__ import annotations

import random
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nanovllm.batch import StepKind
from nanovllm.jobs.formats import open_source
from nanovllm.jobs.main import main
from nanovllm.jobs.progress import JobProgress
from nanovllm.jobs.remaining import Remaining, Speed, Work
from nanovllm.outputs import CompletionOutput, RequestOutput


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def answer_of(tokens: int) -> RequestOutput:
    completion = CompletionOutput(0, "a", [5] * tokens, finish_reason="stop")
    return RequestOutput("0", "a", [1, 2], None, [completion])


def test_progress(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 100)
    source = open_source(path, "auto")
    source.position = source.size // 2
    now = 0.0
    plain, terminal = StringIO(), Terminal()
    shows = [JobProgress(source, 10, 1, stream, lambda: now) for stream in (plain, terminal)]
    for second in range(1, 21):
        now = float(second)
        for progress in shows:
            progress.rows_read = 50
            progress.answered(answer_of(30), Work(2, 64))
            progress.written(is_error=second == 20)
    for progress in shows:
        progress.close()
    first, second_line = plain.getvalue().splitlines()
    assert first == "20 rows (20%), 1.00 rows/s, 0.00 tok/s read, 30.0 written, 0:01:20 left, 1 error, KV 0%"
    assert (
        second_line
        == "30 rows (30%), 1.00 rows/s, 0.00 tok/s read, 30.0 written, 0:01:10 left, 2 errors, KV 0%"
    )
    now += 1
    terminal.write = Mock(side_effect=BrokenPipeError)  # type: ignore[method-assign]
    shows[1].show()
    shows[1].close()
    assert terminal.write.call_count == 2
    assert terminal.getvalue().count("\r\x1b[K") == 21 and "\n" not in terminal.getvalue()


def test_in_a_notebook_the_line_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is redrawn, without codes for a terminal."""
    monkeypatch.setattr("nanovllm.jobs.progress.in_notebook", lambda: True)
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n' * 9)
    now, shown = 0.0, StringIO()
    progress = JobProgress(open_source(tmp_path / "rows.jsonl", "auto"), 0, 0, shown, lambda: now)
    for second in range(1, 4):
        now = float(second)
        progress.written(is_error=False)
    progress.close()
    first, *lines, last, end = shown.getvalue().split("\r")
    assert first == end == "" and last.isspace() and len(lines) == 3
    assert [line[:7] for line in lines] == ["1 rows ", "2 rows ", "3 rows "]
    assert {len(line) for line in [*lines, last]} == {100} and "\x1b" not in shown.getvalue()


def test_check_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file every ten seconds; in a terminal always, and the line is removed at last."""
    monkeypatch.setenv("COLUMNS", "300")
    rows = b"".join(b'{"prompt": "a"}\n' if number % 4 else b"{\n" for number in range(2000))
    (tmp_path / "rows.jsonl").write_bytes(rows)
    seconds = iter(range(10**6))
    monkeypatch.setattr("nanovllm.jobs.check.perf_counter", lambda: 5 * next(seconds))
    for shown in (StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", shown)
        assert main(["check", str(tmp_path / "rows.jsonl")]) == 1
        text = shown.getvalue()
        assert "rows.jsonl: 26% read, 512 rows, 64 bad" in text
        assert text.endswith("\r\x1b[K") == shown.isatty() and text.count("% read") == (
            8 if shown.isatty() else 4
        )


# -- the time that is left ---------------------------------------------------------------------------------


class Row(Work):
    """A row of a simulated job, and what its answer takes."""

    tokens: tuple[int, int]  # of prompt and answer


def make_row(size: int, most: int | None, drawn: int) -> Row:
    made = Row(size / 4, most)
    made.tokens = (size // 5, drawn)
    return made


class Simulation:
    """An engine of `slots` sequences with its own clock. cost: the seconds of a step of n sequences."""

    def __init__(self, rows: list[Row], slots: int, cost: Callable[[int], float], window: int) -> None:
        self.now = 0.0
        self.rows, self.slots, self.cost, self.window = rows, slots, cost, window
        source: Any = SimpleNamespace(num_rows=None, length=9 * len(rows), position=0)
        self.source = source
        self.progress = JobProgress(source, 0, 0, StringIO(), lambda: self.now)
        self.seen: list[tuple[float, float | None]] = []  # times, and the seconds that were left

    def run(self) -> None:
        waiting, running = iter(self.rows), dict[int, int]()
        held: list[tuple[int, Row]] = []
        number = 0
        while True:
            while len(held) < self.window and (read := next(waiting, None)) is not None:
                self.progress.rows_read = self.progress.rows_taken = number + 1
                self.source.position = 9 * (number + 1)
                self.progress.asked(read)
                held.append((number, read))
                number += 1
            admitted, size = [], 0
            while held and len(running) + len(admitted) < self.slots and size < 8192:
                admitted.append(held.pop(0))
                size += admitted[-1][1].tokens[0]
            if admitted:
                new = sum(row.tokens[0] for _, row in admitted)
                running |= {index: row.tokens[1] for index, row in admitted}
                self.step(StepKind.PREFILL, 0.002 + 2e-4 * new, len(admitted), len(running), new)
                running = {i: left - (i in dict(admitted)) for i, left in running.items()}
            elif running:
                self.step(StepKind.DECODE, self.cost(len(running)), len(running), len(running), len(running))
                running = {index: left - 1 for index, left in running.items()}
            else:
                return
            for index in [index for index, left in running.items() if left <= 0]:
                del running[index]
                prompt, drawn = self.rows[index].tokens
                completion = CompletionOutput(0, "a", [5] * drawn, finish_reason="stop")
                output = RequestOutput("0", "a", [1] * prompt, None, [completion])
                self.progress.answered(output, self.rows[index])
                self.progress.written(is_error=False)

    def step(self, kind: StepKind, seconds: float, drawn: int, running: int, new: int) -> None:
        self.now += seconds
        names = {"seconds": seconds, "num_drawn_tokens": drawn, "num_running": running, "num_new_tokens": new}
        stats: Any = SimpleNamespace(kind=kind, num_cached_tokens=0, kv_cache_usage=0.5, **names)
        self.progress.step(stats)
        self.seen.append((self.now, self.progress.seconds_left()))

    def error(self, share: float) -> float:
        """How far off the estimate was, after a share of the time."""
        total = self.now
        now, left = next((now, left) for now, left in self.seen if now >= share * total and left is not None)
        assert now <= 1.5 * share * total
        return abs(left - (total - now)) / (total - now)


ROWS = {
    "long answers": [make_row(100, 20, 20)] * 100 + [make_row(100, 1000, 1000)] * 100,
    "long answers that stop early": [make_row(100, 26, 20)] * 100 + [make_row(100, 1300, 1000)] * 100,
    "long prompts": [make_row(100, 50, 50)] * 100 + [make_row(25_000, 50, 50)] * 100,
}
COSTS = {"like a GPU": lambda rows: 0.02, "like a CPU": lambda rows: 0.002 * rows}


@pytest.mark.parametrize("slots", [4, 32, 256])
@pytest.mark.parametrize("order", ["short first", "long first", "mixed"])
@pytest.mark.parametrize("kind", ROWS)
def test_after_a_tenth_of_the_time_the_rest_is_known(kind: str, order: str, slots: int) -> None:
    """100 short and 100 long rows."""
    rows = ROWS[kind][:: -1 if order == "long first" else 1]
    if order == "mixed":
        rows = random.Random(0).sample(rows, len(rows))
    for cost in COSTS.values():
        simulation = Simulation(rows, slots, cost, 8192)
        simulation.run()
        assert simulation.error(0.1) < 0.4 and simulation.error(0.25) < 0.5


def test_answers_without_a_limit_are_as_long_as_those_before() -> None:
    """Before the first answer nothing is said."""
    rows = [make_row(100, None, 50)] * 100 + [make_row(25_000, None, 50)] * 100
    simulation = Simulation(random.Random(0).sample(rows, 200), 4, COSTS["like a GPU"], 8192)
    simulation.run()
    assert simulation.seen[10][1] is None
    assert max(simulation.error(share) for share in (0.1, 0.25, 0.5, 0.75)) < 0.4


def test_rows_that_were_not_read_count_too() -> None:
    rows = random.Random(0).sample(ROWS["long answers"], 200) * 5
    simulation = Simulation(rows, 16, COSTS["like a GPU"], 100)
    simulation.run()
    assert max(simulation.error(share) for share in (0.1, 0.25)) < 0.4


def test_short_answers_have_a_time_left_from_the_first_step_on() -> None:
    """Reading is the work, and the template's tokens, which no row shows, are counted."""
    rows = [make_row(100, 1, 1) for _ in range(200)]
    for row in rows:
        row.tokens = 90, 1  # with the template; the row itself has 25
    simulation = Simulation(rows, 1024, COSTS["like a CPU"], 8192)
    simulation.progress.counted(sum(row.size for row in rows[:16]), 16 * 90)
    simulation.run()
    total = simulation.now
    now, left = simulation.seen[0]
    assert now < total / 2 and left == pytest.approx(total - now, rel=0.1)


def test_long_answers_have_none_before_the_first_is_written() -> None:
    """The cost of a written token is unknown then, and matters."""
    simulation = Simulation([make_row(100, 50, 50)] * 100, 100, COSTS["like a CPU"], 8192)
    simulation.run()
    assert simulation.seen[0][1] is None and simulation.seen[5][1] is not None


@pytest.mark.parametrize("num_planned", [16, 64, 200])
def test_rows_that_are_not_planned_ask_for_as_much_more_as_those_that_are(num_planned: int) -> None:
    """Each row turns out to read its prompt twice, as choices of two tokens do."""
    remaining, row, twice = Remaining(), Work(25.0, 1), Work(50.0, 2)
    for _ in range(200):
        remaining.ask(row)
    remaining.count(16 * 25.0, 16 * 90)
    for _ in range(num_planned):
        remaining.plan(row, twice)
    for _ in range(8):
        remaining.end(twice, 180, 2)
    now = Speed(8.0, 8, read=16 * 90, drawn=16, prefill=8.0)
    left = remaining.seconds(now, Speed(0.0), 0.0, 0.0, 0)
    assert left == pytest.approx(192.0, rel=0.05), "a second a row"
    remaining.refuse(twice)
    fewer = remaining.seconds(now, Speed(0.0), 0.0, 0.0, 0)
    assert fewer is not None and fewer < left
