"""The parts of an engine under the short names that tests use, such as `llm._runner`."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.plan.scheduler import Scheduler

PARTS = {
    "_runner": "_executor.runner",
    "_workers": "_executor.ranks",
    "_num_blocks": "_executor.ranks.num_blocks",
    "_replicas": "_executor.pool",
    "_residency": "_executor",
}


class _Requests:
    """The requests of an engine, and the id of the next one."""

    def __init__(self, llm: LLMEngine) -> None:
        self.__dict__["_llm"] = llm

    def __getattr__(self, name: str) -> Any:
        if name == "next_id":
            return self._llm._next_id
        return getattr(self._llm._executor.requests, name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "next_id"
        self._llm._next_id = value

    def __len__(self) -> int:
        return self._llm._executor.load.num_requests


def _set_scheduler(llm: Any, scheduler: Scheduler) -> None:
    llm._executor.scheduler = scheduler


for name, path in PARTS.items():
    setattr(LLMEngine, name, property(attrgetter(path)))
LLMEngine._requests = property(_Requests)  # type: ignore[attr-defined]
LLMEngine._scheduler = property(attrgetter("_executor.scheduler"), _set_scheduler)  # type: ignore[attr-defined]
