"""How the progress of `generate` is shown: finished requests, and tokens per second of prefill and decode.

Chooses between a bar (in a terminal or notebook), plain lines, and silence. Imports tqdm only for a bar.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from nanovllm.batch import StepKind
from nanovllm.engine.stats import Progress, StepStats
from nanovllm.stats.summary import short

LINE_SECONDS = 10.0  # between plain lines
_NOTEBOOK_COLUMNS = 80  # of a bar in a notebook, which has no width
_NOTEBOOK_SECONDS = 1.0  # between its redraws

# The first layout that fits is used. `postfix` begins with a comma.
_LAYOUTS = (
    "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "|{bar}| {n_fmt}/{total_fmt} <{remaining}{postfix}",
    "|{bar}| {n_fmt}/{total_fmt}",
)
_WIDEST_FIELDS = {
    "percentage": 100,
    "bar": "####",  # at least
    "elapsed": "99:59:59",
    "remaining": "99:59:59",
    "postfix": ", in 1.23M, out 1.23M tok/s",
}


class ShownProgress(Progress):
    """Counts steps and shows them. `use_tqdm` is True, or a tqdm-like class, which is called with `total` and
    `desc`."""

    def __init__(
        self, total: int, use_tqdm: bool | Callable[..., Any], clock: Callable[[], float] = perf_counter
    ) -> None:
        """total: number of requests; clock: returns seconds. Shows nothing before the `with` block begins."""
        self._total = total
        self._use_tqdm = use_tqdm
        self._clock = clock
        self._display: Any = None  # has update(n) and close(), like tqdm
        self._tokens = {"in": 0, "out": 0}
        self._seconds = {"in": 0.0, "out": 0.0}

    def update(self, stats: StepStats) -> None:
        if self._display is None:
            return
        decodes = stats.kind is StepKind.DECODE
        phase = "out" if decodes else "in"
        self._tokens[phase] += stats.num_drawn_tokens if decodes else stats.num_new_tokens
        self._seconds[phase] += stats.seconds
        if callable(self._use_tqdm) and hasattr(self._display, "set_postfix_str"):
            self._display.set_postfix_str(self.rates(), refresh=False)
        self._display.update(stats.num_finished)

    def refused(self, count: int) -> None:
        """Count requests that cannot run as done."""
        if self._display is not None and count:
            self._display.update(count)

    def rates(self) -> str:
        """Prompt tokens per second of prefill and output tokens per second of decode, if there are any."""
        rates = [f"{name} {short(self._tokens[name] / s)}" for name, s in self._seconds.items() if s > 0]
        return ", ".join(rates) + " tok/s" if rates else ""

    def __enter__(self) -> ShownProgress:
        if callable(self._use_tqdm):
            self._display = self._use_tqdm(total=self._total, desc="Generating")
        elif sys.stderr and not os.environ.get("TQDM_DISABLE"):
            if in_notebook() or sys.stderr.isatty():
                self._display = _make_bar(self._total, self.rates)
            else:
                self._display = Lines(self._total, self.rates, self._clock)
        return self

    def __exit__(self, *error: object) -> None:
        if self._display is not None:
            self._display.close()


class Lines:
    """A line on stderr every LINE_SECONDS and one at the end; no line at all if the run takes less time."""

    def __init__(self, total: int, rates: Callable[[], str], clock: Callable[[], float]) -> None:
        self._total, self._rates, self._clock = total, rates, clock
        self._done = 0
        self._start = clock()
        self._due = self._start + LINE_SECONDS

    def update(self, num_finished: int) -> None:
        self._done += num_finished
        now = self._clock()
        if now >= self._due and self._done < self._total:  # `close` prints the last line
            self._print(now)
            self._due = now + LINE_SECONDS

    def close(self) -> None:
        now = self._clock()
        if now - self._start >= LINE_SECONDS:
            self._print(now)

    def _print(self, now: float) -> None:
        done = f"{self._done:,} of {self._total:,} requests after {now - self._start:,.0f} s"
        print(f"Generating: {', '.join(filter(None, (done, self._rates())))}", file=sys.stderr, flush=True)


def _make_bar(total: int, rates: Callable[[], str]) -> Any:
    """A tqdm bar of text that fits its terminal or its notebook. A widget would stay empty, or at 0 %, in a
    notebook that is shown without its kernel."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        @property
        def format_dict(self) -> dict[str, Any]:
            """The values that a bar shows; tqdm reads them at each redraw."""
            values: dict[str, Any] = super().format_dict
            return values | {"bar_format": layout(total, values["ncols"]), "postfix": rates()}

    # A notebook that a program runs keeps each redraw.
    columns, seconds = (_NOTEBOOK_COLUMNS, _NOTEBOOK_SECONDS) if in_notebook() else (None, 0.1)
    dynamic = columns is None
    return Bar(
        total=total, miniters=0, mininterval=seconds, disable=False, ncols=columns, dynamic_ncols=dynamic
    )


def layout(total: int, columns: object) -> str:
    """The fullest of _LAYOUTS that fits `columns` for `total` requests; the first if `columns` is None."""
    if not isinstance(columns, int):  # a terminal of unknown width
        return _LAYOUTS[0]
    shown = _WIDEST_FIELDS | {"n_fmt": str(total), "total_fmt": str(total)}
    fitting = (each for each in _LAYOUTS if len(each.format_map(shown)) <= columns)
    return next(fitting, _LAYOUTS[-1])


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
