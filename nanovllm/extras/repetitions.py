"""RepetitionDetectionParams: which repetitions end an answer; Repetitions, which finds them token by token.

Wraps what searches the answer for stop strings, if there is such a search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.answers import CompletionOutput
from nanovllm.checks import check_int, show
from nanovllm.names import KnownFields
from nanovllm.params import SamplingParams
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Request

MAX_PATTERN_SIZE = 1024  # tokens; a search looks back this far at each token
REASON, STOP_REASON = "repetition", "repetition_detected"  # vLLM's


@dataclass(frozen=True)
class RepetitionDetectionParams(KnownFields):
    """An answer ends once a pattern of tokens stands at its end several times in a row. Immutable.

    max_pattern_size: tokens of the longest pattern, at most 1,024; 0 finds nothing.
    min_pattern_size: tokens of the shortest pattern; 0 is 1. A single token that repeats is a longer pattern,
        too.
    min_count: how often the pattern stands there, at least 2.

    TypeError or ValueError names the field, the value and the fix.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        most, least = self.max_pattern_size, self.min_pattern_size
        expected = f"an integer from 0 to {MAX_PATTERN_SIZE}"
        most = check_int("max_pattern_size", most, 0, expected, MAX_PATTERN_SIZE)
        expected = f"an integer from 0 to max_pattern_size={most}"
        least = check_int("min_pattern_size", least, 0, expected, most)
        expected = "an integer of at least 2, such as 4, unless max_pattern_size is 0"
        count = check_int("min_count", self.min_count, 2 if most else 0, expected)
        for name, value in (("max_pattern_size", most), ("min_pattern_size", least), ("min_count", count)):
            object.__setattr__(self, name, value)


class Repetitions:
    """The search of one answer. Has the methods of `StopStrings`, whose search comes first.

    A pattern of p tokens stands min_count times at the end if each of the last p * (min_count - 1) tokens is
    the same as the one p tokens before it. So for each p the search counts such tokens in a row.
    """

    reason = REASON

    def __init__(
        self,
        params: RepetitionDetectionParams,
        min_tokens: int,
        stops: Any,
        complete: Callable[[int, list[int]], CompletionOutput],
    ) -> None:
        """min_tokens: an answer with fewer tokens goes on. stops: its `StopStrings`, or None. complete:
        (index of the completion, its tokens) -> the completion."""
        self._params, self._min_tokens = params, min_tokens
        self._stops, self._complete = stops, complete
        self._num_tokens = 0
        self._places: dict[int, list[int]] = {}  # of each token, ascending
        self._runs: dict[int, int] = {}  # by p: the last tokens that are as p tokens before
        self._found = False

    @staticmethod
    def checked(params: Any) -> RepetitionDetectionParams | None:
        """The checked `repetition_detection`; None if it finds nothing."""
        if not isinstance(params, RepetitionDetectionParams):
            expected = "RepetitionDetectionParams(max_pattern_size=20, min_count=4) or None"
            raise TypeError(f"repetition_detection must be {expected}, not {show(params)}")
        return params if params.max_pattern_size else None

    @classmethod
    def of(cls, processor: Processor, request: Request, stops: Any) -> Repetitions:
        """The search of one completion of a request that has `repetition_detection`. stops: as of
        `Processor.stop_strings`."""

        def complete(index: int, token_ids: list[int]) -> CompletionOutput:
            return processor.completion(request, index, token_ids, REASON, None)

        return cls(request.params.repetition_detection, request.params.min_tokens, stops, complete)

    @property
    def found(self) -> str | None:
        """What ended the answer: a stop string, or "repetition_detected"."""
        if self._stops is not None and self._stops.found is not None:
            stop: str = self._stops.found
            return stop
        return STOP_REASON if self._found else None

    def append(self, token_id: int) -> bool:
        """Take the next token; return whether the answer ends with it. Later tokens are ignored."""
        if self._found:
            return True
        if self._stops is not None and self._stops.append(token_id):
            self.reason = "stop"
            return True
        end, params, runs = self._num_tokens, self._params, dict[int, int]()
        places = self._places.setdefault(token_id, [])
        for place in reversed(places):
            size = end - place
            if size > params.max_pattern_size:
                break
            runs[size] = run = self._runs.get(size, 0) + 1
            if run >= size * (params.min_count - 1) and size >= params.min_pattern_size:
                self._found = self._found or end + 1 >= self._min_tokens
        places.append(end)
        self._num_tokens, self._runs = end + 1, runs
        return self._found

    def finish(self) -> bool:
        """As of `StopStrings`."""
        if self._stops is not None and self._stops.finish():
            self._found = False  # the stop string ends it
        return self.found is not None

    def completion(self, params: SamplingParams, index: int, token_ids: list[int]) -> CompletionOutput:
        """Completion `index` of the request, which this search ended."""
        if not self._found:
            stopped: CompletionOutput = self._stops.completion(params, index, token_ids)
            return stopped
        output = self._complete(index, token_ids[: self._num_tokens])
        output.stop_reason = STOP_REASON
        return output

    def take(self) -> str:
        """As of `StopStrings`."""
        return "" if self._stops is None else str(self._stops.take())

    def take_reasoning(self) -> str | None:
        """As of `StopStrings`."""
        thoughts: str | None = None if self._stops is None else self._stops.take_reasoning()
        return thoughts
