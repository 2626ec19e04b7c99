"""What `LLM.get_metrics` returns: vLLM's kinds of metrics, as plain values. Counts nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metric:
    """A named value. labels: its model and engine, and what tells it from others of its name."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass
class Histogram(Metric):
    """How often a value was seen.

    count, sum: of all values. buckets: the number of values up to each limit; that of "+Inf" is `count`.
    """

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Vector(Metric):
    """Several counters in order. For scripts that ask for the kind of each metric; this engine has none."""

    values: list[int]
