"""ExtraTexts: what a `Processor` does for requests with more than a prompt: compiles their constraints,
tokenises bad words, searches for stop strings, gives logprobs the text of their tokens, says why no token was
left or a prompt cannot run, and refuses texts that are too long to tokenise.

Keeps no request.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.answers import CompletionOutput, RequestOutput
from nanovllm.checks import BadRow, pack_token_ids, show
from nanovllm.extras.columns import TokenLogprobs
from nanovllm.extras.json_schemas import warn_once
from nanovllm.extras.least_tokens import LeastTokens
from nanovllm.extras.logits_processors import GuardedProcessors
from nanovllm.extras.logprobs import LogprobDicts, join_parts, join_rows
from nanovllm.extras.stop_strings import StopSearch, StopStrings, text_stream
from nanovllm.extras.structured import Constraint, GrammarCompiler
from nanovllm.params import SamplingParams
from nanovllm.text.characters import CUT, LONGEST_CUT
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.processor import Processor, encode, num_bytes
from nanovllm.text.prompts import Prompt, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")
_CACHE_SIZE = 16  # lists of stop strings and of bad words; the longest take a few megabytes


class ExtraTexts:
    """Texts and tokens of one processor, whose tokenizer may be replaced at any time."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self.reads_extra_args = False  # whether the engine has classes of logits processors
        self.grammars: GrammarCompiler | None = None  # created on first use
        self._decoded: dict[int, str] = {}  # the text of single tokens
        self._least_tokens: LeastTokens | None = None  # created on first use
        # Rows of a job often have equal lists, each its own copy.
        self._bad_words = lru_cache(_CACHE_SIZE)(bad_word_ids)
        self._searches = lru_cache(_CACHE_SIZE)(StopSearch)

    def compiled(self, params: SamplingParams) -> tuple[tuple[tuple[int, ...], ...], Constraint | None]:
        """The token ids of bad words, and the compiled constraint. ValueError and ImportError as in
        `Processor.make_requests`."""
        self._check_num_logprobs(params)
        tokenizer, vocab_size = self._processor.tokenizer, self._processor.vocab_size
        if params.thinking_token_budget is not None and not getattr(self._processor, "reads_thinking", False):
            raise ValueError(
                f"thinking_token_budget={params.thinking_token_budget} needs the marks of the thinking; pass "
                "reasoning_parser='auto' to LLM"
            )
        if tokenizer is None:
            for name in ("bad_words", "structured_outputs"):
                if getattr(params, name):
                    raise self.needs_tokenizer(name, getattr(params, name))
        for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids", "trace_decode_token_ids"):
            if ids := getattr(params, name):
                pack_token_ids(list(ids), vocab_size, name, ordered=name == "trace_decode_token_ids")
        if params.extra_args and not self.reads_extra_args:
            _warn_of_extra_args()
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            assert tokenizer is not None
            bad_words = self._bad_words(tokenizer, tuple(params.bad_words))
            pack_token_ids(list(chain.from_iterable(bad_words)), vocab_size, "bad_words", ordered=False)
        try:
            constraint = self.constraint(params)
        except ValueError as error:
            raise ValueError(f"structured_outputs: {error}") from None
        if constraint is not None and params.max_tokens:
            num_tokens, longest = constraint.longest
            _warn_of_cut_choices(params.max_tokens, num_tokens, longest)
        return bad_words, constraint

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """The compiled constraint on the text, for the current tokenizer; None without a constraint."""
        if params.structured_outputs is None:
            return None
        tokenizer = self._processor.tokenizer
        assert tokenizer is not None
        if self.grammars is None or self.grammars.tokenizer is not tokenizer:
            ends = self._processor.eos_token_ids
            self.grammars = GrammarCompiler(tokenizer, self._processor.vocab_size, ends)
        return self.grammars.constraint(params.structured_outputs)

    def stop_strings(self, request: Request, detokenizer: Detokenizer) -> StopStrings:
        """What searches one completion of the request; the list of stop strings may be empty."""
        stream = text_stream(detokenizer, request.prompt_token_ids)
        search = self._searches(tuple(request.params.stop or ()))
        return StopStrings(search, stream, request.params.min_tokens)

    def check_length(self, text: str, where: str, max_model_len: int) -> None:
        """As `Processor.check_length`, for a long text."""
        tokenizer = self._processor.tokenizer
        assert tokenizer is not None
        if self._least_tokens is None or self._least_tokens.tokenizer is not tokenizer:
            self._least_tokens = LeastTokens(tokenizer)
        most = max_model_len + 1  # for the last token of a text that is scored needs no room
        least = self._least_tokens.of(text, most)
        if least > most:
            raise ValueError(
                f"{where} has {num_bytes(text):,} bytes, which are at least {least:,} tokens, and "
                f"max_model_len={max_model_len}; shorten it"
            )

    def with_logprobs(
        self,
        output: CompletionOutput,
        request: Request,
        rows: list[tuple[TokenLogprobs, int]],
        before: Sequence[int] = (),
    ) -> CompletionOutput:
        """The completion, which is new, with the logprobs of its tokens, one row for each, if requested.

        before: for a part of a completion, the last tokens before it.
        """
        asked = request.params.num_logprobs
        if asked is None:
            return output
        columns = join_rows(rows[: len(output.token_ids)], self._width(asked))
        logprobs: Any = self.logprob_dicts(request.params, columns, before=before)
        output.logprobs = logprobs
        output.cumulative_logprob = float(columns.values[:, 0].sum(dtype=np.float64))
        return output

    def prompt_logprobs(self, request: Request, scores: Sequence[TokenLogprobs]) -> LogprobDicts | None:
        """The logprobs of prompt tokens, whose scores came in parts; None if the prompt did not run whole."""
        first = request.first_scored or 0
        if len(request.prompt_token_ids) - sum([len(part.ranks) for part in scores]) != first:
            return None
        columns = join_parts(scores, self._width(request.params.prompt_logprobs or 0))
        return self.logprob_dicts(request.params, columns, first, request.prompt_token_ids[:first])

    def logprob_dicts(
        self,
        params: SamplingParams,
        columns: TokenLogprobs,
        num_unknown: int = 0,
        before: Sequence[int] = (),
    ) -> LogprobDicts:
        """The logprobs of tokens, with their text if outputs with these parameters have text."""
        decode = self._decode_token if params.detokenize else None
        return LogprobDicts(columns, decode, num_unknown, before)

    def decode(self, token_ids: list[int]) -> str | None:
        """The text of tokens; None without a tokenizer."""
        tokenizer = self._processor.tokenizer
        return None if tokenizer is None else str(tokenizer.decode(token_ids))

    def _decode_token(self, token_id: int, before: list[int]) -> str | None:
        """The text of a token after the tokens `before`; None without a tokenizer.

        Of a character that several tokens write, the last one has the text and the others have none, as in
        vLLM.
        """
        if self._processor.tokenizer is None:
            return None
        if token_id not in self._decoded:
            self._decoded[token_id] = str(self._processor.tokenizer.decode([token_id]))
        text, token_ids = self._decoded[token_id], [token_id]
        while text.endswith(CUT) and len(token_ids) <= min(LONGEST_CUT, len(before)):
            token_ids.insert(0, before[-len(token_ids)])
            text = str(self._processor.tokenizer.decode(token_ids))
        return "" if text.endswith(CUT) else text

    def _width(self, asked: int) -> int:
        """The number of logprob columns: one for the token itself, and `asked` more; -1: the vocabulary."""
        return 1 + (self._processor.vocab_size if asked < 0 else min(asked, self._processor.vocab_size))

    def _check_num_logprobs(self, params: SamplingParams) -> None:
        """ValueError for more logprobs than `max_logprobs` allows."""
        for name in ("logprobs", "prompt_logprobs"):
            asked, most = getattr(params, name), self._processor.max_logprobs
            if asked is not None and most >= 0 and not 0 <= asked <= most:
                raise ValueError(
                    f"{name}={asked} is more than max_logprobs={most} allows; make the LLM with a "
                    f"larger max_logprobs (-1: no limit)"
                )

    @staticmethod
    def needs_tokenizer(name: str, value: object) -> ValueError:
        """The error of a parameter that only a tokenizer gives a meaning."""
        return ValueError(
            f"{name}={value!r} needs a tokenizer, and skip_tokenizer_init=True; use stop_token_ids or "
            "allowed_token_ids"
        )

    def failure(self, request: Request, dead_end: tuple[str, int] | None) -> str:
        """Why there was no token to draw, or no score or embedding. dead_end: as in `output`."""
        params = request.params
        for each in params.logits_processors or ():
            if isinstance(each, GuardedProcessors) and each.error is not None:
                return each.error
        if dead_end is not None and params.structured_outputs is not None:
            why, num_tokens = dead_end
            cause = (
                f"llguidance failed: {why}" if why else "no text that begins like this output satisfies it"
            )
            named = params.structured_outputs.named()
            return f"structured_outputs: {named} allows no token at place {num_tokens} of the output; {cause}"
        if request.pooling is not None:
            return "the model's hidden states were not finite"
        rules = ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs", "logit_bias")
        given = [name for name in (*rules, "logits_processors") if getattr(params, name)]
        left = f"no token was left by {', '.join(given)}, or " if given else ""
        return f"{left}the model's logits were not finite"

    def refused(
        self, request_id: int, index: int, request: Request | BadRow, prompt: Prompt | BadRow, error: BadRow
    ) -> RequestOutput:
        """Return the output of a prompt that cannot run, with the known part of the prompt."""
        text: str | None = None
        ids: array[int] | list[int] = []
        if isinstance(request, Request):
            text, ids = request.prompt, request.prompt_token_ids
        elif isinstance(prompt, Prompt):
            text, ids = prompt.text, list(prompt.token_ids or ())
        answer = CompletionOutput(0, "", [], finish_reason="error")
        return RequestOutput(str(request_id), text, ids, None, [answer], error=str(error), index=index)


@cache
def _warn_of_extra_args() -> None:
    logger.warning(
        "extra_args of SamplingParams has no effect: only classes of LLM(logits_processors=[...]) read it"
    )


def _warn_of_cut_choices(max_tokens: int, num_tokens: int, longest: str) -> None:
    """Say that answers end within the choice with the most tokens."""
    if max_tokens < num_tokens:
        cut = f"{show(longest)}, which has {num_tokens} tokens"
        warn_once(f"choice: max_tokens={max_tokens} cuts {cut}; allow as many")


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, without and with a leading space.

    As in vLLM, the form with a space is used only if it has the same number of tokens and begins with another
    token. Leading whitespace of a word is removed, unless the word is only whitespace. ValueError for a word
    without tokens.
    """
    found: list[tuple[int, ...]] = []
    texts = [word.lstrip() or word for word in words]
    all_bare = encode(tokenizer, texts, add_special_tokens=False)  # together, which is faster
    all_spaced = encode(tokenizer, [f" {text}" for text in texts], add_special_tokens=False)
    for word, *ids in zip(words, all_bare, all_spaced, strict=True):
        bare, spaced = map(tuple, ids)
        if not bare:
            raise ValueError(f"bad_words has {word!r}, which has no tokens; leave it out")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(found)
