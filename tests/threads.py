"""The same work in several threads at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import inside

from nanovllm import LLM, RequestOutput

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


def aborted_during(
    llm: LLM, request_id: int, call: Callable[[], Result]
) -> tuple[Result, RequestOutput | None]:
    """Return the results of `call`, and of an abort that another thread asks for within its first step."""
    asked, found = threading.Event(), list[RequestOutput | None]()

    class Asked(deque[Any]):
        def append(self, visit: Any) -> None:
            super().append(visit)
            asked.set()

    thread = threading.Thread(target=lambda: found.append(llm.abort(request_id)))

    def begin(stats: Any) -> None:
        if not asked.is_set():
            thread.start()
            assert asked.wait(SECONDS)

    visits, llm.on_step = inside.swap_visits(llm, Asked()), begin
    try:
        result = call()
        thread.join(SECONDS)
    finally:
        inside.swap_visits(llm, visits)
        llm.on_step = None
    return result, found[0]
