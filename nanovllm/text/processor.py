"""Processor: prompts become Requests, and tokens become the outputs of requests.

Owns the tokenizer. Keeps no request; knows neither blocks nor tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.prompts import Prompt, pack_token_ids
from nanovllm.text.request import Request
from nanovllm.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Processor:
    """Text on the one side, token ids on the other; without a tokenizer there are only ids."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """eos_token_ids: the model's own, which end every completion that does not ignore them."""
        self.tokenizer = tokenizer  # may be replaced at any time
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._detokenizers: dict[bool, Detokenizer] = {}  # by whether special tokens are left out

    def make_requests(
        self, prompts: list[Prompt], params: list[SamplingParams], where: list[str], first_id: int
    ) -> list[Request]:
        """Check and tokenise the prompts; the ids of the requests count up from `first_id`.

        params: checked, one for each prompt. where: what an error calls each prompt.
        Raises ValueError for a prompt without tokens, for a token id that is not in the vocabulary, and for
        stop strings where there is no tokenizer.
        """
        requests = []
        stop_token_ids: dict[int, frozenset[int]] = {}  # by the identity of the SamplingParams
        all_ids = self._tokenize(prompts, where)
        for index, (prompt, ids, param) in enumerate(zip(prompts, all_ids, params, strict=True)):
            packed = pack_token_ids(ids, self._vocab_size, where[index])
            if id(param) not in stop_token_ids:
                stop_token_ids[id(param)] = self._stop_token_ids(param, where[index])
            stop_ids = stop_token_ids[id(param)]
            requests.append(Request(first_id + index, prompt.text, ids, packed, param, stop_ids))
        return requests

    def stop_strings(self, request: Request) -> StopStrings | None:
        """Return what finds the request's stop strings in one of its completions; None when it has none."""
        if not request.params.stop:
            return None
        stream = self._detokenizer(request.params).stream(request.prompt_token_ids)
        return StopStrings(request.params.stop, stream)

    def completion(
        self, request: Request, index: int, token_ids: list[int], finish_reason: str, stop_token: int | None
    ) -> CompletionOutput:
        """Return completion `index` of the request; `stop_token` is the token that ended it, if one did."""
        # A token that ended the completion is one of its ids, and no part of its text unless that is asked.
        is_cut = finish_reason == "stop" and not request.params.include_stop_str_in_output
        text = self._text(request, token_ids[:-1] if is_cut else token_ids)
        stop_reason = None if self._is_eos(stop_token, request.params) else stop_token
        return CompletionOutput(index, text, token_ids, finish_reason, stop_reason)

    def stopped_completion(
        self, request: Request, index: int, token_ids: list[int], stop: StopStrings
    ) -> CompletionOutput:
        """Return completion `index` of the request, in which `stop` has found a stop string."""
        text = stop.text(request.params.include_stop_str_in_output)
        return CompletionOutput(index, text, token_ids[: stop.num_tokens], "stop", stop.found)

    def _stop_token_ids(self, params: SamplingParams, where: str) -> frozenset[int]:
        """All token ids that end a completion. ValueError as for `make_requests`."""
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"{where}: stop={params.stop!r} needs a tokenizer, and skip_tokenizer_init=True; "
                "use stop_token_ids"
            )
        stop_ids = list(params.stop_token_ids or ())
        pack_token_ids(stop_ids, self._vocab_size, f"{where} stop_token_ids")
        return frozenset(stop_ids if params.ignore_eos else [*stop_ids, *self._eos_token_ids])

    def _tokenize(self, prompts: list[Prompt], where: list[str]) -> list[list[int]]:
        texts = [prompt.text for prompt in prompts if prompt.token_ids is None]
        encoded: list[list[int]] = []
        if texts:
            if self.tokenizer is None:
                index = next(i for i, prompt in enumerate(prompts) if prompt.token_ids is None)
                raise ValueError(f"{where[index]} is a text, and skip_tokenizer_init=True; pass token ids")
            encoded = self.tokenizer(texts)["input_ids"]
        rest = iter(encoded)
        all_ids = [next(rest) if prompt.token_ids is None else prompt.token_ids for prompt in prompts]
        for index, ids in enumerate(all_ids):
            if not ids:
                raise ValueError(f"{where[index]} has no tokens: {prompts[index].text!r}")
        return all_ids

    def _text(self, request: Request, output_ids: list[int]) -> str:
        if self.tokenizer is None or not request.params.detokenize:
            return ""
        return self._detokenizer(request.params).text(request.prompt_token_ids, output_ids)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        """The detokenizer for these parameters, of the tokenizer that there is now."""
        assert self.tokenizer is not None
        skip_special = params.skip_special_tokens
        made = self._detokenizers.get(skip_special)
        if made is None or made.tokenizer is not self.tokenizer:
            made = self._detokenizers[skip_special] = Detokenizer(self.tokenizer, skip_special)
        return made

    def _is_eos(self, token_id: int | None, params: SamplingParams) -> bool:
        """Whether `token_id` is the model's own end-of-sequence token: the tokenizer's, or its only one."""
        all_eos = self._eos_token_ids
        only = all_eos[0] if len(all_eos) == 1 else None
        eos = only if self.tokenizer is None else self.tokenizer.eos_token_id
        return token_id == eos and eos in all_eos and not params.ignore_eos


def join_completions(
    request: Request, completions: list[CompletionOutput], num_cached_tokens: int
) -> RequestOutput:
    """Return what the request returns, given all of its completions in order."""
    failed = any(completion.finish_reason == "error" for completion in completions)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=completions,
        num_cached_tokens=num_cached_tokens,
        error="the model's logits were not finite" if failed else None,
    )
