"""ParsingProcessor: the `Processor` of an engine with `reasoning_parser` or `tool_parser`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nanovllm.answers import CompletionOutput
from nanovllm.checks import BadRow, attempt
from nanovllm.config import Config
from nanovllm.extras.stop_strings import StopSearch
from nanovllm.params import SamplingParams
from nanovllm.reasoning.parsers import AnswerParsers, Asked
from nanovllm.reasoning.rules import thinking_rules
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Prompt, Request

_CACHE_SIZE = 16  # lists of stop strings


class ParsingProcessor(Processor):
    """Separates answers into thinking, text and tool calls."""

    def __init__(
        self, config: Config, tokenizer: Any, vocab_size: int, ends: Sequence[int], max_logprobs: int
    ) -> None:
        """As `Processor`. ValueError as of `AnswerParsers`, and without a tokenizer."""
        super().__init__(tokenizer, vocab_size, ends, max_logprobs)
        self._names = config.reasoning_parser, config.tool_parser
        self._searches = lru_cache(_CACHE_SIZE)(StopSearch)
        self._parsers: AnswerParsers | None = None
        self.reads_thinking = self.parsers.family is not None

    @property
    def parsers(self) -> AnswerParsers:
        """Those of the current tokenizer."""
        if self.tokenizer is None:
            option = "reasoning_parser" if self._names[0] is not None else "tool_parser"
            raise ValueError(f"{option} reads text, and skip_tokenizer_init=True; leave one of them out")
        if self._parsers is None or self._parsers.tokenizer is not self.tokenizer:
            self._parsers = AnswerParsers(self.tokenizer, *self._names)
        return self._parsers

    def make_requests(
        self,
        prompts: Sequence[Prompt | BadRow],
        params: Sequence[SamplingParams | BadRow],
        first_id: int,
        rows: Sequence[int] = (),
        on_error: str = "raise",
    ) -> list[Request | BadRow]:
        made = super().make_requests(prompts, params, first_id, rows, on_error)
        return [attempt(self._with_rules, each) for each in made]

    def _with_rules(self, request: Request | BadRow) -> Request | BadRow:
        """The request, with what its rules must know of thinking. ValueError as of `thinking_rules`."""
        family = self.parsers.family
        if isinstance(request, Exception) or family is None:
            return request
        budget, constraint = request.params.thinking_token_budget, request.constraint
        if budget is None and constraint is None:
            return request
        vocabulary, ids = self.parsers.vocabulary, request.prompt_token_ids
        rules = thinking_rules(family, vocabulary, ids, budget is not None, constraint is not None)
        return replace(request, thinking=rules)

    def stop_strings(self, request: Request, always: bool = False) -> Any:
        if not request.params.detokenize or not (request.params.stop or always):
            return None
        params = request.params
        search = self._searches(tuple(params.stop or ()))
        return self.parsers.stream(self._detokenizer(params), _asked(request), search, params.min_tokens)

    def completion(
        self, request: Request, index: int, token_ids: list[int], finish_reason: str, stop_token: int | None
    ) -> CompletionOutput:
        output = super().completion(request, index, token_ids, finish_reason, stop_token)
        if not request.params.detokenize:
            return output
        is_cut = finish_reason == "stop" and not request.params.include_stop_str_in_output
        said = token_ids[:-1] if is_cut else token_ids
        asked = _asked(request)._replace(number=index)
        parsed = self.parsers.whole(self._detokenizer(request.params), asked, said)
        return parsed.put_into(output)

    def _text(self, request: Request, output_ids: list[int]) -> str:
        return ""  # the parsers decode


def _asked(request: Request) -> Asked:
    return Asked(request.prompt_token_ids, 0, request.tools)
