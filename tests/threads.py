"""The same work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
SECONDS = 120


def in_threads(count: int, work: Callable[[int], Result]) -> list[Result]:
    """Run work(0) ... work(count - 1) in parallel threads; return the results, or raise an error."""
    barrier = threading.Barrier(count)

    def run(index: int) -> Result:
        barrier.wait()
        return work(index)

    pool = ThreadPoolExecutor(count)
    return list(pool.map(run, range(count), timeout=SECONDS))
