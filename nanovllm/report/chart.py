"""Chart: lines over time as an SVG picture, with titles, units and round ticks; and the frame of a picture.

Knows nothing of engines. A picture needs no script and no network, and follows the reader's light or dark
theme.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Run = Sequence[tuple[float, float]]  # (seconds, value) of a line without a gap, in the order of time

_WIDTH, _HEIGHT = 460, 236  # of a picture, in its own units, like all sizes below
LEFT, RIGHT, TOP, BOTTOM = 52, 446, 52, 190  # of the area with lines
# Name, seconds, and the largest number of this unit before the next one is used.
_TIME_UNITS = (("s", 1, 180), ("min", 60, 180), ("h", 3600, 72), ("days", 86400, math.inf))
_STEPS = (1, 2, 2.5, 5, 10)  # distances of ticks, times a power of ten
_COLORS = {  # of lines, on a light and on a dark page
    "light": ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948"),
    "dark": ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#008300", "#9085e9", "#e66767"),
}
_INK = {  # page, text, lesser text, grid, axis
    "light": ("#fcfcfb", "#0b0b0b", "#52514e", "#e1e0d9", "#a9a79d"),
    "dark": ("#1a1a19", "#ffffff", "#c3c2b7", "#2f2f2d", "#6b6a64"),
}
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'


def _variables(theme: str) -> str:
    """The colors of a theme as CSS variables."""
    names = ("page", "text", "lesser", "grid", "axis")
    lines = [f"--line{number}: {color}" for number, color in enumerate(_COLORS[theme])]
    return "; ".join([f"--{name}: {color}" for name, color in zip(names, _INK[theme], strict=True)] + lines)


STYLE = f"""\
:root {{ {_variables("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables("dark")} }} }}
.chart text {{ font: 12px {FONT}; fill: var(--lesser); font-variant-numeric: tabular-nums }}
.chart .title {{ font-weight: 600; font-size: 14px; fill: var(--text) }}
.chart .page {{ fill: var(--page) }}
.chart path {{ fill: none; stroke: var(--grid) }}
.chart .axis {{ stroke: var(--axis) }}
.chart .mark {{ stroke: var(--lesser); stroke-dasharray: 4 3 }}
.chart .line {{ stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round }}
.chart .dot {{ stroke-width: 5 }}
.chart .area {{ stroke: none; opacity: 0.14 }}
.chart .bar {{ fill: var(--line0) }}
"""
STYLE += "".join(
    f".chart .line{n} {{ stroke: var(--line{n}) }} .chart .area{n} {{ fill: var(--line{n}) }}\n"
    for n in range(len(_COLORS["light"]))
)


@dataclass(frozen=True)
class Chart:
    """A picture that a notebook displays; `svg()` returns its source.

    unit: of the values. lines: the runs of each line by its name, for the legend of several; a gap separates
    runs. note: text beside the title. whole: values are counts. most: minimum end of the vertical axis. span:
    minimum number of seconds on the time axis. marks: seconds with a vertical line.
    """

    title: str
    unit: str
    lines: Mapping[str, Sequence[Run]]
    note: str = ""
    whole: bool = False
    most: float = 0.0
    span: Sequence[float] = ()
    marks: Sequence[float] = ()

    def _repr_svg_(self) -> str:
        """For a notebook: the picture with its own style."""
        style = STYLE.replace(":root", ".chart")
        return self.svg().replace("</title>", f"</title><style>{style}</style>", 1)

    def svg(self) -> str:
        """The picture as an `<svg>` element, for a page that has STYLE."""
        runs = [run for line in self.lines.values() for run in line if run]
        values = [value for run in runs for _, value in run]
        times = [*(time for run in runs for time, _ in run), *self.span, *self.marks] or [0.0]
        unit, seconds = time_unit(max(times))
        x = Axis.of(min(times) / seconds, max(times) / seconds, from_zero=False)
        y = Axis.of(0.0, max([*values, self.most]), from_zero=True, whole=self.whole)
        drawn = "".join(
            self._draw(number, line, x, y, seconds) for number, line in enumerate(self.lines.values())
        )
        if not runs:
            drawn = draw_text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2 - 12, "nothing to show", anchor="middle")
        label = escape(f"{self.title}, {self.unit}, over time")
        ticks = "".join(
            draw_path("axis", f"M{at:.1f} {BOTTOM}v4") + draw_text(at, BOTTOM + 17, label, "xtick", "middle")
            for at, label in x.ticks(LEFT, RIGHT)
        )
        marks = "".join(
            draw_path("mark", f"M{x.place(at / seconds, LEFT, RIGHT):.1f} {TOP}V{BOTTOM}")
            for at in self.marks
        )
        below = f"time since the engine was ready ({unit})"
        label = f"{self.title}, {self.unit}, over time"
        return frame(
            self.title, self.unit, self.note, y, self._legend() + ticks + marks + drawn, below, label
        )

    def _draw(self, number: int, line: Sequence[Run], x: Axis, y: Axis, seconds: float) -> str:
        parts = []
        number %= len(_COLORS["light"])
        for run in filter(None, line):
            places = [
                f"{x.place(time / seconds, LEFT, RIGHT):.1f} {y.place(value, BOTTOM, TOP):.1f}"
                for time, value in run
            ]
            if len(self.lines) == 1 and len(places) > 1:
                first, last = (place.split()[0] for place in (places[0], places[-1]))
                parts.append(
                    draw_path(f"area area{number}", f"M{first} {BOTTOM}L{' '.join(places)}L{last} {BOTTOM}Z")
                )
            if len(places) == 1:
                parts.append(draw_path(f"line line{number} dot", f"M{places[0]}h0"))
            else:
                parts.append(draw_path(f"line line{number}", f"M{'L'.join(places)}"))
        return "".join(parts)

    def _legend(self) -> str:
        """A stroke and a name for each of several lines, from right to left."""
        parts, right = [], float(RIGHT)
        for number, name in reversed(list(enumerate(self.lines)) if len(self.lines) > 1 else []):
            left = right - 6.6 * len(name)
            parts.append(draw_text(left, 39, name))
            parts.append(draw_path(f"line line{number % len(_COLORS['light'])}", f"M{left - 18:.1f} 35h12"))
            right = left - 30
        return "".join(parts)


@dataclass(frozen=True)
class Axis:
    """From the value `first` to `last`, with a tick at every multiple of `step` between."""

    first: float
    last: float
    step: float

    @classmethod
    def of(cls, least: float, most: float, from_zero: bool, whole: bool = False) -> Axis:
        """An axis with about four to six round ticks: from zero to a tick, or from a tick to `most`."""
        if most <= least:
            most = least + 1
        step = _round_step((most - least) / (4 if from_zero else 6))
        if whole:
            step = max(1.0, 2 * step if step % 1 else step)
        if from_zero:
            return cls(0.0, math.ceil(most / step - 1e-9) * step, step)
        return cls(math.floor(least / step + 1e-9) * step, most, step)

    def place(self, value: float, begin: float, end: float) -> float:
        """The coordinate of a value on an axis from `begin` to `end`."""
        return begin + (value - self.first) / (self.last - self.first) * (end - begin)

    def ticks(self, begin: float, end: float) -> Iterator[tuple[float, str]]:
        """The place and the label of each tick."""
        for number in range(round(self.first / self.step), math.floor(self.last / self.step + 1e-9) + 1):
            yield self.place(number * self.step, begin, end), self.label(number * self.step)

    def label(self, value: float) -> str:
        """A tick's value: 0.25, 75, 1,500, 25k, 2.5M."""
        for unit, size in (("M", 1e6), ("k", 1e3), ("", 1.0)):
            if self.last >= 10 * size or not unit:
                break
        digits = next(d for d in range(12) if math.isclose(self.step / size, round(self.step / size, d)))
        return f"{value / size:,.{digits}f}{unit if value else ''}"


def _round_step(step: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(each * power for each in _STEPS if each * power >= step * (1 - 1e-9))


def time_unit(longest: float) -> tuple[str, int]:
    """The unit for times up to `longest` seconds, and its seconds."""
    return next((name, size) for name, size, most in _TIME_UNITS if longest <= most * size)


def frame(title: str, unit: str, note: str, y: Axis, drawn: str, below: str, label: str = "") -> str:
    """A picture as an `<svg>` element: what is drawn, with a title, a vertical axis and a name below."""
    label = escape(clean(label or f"{title}, {unit}"))
    grid = "".join(
        draw_path("grid", f"M{LEFT} {at:.1f}H{RIGHT}") + draw_text(LEFT - 6, at + 4, text, "ytick", "end")
        for at, text in y.ticks(BOTTOM, TOP)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{label}"><title>{label}</title>'
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>'
        + draw_text(8, 18, title, "title")
        + draw_text(RIGHT, 18, note, anchor="end")
        + draw_text(8, 39, unit, "unit")
        + grid
        + drawn
        + draw_path("axis", f"M{LEFT} {BOTTOM}H{RIGHT}")
        + draw_text((LEFT + RIGHT) / 2, _HEIGHT - 10, below, "unit", "middle")
        + "</svg>"
    )


def draw_path(kind: str, data: str) -> str:
    """An element that draws lines."""
    return f'<path class="{kind}" d="{data}"/>'


def draw_text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """An element with text at a place."""
    shown = f'class="{kind}" ' if kind else ""
    return f'<text {shown}x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(clean(content))}</text>'


def clean(content: str) -> str:
    """Replace what HTML and files cannot hold: control characters and lone surrogates."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", content)
