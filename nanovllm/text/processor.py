"""Processor: converts prompts to Requests, and tokens to the outputs of requests.

Owns the tokenizer. Keeps no request; knows neither blocks nor tensors.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nanovllm.answers import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.checks import BadRow, attempt, has_extras, pack_token_ids
from nanovllm.doors import EXTRAS, TEXT, Table
from nanovllm.params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.prompts import Prompt, Request, portions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT: Table[Any] = Table(TEXT)
_EXTRAS: Table[Any] = Table(EXTRAS)
_WAIT_SECONDS = 0.2  # for a long string, between which signals act
ENCODED_BYTES = 2**19  # tokenised at once; it takes up to 300 times this memory, and up to a second
LONG_TEXT = 2**16  # characters; a shorter text is tokenised, whatever its length may turn out to be
# The tokenised sampling parameters: `stop_token_ids`, `bad_words` and `constraint` of a Request.
_OutputIds: TypeAlias = tuple[frozenset[int], tuple[tuple[int, ...], ...], Any]


class Processor:
    """Converts between text and token ids; without a tokenizer there are only ids."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_logprobs: int = -1,
    ) -> None:
        """eos_token_ids: the model's own. max_logprobs: as in `Config`."""
        self.tokenizer = tokenizer  # may be replaced at any time
        self.vocab_size = vocab_size
        self.own_eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self.max_logprobs = max_logprobs
        self.templates: Any = None  # the `TemplateProcess`, once `chat/templates.py` has made one
        self.max_model_len: int | None = None  # a text that cannot fit is not tokenised; None: no limit
        self._detokenizers: dict[bool, Detokenizer] = {}  # by whether special tokens are skipped

    @property
    def eos_token_ids(self) -> list[int]:
        """The end-of-sequence tokens: the model's own and, as in vLLM, the tokenizer's."""
        ids, own = self.own_eos, None if self.tokenizer is None else self.tokenizer.eos_token_id
        return ids if own is None or own >= self.vocab_size or own in ids else [*ids, own]

    def close(self) -> None:
        """End the process that applies chat templates, if there is one."""
        if self.templates is not None:
            self.templates.close()

    def make_requests(
        self,
        prompts: Sequence[Prompt | BadRow],
        params: Sequence[SamplingParams | BadRow],
        first_id: int,
        rows: Sequence[int] = (),
        on_error: str = "raise",
    ) -> list[Request | BadRow]:
        """Check and tokenise the prompts. first_id: the id of the request of row 0.

        params: checked, one for each prompt. rows: of the prompts in their call; else they are all of it.
        on_error: with "return", an exception of a request's logits processor ends that request alone.

        A bad prompt stays in the list, and bad parameters replace theirs. A ValueError replaces a prompt
        without tokens or with a token id outside the vocabulary. The same holds if the parameters have such
        an id or an invalid constraint, or need a tokenizer (stop strings, bad words, structured outputs) and
        there is none, and for a text that `check_length` refuses. Raises ImportError without llguidance.
        """
        encoded, places = self._encode(prompts), rows or range(len(prompts))
        packed = portions([ids for ids in encoded if isinstance(ids, array)], ENCODED_BYTES, len)
        highest = max([np.frombuffer(b"".join(some), np.uint32).max(initial=0) for some in packed], default=0)
        known: dict[int, _OutputIds | BadRow] = {}  # by the identity of the SamplingParams

        def make(row: int, prompt: Prompt, param: SamplingParams | BadRow, ids: Any) -> Request:
            are_known = highest < self.vocab_size and isinstance(ids, array) and ids
            token_ids = ids if are_known else self._pack(prompt, ids)
            if not isinstance(param, SamplingParams):
                raise param
            if id(param) not in known:
                known[id(param)] = attempt(self._output_ids, param)
            meaning = known[id(param)]
            if isinstance(meaning, Exception):
                raise ValueError(f"{prompt.where}: {meaning}")
            stop_token_ids, bad_words, constraint = meaning
            return Request(
                first_id + row,
                prompt.text,
                token_ids,
                param.guarded() if on_error == "return" and param.logits_processors else param,
                stop_token_ids,
                bad_words,
                constraint,
                index=row,
                first_scored=None if param.prompt_logprobs is None else 1,
                tools=prompt.tools,
            )

        return [
            attempt(make, row, prompt, param, ids) if isinstance(prompt, Prompt) else prompt
            for row, prompt, param, ids in zip(places, prompts, params, encoded, strict=True)
        ]

    def stop_strings(self, request: Request, always: bool = False) -> Any:
        """Return the `StopStrings` of one completion of the request; None if it has no stop strings.

        always: return one even without stop strings, to decode the text in parts; None only if outputs have
        no text.
        """
        has_text = self.tokenizer is not None and request.params.detokenize
        if not (request.params.stop or (always and has_text)):
            return None
        return self.extras.stop_strings(request, self._detokenizer(request.params))

    def completion(
        self, request: Request, index: int, token_ids: list[int], finish_reason: str, stop_token: int | None
    ) -> CompletionOutput:
        """Return completion `index` of the request. stop_token: the token that ended it, if any."""
        # A stop token is always in `token_ids`, but in the text only if requested.
        is_cut = finish_reason == "stop" and not request.params.include_stop_str_in_output
        text = self._text(request, token_ids[:-1] if is_cut else token_ids)
        stop_reason = None if stop_token is None or self._is_eos(stop_token, request.params) else stop_token
        return CompletionOutput(index, text, token_ids, finish_reason=finish_reason, stop_reason=stop_reason)

    @cached_property
    def extras(self) -> Any:
        """What makes constraints and logprobs, on first use."""
        return _EXTRAS["texts"](self)

    def output(
        self,
        request: Request,
        completions: list[CompletionOutput],
        metrics: RequestMetrics,
        scores: list[Any],
        num_cached_tokens: int = 0,
        pooled: np.ndarray | None = None,
        dead_end: tuple[str, int] | None = None,
    ) -> RequestOutput:
        """Return the output of the request, from its completions in order, the scores of prompt tokens, and
        the sum [hidden_size] of the prompt's hidden states. dead_end: where its constraint allowed no token:
        llguidance's message, if any, and the number of tokens before."""
        first = request.first_scored
        failed = "error" in [completion.finish_reason for completion in completions]
        return RequestOutput(
            request_id=str(request.request_id),
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=None if first is None else self.extras.prompt_logprobs(request, scores),
            outputs=completions,
            metrics=metrics,
            num_cached_tokens=num_cached_tokens,
            error=self.extras.failure(request, dead_end) if failed else None,
            index=request.index,
            pooled=pooled,
        )

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The checked token ids of prompts; ValueError as in `make_requests`."""
        rows = zip(prompts, self._encode(prompts), strict=True)
        return [self._pack(prompt, ids).tolist() for prompt, ids in rows]

    def check_length(self, text: str, where: str) -> None:
        """ValueError for a text that cannot fit, however the rest of its request is. Tokenises nothing."""
        if self.tokenizer is not None and self.max_model_len is not None and len(text) >= LONG_TEXT:
            self.extras.check_length(text, where, self.max_model_len)

    def _output_ids(self, params: SamplingParams) -> _OutputIds:
        """Tokenise and compile the parameters. ValueError and ImportError as in `make_requests`."""
        if params.stop and self.tokenizer is None:
            raise self.extras.needs_tokenizer("stop", params.stop)
        stop_ids = list(params.stop_token_ids or ())
        pack_token_ids(stop_ids, self.vocab_size, "stop_token_ids", ordered=False)
        if _ends_with_eos(params):
            stop_ids += self.eos_token_ids
        bad_words, constraint = self.extras.compiled(params) if has_extras(params) else ((), None)
        return frozenset(stop_ids), bad_words, constraint

    def _encode(self, prompts: Sequence[Prompt | BadRow]) -> list[Sequence[int] | BadRow]:
        """The token ids of each prompt, or the error of a bad one."""
        found = [
            attempt(self._given_ids, prompt) if isinstance(prompt, Prompt) else prompt for prompt in prompts
        ]
        for special in (True, False):
            texts = {
                row: str(prompt.text)
                for row, prompt in enumerate(prompts)
                if found[row] is None and isinstance(prompt, Prompt) and prompt.add_special_tokens is special
            }
            if texts:
                assert self.tokenizer is not None
                found_ids = encode(self.tokenizer, list(texts.values()), add_special_tokens=special)
                for row, ids in zip(texts, found_ids, strict=True):
                    found[row] = ids
        return [ids for ids in found if ids is not None]

    def _given_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """The prompt's token ids; None for a string that is to be tokenised."""
        if prompt.token_ids is None:
            if self.tokenizer is None:
                raise ValueError(f"{prompt.where} is a string, and skip_tokenizer_init=True; pass token ids")
            self.check_length(str(prompt.text), prompt.where)
        return prompt.token_ids

    def _pack(self, prompt: Prompt, ids: Sequence[int] | BadRow) -> array[int]:
        """The prompt's token ids."""
        if isinstance(ids, Exception):
            raise ids
        if not ids:
            raise ValueError(f"{prompt.where} has no tokens: {prompt.text!r}")
        return pack_token_ids(ids, self.vocab_size, prompt.where)

    def _text(self, request: Request, output_ids: list[int]) -> str:
        if self.tokenizer is None or not request.params.detokenize:
            return ""
        return self._detokenizer(request.params).text(request.prompt_token_ids, output_ids)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        """The detokenizer for these parameters and the current tokenizer."""
        assert self.tokenizer is not None
        skip_special = params.skip_special_tokens
        made = self._detokenizers.get(skip_special)
        if made is None or made.tokenizer is not self.tokenizer:
            made = self._detokenizers[skip_special] = Detokenizer(self.tokenizer, skip_special)
        return made

    def _is_eos(self, token_id: int, params: SamplingParams) -> bool:
        """Whether `token_id` is the model's own end-of-sequence token: the tokenizer's, or its only one."""
        eos = self.own_eos if self.tokenizer is None else [self.tokenizer.eos_token_id]
        return eos == [token_id] and _ends_with_eos(params)


def _ends_with_eos(params: SamplingParams) -> bool:
    """Whether the model's end-of-sequence tokens end an output. A constraint decides where they may occur."""
    return not params.ignore_eos or params.structured_outputs is not None


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each string. transformers' warnings about long strings are off: the engine
    checks the length.

    Several calls of the tokenizer limit its memory, and let signals act between them. A string that is longer
    than this is tokenised in another thread, because that takes long and no signal ends it. After Ctrl-C the
    thread goes on, and what it finds is dropped.
    """

    def encode_some(some: list[str]) -> list[list[int]]:
        return tokenizer(some, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    found: list[list[int]] = []
    for some in portions(texts, ENCODED_BYTES, num_bytes):
        if len(some) > 1 or num_bytes(some[0]) <= ENCODED_BYTES:
            found += encode_some(some)
            continue
        future: Future[list[list[int]]] = Future()
        threading.Thread(target=_fulfil, args=(future, encode_some, some), daemon=True).start()
        while not future.done():  # a signal that comes just before a wait acts after it
            wait([future], _WAIT_SECONDS)
        found += future.result()
    return found


def _fulfil(future: Future[Any], call: Callable[[list[str]], Any], texts: list[str]) -> None:
    try:
        future.set_result(call(texts))
    except BaseException as error:
        future.set_exception(error)


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
