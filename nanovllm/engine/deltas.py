"""Deltas: turns each step of an open stream into outputs with only the new text and tokens.

Records how much of each completion was yielded. Decodes nothing and ends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from nanovllm.engine.request_state import RequestState
from nanovllm.events import TokenEvents
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.text.detokenizer import LONGEST_CUT
from nanovllm.text.processor import Processor
from nanovllm.text.stop_strings import StopStrings


@dataclass(slots=True, eq=False)
class Given:
    """An unfinished completion, and how much of it was yielded."""

    state: RequestState
    index: int
    text: StopStrings | None  # decodes its tokens; None if outputs have no text
    num_tokens: int = 0
    num_characters: int = 0
    before: list[int] = field(default_factory=list)  # the last yielded tokens


class Deltas:
    """The completions of a stream with deltas."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor  # creates log-probabilities
        self._given: dict[int, Given] = {}  # by id of each unfinished sequence

    def follow(self, seq_id: int, state: RequestState, index: int, text: StopStrings | None) -> None:
        """Yield completion `index` of a request in parts; `text` decodes its tokens."""
        self._given[seq_id] = Given(state, index, text)

    def take(
        self, events: TokenEvents, ended: Iterable[int], outputs: list[RequestOutput]
    ) -> list[RequestOutput]:
        """Return the new parts, one output for each request that has any.

        events: the new tokens. ended: the ids of sequences that ended. outputs: the whole outputs of requests
        that ended.
        """
        token_ids: dict[int, list[int]] = {seq_id: [] for seq_id in [*events.seq_ids, *ended]}
        for seq_id, token_id in zip(events.seq_ids, events.token_ids, strict=True):
            token_ids[seq_id].append(token_id)
        parts: dict[str, tuple[RequestState, list[CompletionOutput]]] = {}
        for seq_id, new in token_ids.items():
            given = self._given[seq_id]
            key = str(given.state.request.request_id)
            parts.setdefault(key, (given.state, []))[1].append(self._part(seq_id, given, new))
        whole = {output.request_id: output for output in outputs}
        return [
            replace(whole[key], outputs=completions) if key in whole else _unfinished(state, completions)
            for key, (state, completions) in parts.items()
        ]

    def _part(self, seq_id: int, given: Given, token_ids: list[int]) -> CompletionOutput:
        """The new part of a completion: `token_ids`, or all that is left if it ended."""
        completion = given.state.completions.get(given.index)
        if completion is not None:
            del self._given[seq_id]
            start, logprobs = given.num_tokens, completion.logprobs
            return replace(
                completion,
                text=completion.text[given.num_characters :],
                token_ids=completion.token_ids[start:],
                logprobs=None if logprobs is None else logprobs[start:],
            )
        text = "" if given.text is None else given.text.take()
        part = CompletionOutput(given.index, text, token_ids)
        rows = given.state.sequences[given.index].logprobs[given.num_tokens :]
        given.num_characters += len(text)
        given.num_tokens += len(token_ids)
        part = self._processor.with_logprobs(part, given.state.request, rows, given.before)
        given.before = [*given.before, *token_ids][-LONGEST_CUT:]
        return replace(part, cumulative_logprob=None)


def _unfinished(state: RequestState, completions: list[CompletionOutput]) -> RequestOutput:
    """The output of a request with unfinished completions."""
    request = state.request
    return RequestOutput(
        request_id=str(request.request_id),
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=None,
        outputs=completions,
        num_cached_tokens=state.num_cached_tokens,
        index=request.index,
        finished=False,
    )
