"""RequestState: one unfinished request, its sequences and its finished completions. Only data."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.outputs import CompletionOutput
from nanovllm.plan.sequence import Sequence
from nanovllm.text.request import Request


@dataclass(slots=True, eq=False)
class RequestState:
    """An unfinished request. Times are those of perf_counter."""

    request: Request
    sequences: list[Sequence]  # one for each completion, in order
    arrival: float
    completions: dict[int, CompletionOutput] = field(default_factory=dict)  # the finished ones, by index
    first_scheduled: float | None = None
    first_token: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache when the first completion was admitted."""
        return self.sequences[0].num_cached_tokens or 0
