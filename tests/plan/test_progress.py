"""The progress of `generate` as shown: bars that fit, lines in a file, silence, and a caller's own class."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import sys
import termios
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import inside
import pytest

from nanovllm.batch import StepKind
from nanovllm.engine.stats import StepStats, progress_of
from nanovllm.stats import progress
from nanovllm.stats.progress import ShownProgress
from nanovllm.stats.summary import short


def stats(num_tokens: int, decode: bool, seconds: float, num_finished: int) -> StepStats:
    """The stats of a step that computed or, in decode, drew this many tokens."""
    kind = StepKind.DECODE if decode else StepKind.PREFILL
    drawn = num_tokens if decode else 1
    return StepStats(kind, 1, num_tokens, num_tokens, seconds, drawn, 0, num_finished, 1, 0, 0.5)


class Terminal(io.StringIO):
    """A pseudo-terminal of a given width that keeps what is written."""

    def __init__(self, columns: int = 80) -> None:
        super().__init__()
        self._ends = os.openpty()
        fcntl.ioctl(self.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def close(self) -> None:
        for end in self._ends:
            os.close(end)
        super().close()

    def fileno(self) -> int:
        return self._ends[1]

    def isatty(self) -> bool:
        return True

    def drawn(self) -> list[str]:
        """Each state of the bar."""
        return [text for text in re.split(r"[\r\n]", self.getvalue()) if text.strip()]


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


Stream = TypeVar("Stream", bound=io.StringIO)


class Shown:
    """Captures stderr from the call of `to` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TQDM_DISABLE", raising=False)
        self._monkeypatch = monkeypatch

    def to(self, stream: Stream) -> Stream:
        """Call it in the test itself: pytest replaces stderr while fixtures run."""
        self._monkeypatch.setattr(sys, "stderr", stream)
        return stream


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch)


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
@pytest.mark.parametrize("total", [2, 64, 10_000, 1_000_000])
def test_a_bar_fits_its_terminal_and_cuts_no_number(total: int, columns: int, stderr: Shown) -> None:
    """A million requests with rates of 123,456 tokens/s and more, also after 23 hours."""
    terminal = stderr.to(Terminal(columns))
    clock = Clock()
    with ShownProgress(total, True, clock) as bar:
        inside.display(bar).start_t -= 84_225
        for _ in range(3):
            clock.now += 1
            inside.display(bar).last_print_t -= 1  # so that each update is drawn
            bar.update(stats(123_456, False, 1.0, 0))
            clock.now += 1
            inside.display(bar).last_print_t -= 1
            bar.update(stats(1_234_567, True, 1.0, total // 3))
    drawn = terminal.drawn()
    assert len(drawn) >= 6
    assert max(map(len, drawn)) <= columns
    for text in drawn:
        assert re.match(r"( *\d+%)?\|[^|]{4,}\| \d+/\d+", text)
        if columns >= 60 and "in" in text:
            assert re.search(r"<([\d:]+|\?), in 123k(, out 1.23M)? tok/s\]?$", text)
    if columns >= 60:
        assert "out 1.23M tok/s" in drawn[-1]
    if columns >= 80:
        assert "[23:23:4" in drawn[-1] and drawn[-1].endswith("tok/s]")


def test_one_prompt_none_and_false_show_nothing(stderr: Shown) -> None:
    terminal = stderr.to(Terminal())
    for total, use_tqdm in ((1, True), (0, True), (2, False)):
        with progress_of(total, use_tqdm) as shown:
            shown.update(stats(1, True, 1.0, total))
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("use_tqdm", ["yes", None, 1])
def test_another_value_is_refused(use_tqdm: Any) -> None:
    with pytest.raises(TypeError, match=f"use_tqdm must be True, False or a class .*, not {use_tqdm!r}"):
        progress_of(2, use_tqdm)


# -- without a terminal ------------------------------------------------------------------------------------


def test_a_file_gets_a_line_every_ten_seconds_and_a_last_one(stderr: Shown) -> None:
    file = stderr.to(io.StringIO())
    clock = Clock()
    with ShownProgress(1200, True, clock) as lines:
        clock.now += 2
        lines.update(stats(20_000, False, 2.0, 0))
        for _ in range(12):
            clock.now += 2
            lines.update(stats(500, True, 2.0, 100))
    assert file.getvalue().splitlines() == [
        "Generating: 400 of 1,200 requests after 10 s, in 10.0k, out 250 tok/s",
        "Generating: 900 of 1,200 requests after 20 s, in 10.0k, out 250 tok/s",
        "Generating: 1,200 of 1,200 requests after 26 s, in 10.0k, out 250 tok/s",
    ]
    assert "\r" not in file.getvalue()


def test_a_file_gets_one_line_of_a_long_step_and_none_of_a_short_run(stderr: Shown) -> None:
    file = stderr.to(io.StringIO())
    clock = Clock()
    for seconds in (9.9, 30):
        with ShownProgress(3, True, clock) as lines:
            clock.now += seconds
            lines.update(stats(300, True, seconds, 3))
    assert file.getvalue() == "Generating: 3 of 3 requests after 30 s, out 10.0 tok/s\n"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_nothing_is_shown_where_tqdm_is_disabled(
    kind: type[io.StringIO], stderr: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = stderr.to(kind())
    monkeypatch.setenv("TQDM_DISABLE", "1")
    clock = Clock()
    with ShownProgress(3, True, clock):
        clock.now += 30
    assert shown.getvalue() == ""


# -- a caller's own class ----------------------------------------------------------------------------------


class Own:
    """The minimum that a tqdm-like class must have."""

    made: ClassVar[list[Own]] = []

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.desc = total, desc
        self.calls: list[Any] = []
        self.made.append(self)

    def update(self, n: int) -> None:
        self.calls.append(n)

    def close(self) -> None:
        self.calls.append("closed")


class OwnWithRates(Own):
    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.calls.append(text)


@pytest.mark.parametrize("total", [1, 3])
def test_a_class_like_tqdm_is_used_as_it_is(total: int, stderr: Shown) -> None:
    file = stderr.to(io.StringIO())
    for own, rates in ((Own, []), (OwnWithRates, ["in 8.00 tok/s"])):
        clock = Clock()
        shown = ShownProgress(total, own, clock)
        own.made.clear()
        with shown:
            clock.now += 0.5
            shown.update(stats(4, False, 0.5, total))
        [bar] = own.made
        assert (bar.total, bar.desc) == (total, "Generating")
        assert bar.calls == [*rates, total, "closed"]
    assert file.getvalue() == ""


# -- a notebook --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_gets_one_line_of_text_with_and_without_widgets(
    widgets: bool, stderr: Shown, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A page that shows the notebook without its kernel has no state of widgets.

    tests/cpu/report/test_notebook.py covers the line in a real kernel.
    """
    file = stderr.to(io.StringIO())
    from tqdm import notebook

    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setattr(notebook, "IProgress", object if widgets else None)
    with ShownProgress(2, True) as shown:
        shown.update(stats(5, False, 1.0, 2))
    assert not len(recwarn)
    last = file.getvalue().rpartition("\r")[2]
    assert last.startswith("100%|") and "| 2/2 [" in last and len(last) <= 81
    assert file.getvalue().count("\n") == 1 and last.endswith("\n")


def test_a_terminal_of_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(config={"TerminalIPythonApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not progress.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not progress.in_notebook()


def test_rates_are_short() -> None:
    rates = (0.1234, 7.53, 99.96, 999.4, 999.6, 4_567, 30_000, 123_456, 999_600, 1.234e6, 5e9)
    shown = ["0.123", "7.53", "100", "999", "1.00k", "4.57k", "30.0k", "123k", "1.00M", "1.23M", "5G"]
    assert [short(rate) for rate in rates] == shown
