"""Parts: what a stream with deltas yields of unfinished answers, and how much of each it has yielded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.answers import CompletionOutput, RequestOutput, changed, unlisted
from nanovllm.batch import TokenEvents
from nanovllm.engine.requests import RequestState
from nanovllm.text.characters import LONGEST_CUT
from nanovllm.text.processor import Processor


@dataclass(slots=True, eq=False)
class _StreamState:
    """An unfinished completion, and how much of it was yielded."""

    state: RequestState
    index: int
    text: Any  # `StopStrings`, which decodes its tokens; None if outputs have no text
    num_tokens: int = 0
    num_characters: int = 0
    num_thoughts: int = 0  # characters of its thinking
    before: list[int] = field(default_factory=list)  # the last yielded tokens


class Parts:
    """The unfinished completions of an engine that yields parts of them."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._streams: dict[int, _StreamState] = {}  # by id of each unfinished sequence

    def add(self, seq_id: int, state: RequestState, index: int, text: Any) -> None:
        """Begin completion `index` of a request. text: the `StopStrings` that decodes its tokens, or None."""
        self._streams[seq_id] = _StreamState(state, index, text)

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
            stream = self._streams.get(seq_id)
            if stream is None:  # it was aborted after the step was read
                continue
            key = str(stream.state.request.request_id)
            parts.setdefault(key, (stream.state, []))[1].append(self._part(seq_id, stream, new))
        whole = {output.request_id: output for output in outputs}
        return [
            changed(whole[key], outputs=completions) if key in whole else _unfinished(state, completions)
            for key, (state, completions) in parts.items()
        ]

    def _part(self, seq_id: int, stream: _StreamState, token_ids: list[int]) -> CompletionOutput:
        """The new part of a completion: `token_ids`, or all that is left if it ended."""
        completion = stream.state.completions.get(stream.index)
        if completion is not None:
            del self._streams[seq_id]
            start, logprobs = stream.num_tokens, unlisted(completion, "logprobs")
            thoughts = completion.reasoning
            return changed(
                completion,
                text=completion.text[stream.num_characters :],
                reasoning=None if thoughts is None else thoughts[stream.num_thoughts :],
                token_ids=completion.token_ids[start:],
                logprobs=None if logprobs is None else logprobs[start:],
            )
        text = "" if stream.text is None else stream.text.take()
        part = CompletionOutput(stream.index, text, token_ids)
        part.reasoning = None if stream.text is None else stream.text.take_reasoning()
        stream.num_thoughts += len(part.reasoning or "")
        extras = stream.state.sequences[stream.index].extras
        rows = [] if extras is None else extras.logprobs[stream.num_tokens :]
        stream.num_characters += len(text)
        stream.num_tokens += len(token_ids)
        part = self._processor.extras.with_logprobs(part, stream.state.request, rows, stream.before)
        stream.before = [*stream.before, *token_ids][-LONGEST_CUT:]
        return changed(part, cumulative_logprob=None)


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
