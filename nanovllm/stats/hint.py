"""LengthHint: after a call, a hint about the length of its answers. Changes no answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from nanovllm.answers import RequestOutput, unlisted
from nanovllm.checks import Default
from nanovllm.params import MAX_TOKENS, SamplingParams

logger = logging.getLogger("nanovllm")


class LengthHint:
    """Says once a call that most of its answers were cut off at the default `max_tokens`."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._defaults: set[int] = set()  # indexes of the prompts that have no limit of their own
        self._num_answers = self._num_cut = 0

    def asked(self, first_index: int, params: Sequence[object]) -> None:
        """Note the parameters of prompts, from that of `first_index` on."""
        for index, each in enumerate(params, first_index):
            if isinstance(each, SamplingParams) and isinstance(each.max_tokens, Default):
                self._defaults.add(index)

    def answered(self, outputs: Iterable[RequestOutput]) -> None:
        """Count answers, or the last parts of answers."""
        for output in outputs:
            fits = len(unlisted(output, "prompt_token_ids")) + MAX_TOKENS <= self._max_model_len
            for each in output.outputs:
                self._num_answers += each.finished()
                self._num_cut += fits and each.finish_reason == "length" and output.index in self._defaults
            if output.finished:
                self._defaults.discard(output.index)

    def say(self) -> None:
        if 2 * self._num_cut > self._num_answers:
            logger.warning(
                "%d of %d answers were cut off at the default of %d tokens; set max_tokens of SamplingParams "
                "for longer ones, or to None for as many tokens as fit",
                *(self._num_cut, self._num_answers, MAX_TOKENS),
            )


def say_if_cut(max_model_len: int, params: Sequence[object], outputs: Iterable[RequestOutput]) -> None:
    """The hint about the answers of a whole call; params: of each prompt."""
    hint = LengthHint(max_model_len)
    hint.asked(0, params)
    hint.answered(outputs)
    hint.say()
