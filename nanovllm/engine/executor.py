"""Executor: what an engine runs its requests on. `Core` runs one model here, `Replicas` run many elsewhere.

It speaks of requests, never of tokens or blocks. It admits no callers: the engine lets one in at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from nanovllm.answers import RequestOutput
from nanovllm.engine.stats import StepStats
from nanovllm.plan.sequence import Room
from nanovllm.text.prompts import Request


class Load(NamedTuple):
    """What an executor has to do, now."""

    num_requests: int  # unfinished
    num_running: int  # sequences
    num_waiting: int  # sequences
    kv_cache_usage: float  # share of the blocks that sequences hold
    peak_kv_cache_usage: float  # since the start; when a step is planned, it is highest


class Executor(Protocol):
    """Its methods are called by one thread at a time; any thread may read its properties.

    After an exception, call `clear` before anything else.
    """

    room: Room  # which prompts fit

    @property
    def num_requests(self) -> int:
        """Unfinished ones."""

    @property
    def load(self) -> Load: ...

    @property
    def asleep(self) -> frozenset[str]:
        """Which parts of the model sleep, so that no step can run; see `residency/`."""

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, requests: list[Request], deltas: bool = False) -> None:
        """Queue requests that fit. deltas: whether steps return parts of answers; alike for all unfinished
        requests."""

    def step(self) -> tuple[list[RequestOutput], StepStats | None]:
        """Launch the next step, and return what an earlier one gave, if one has finished: outputs of requests
        that ended, or in a stream with deltas the new parts of all answers. Ctrl-C is delayed until all ranks
        have made the same calls."""

    def share(self, stats: StepStats) -> StepStats:
        """A step that `step` returned last, as a part of the whole: replicas run steps in parallel."""

    def abort(self, request_id: str | int) -> tuple[RequestOutput | None, list[RequestOutput]]:
        """End a request. Return its output so far, None if it is unknown or finished; and what a stream
        yields of it."""

    def clear(self, failed: bool = False) -> bool:
        """Drop all requests; `failed` after an exception, whatever their state. False if nothing can run any
        more."""

    # -- between requests ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing is done, while requests hold blocks."""

    def set_tokenizer(self, tokenizer: Any) -> None: ...

    def close(self) -> None:
        """Free the devices, and end all processes."""
