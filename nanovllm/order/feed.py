"""Feed: gives an engine the requests of a list, in the order of `Waiting`, and tokenises as it needs them.

Checks all prompts before the first step. A request that cannot be refused is made later, between steps. Makes
no step, and keeps no answer.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanovllm.answers import RequestOutput, unlisted
from nanovllm.checks import BadRow, attempt
from nanovllm.engine.generate import Generation
from nanovllm.engine.stats import Progress
from nanovllm.order.ids import Ids
from nanovllm.order.texts import Texts
from nanovllm.order.waiting import Asked, Seen, Slots, Waiting
from nanovllm.params import SamplingParams
from nanovllm.text.processor import ENCODED_BYTES
from nanovllm.text.prompts import Prompt, Request

_AHEAD = 3  # requests in the engine, in multiples of `max_num_seqs`: those that run, and twice as many
_AHEAD_OF_REPLICAS = 12  # the same, as a router chooses among many
_PART = 16  # of the requests that are missing there, which are tokenised between two steps
_GROWTH = 12  # bytes that normalising makes of one: NFKC makes 33 of 3
_ADDED = 64  # tokens that a tokenizer adds to a text at most, about
_CHARS = 4  # of a token, about
_WORD = re.compile(r"\w")
_TRIED = ("a", "0", "\u0416", "\u6f22", "\ua66e")  # words; tokenizers know no token of the last


class Feed:
    """The requests of a list that the engine does not have yet."""

    first: tuple[list[Request], list[RequestOutput]]  # none; outputs of prompts that cannot run

    def __init__(
        self,
        engine: Generation,
        prompts: Sequence[Prompt | BadRow],
        params: Sequence[SamplingParams | BadRow],
        on_error: str,
        change: Callable[[Request], Request],
    ) -> None:
        """Check all prompts. Raises as `Generation._check`, which describes the arguments too. Of a list
        with more than ENCODED_BYTES of text, or of token ids alone, requests are made as they are needed, but
        for prompts that may be refused."""
        self._engine, self._prompts, self._params = engine, prompts, params
        self._on_error, self._change = on_error, change
        self._first_id = engine._next_id
        texts = _texts(prompts)
        size = sum([len(text) for text in texts if text is not None])
        self._lazily = isinstance(prompts, Ids) or size > ENCODED_BYTES
        now: Sequence[int] = range(len(prompts))
        if self._lazily:
            doubtful = _wrong(prompts, engine) if isinstance(prompts, Ids) else _doubtful(texts, engine)
            now = sorted({*doubtful, *_unlike(params, engine)})
        self._made: dict[int, Request] = {}  # by row
        self._looked = 0  # at so many outputs of the call
        refused = self._make(now)
        self.first = [], refused
        engine._next_id = self._first_id + len(prompts)
        runs = np.ones(len(prompts), bool)
        runs[[output.index for output in refused]] = False
        self._rows = np.flatnonzero(runs)  # by number in `_waiting`
        self._numbers = np.cumsum(runs) - 1  # by row
        self._waiting = self._order(texts)

    @property
    def left(self) -> int:
        """The number of requests that the engine does not have yet."""
        return len(self._waiting)

    def fill(self, outputs: list[RequestOutput], progress: Progress) -> list[RequestOutput]:
        """Give the engine requests, if it has few. Return the outputs of prompts that cannot run.

        outputs: of the call until now, which only grow; the order follows from their lengths.
        """
        if not self.left:
            return []
        new, self._looked = outputs[self._looked :], len(outputs)
        for output in new:
            if output.error is None:
                longest = max([len(unlisted(each, "token_ids")) for each in output.outputs], default=0)
                self._waiting.answered(int(self._numbers[output.index]), longest)
        config, unfinished = self._engine.config, self._engine._executor.num_requests
        seqs = config.max_num_seqs * config.data_parallel_size
        is_one = config.data_parallel_size == 1
        missing = seqs * (_AHEAD if is_one else _AHEAD_OF_REPLICAS) - unfinished
        at_once = min(missing - seqs, seqs) if is_one else missing - seqs  # a step admits no more
        numbers = self._waiting.take(max(missing // _PART, at_once, 0))
        refused = self._give(self._rows[numbers].tolist())
        progress.refused(len(refused))
        return refused

    def bring(self, request_id: str | int) -> list[RequestOutput]:
        """Give the engine the request of this id next, if it waits here. Return its output, if it cannot
        run."""
        row = int(request_id) - self._first_id if str(request_id).isdigit() else -1
        number = int(self._numbers[row]) if 0 <= row < len(self._numbers) else -1
        if number < 0 or self._rows[number] != row or not self._waiting.has(number):
            return []
        refused = self._make([] if row in self._made else [row])
        self._waiting.remove(number)
        return refused + self._give([row])

    def _give(self, rows: list[int]) -> list[RequestOutput]:
        refused = self._make([row for row in rows if row not in self._made])
        self._engine._add([self._made.pop(row) for row in rows if row in self._made])
        return refused

    def _make(self, rows: Sequence[int]) -> list[RequestOutput]:
        """Check and tokenise rows. Return the outputs of those that cannot run."""
        if not rows:
            return []
        prompts, params = [self._prompts[row] for row in rows], [self._params[row] for row in rows]
        engine, before = self._engine, self._engine._next_id
        engine._next_id = self._first_id + rows[0]
        try:
            requests, refused = engine._check(prompts, params, rows, self._on_error, self._change)
        finally:
            engine._next_id = before
        self._made.update((request.index, request) for request in requests)
        return refused

    def _order(self, texts: Sequence[str | None]) -> Waiting:
        config, room = self._engine.config, self._engine._executor.room
        replicas, most, rows = config.data_parallel_size, room.max_model_len, self._rows.tolist()
        is_text = self._lazily and not isinstance(self._prompts, Ids)
        beginnings: Any
        if isinstance(self._prompts, Ids):
            beginnings = [self._prompts.ids[row] for row in rows]
        elif not self._lazily:
            beginnings = [self._made[row].prompt_token_ids for row in rows]
        else:  # the order is made of texts, before they are tokenised
            beginnings = [
                self._made[row].prompt_token_ids.tobytes()
                if (text := texts[row]) is None
                else text.encode(errors="surrogatepass")
                for row in rows
            ]
        sizes = np.fromiter(map(len, beginnings), np.int64, len(rows)) // (_CHARS if is_text else 1)
        params: list[Any] = list(self._params)
        params = params[:1] if _are_one(params) else [params[row] for row in rows]
        asked = [most if each.max_tokens is None else each.max_tokens for each in params]
        limits = np.clip(np.array(asked, np.int64), 0, np.maximum(most - sizes, 0))
        copies = np.broadcast_to(np.array([each.n for each in params], np.int64), len(rows))
        return Waiting(
            beginnings,
            Asked(sizes, limits, copies),
            Slots(config.max_num_seqs * replicas, room.num_blocks * room.block_size * replicas),
            Seen(),
            config.enable_prefix_caching,
        )


def _texts(prompts: Sequence[Prompt | BadRow]) -> Sequence[str | None]:
    """The strings to tokenise, None for other prompts."""
    if isinstance(prompts, Texts):
        return prompts.texts
    if isinstance(prompts, Ids):
        return [None] * len(prompts)
    return [each.text if isinstance(each, Prompt) and each.token_ids is None else None for each in prompts]


def _unlike(params: Sequence[SamplingParams | BadRow], engine: Generation) -> list[int]:
    """Where parameters are bad, come for the first time, or have rules that depend on the prompt's tokens,
    as those do that begin after some thinking."""
    differs = _has_rules if getattr(engine._processor, "reads_thinking", False) else _is_bad
    if _are_one(params) and not differs(params[0]):
        return [0]
    known: set[int] = set()
    found = []
    for row, each in enumerate(params):
        if id(each) not in known or differs(each):
            known.add(id(each))
            found.append(row)
    return found


def _are_one(params: Sequence[SamplingParams | BadRow]) -> bool:
    """Whether all rows have the same object."""
    return len(set(map(id, params))) == 1


def _is_bad(params: SamplingParams | BadRow) -> bool:
    return not isinstance(params, SamplingParams)


def _has_rules(params: SamplingParams | BadRow) -> bool:
    return not isinstance(params, SamplingParams) or not (
        params.structured_outputs is None and params.thinking_token_budget is None
    )


def _doubtful(texts: Sequence[str | None], engine: Generation) -> list[int]:
    """The rows that tokenising may refuse: those with ids, and texts that may have too many tokens, or none.

    A token has at least one byte of the text after it is normalised, and a text with a character of a word
    has a token, if the tokenizer has one for each of `_TRIED`, of which the last is in no vocabulary.
    """
    processor, most = engine._processor, -1
    tokenizer: Any = processor.tokenizer
    if getattr(tokenizer, "is_fast", False) and len(tokenizer) <= processor.vocab_size:
        tried = [attempt(processor.encode, [Prompt(word, None, False)]) for word in _TRIED]
        if not any(isinstance(each, Exception) for each in tried):
            most = _longest(engine) - _ADDED
    word = _WORD.search
    return [
        row
        for row, text in enumerate(texts)
        if text is None
        or (len(text) if text.isascii() else _GROWTH * len(text.encode(errors="surrogatepass"))) > most
        or word(text) is None
    ]


def _wrong(prompts: Ids, engine: Generation) -> list[int]:
    """The rows that may be refused: those with an id outside the vocabulary, or too many."""
    lengths = np.fromiter(map(len, prompts.ids), np.int64, len(prompts))
    wrong = (prompts.highest >= engine._processor.vocab_size) | (lengths > _longest(engine))
    rows: list[int] = np.flatnonzero(wrong).tolist()
    return rows


def _longest(engine: Generation) -> int:
    """The tokens of the longest prompt that leaves room for an answer."""
    room = engine._executor.room
    lengths = range(room.max_model_len + 2)
    return bisect_left(lengths, 1, key=lambda each: attempt(room.check_fits, each) is not None) - 1
