"""The progress of `generate`, which a door shows, and after a call a hint about the length of its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nanovllm.doors import PROGRESS, Table
from nanovllm.engine.stats import StepStats
from nanovllm.outputs import RequestOutput, unlisted
from nanovllm.params import MAX_TOKENS, Default, SamplingParams

logger = logging.getLogger("nanovllm")

_PROGRESS: Table[Any] = Table(PROGRESS)


class Progress:
    """Is told of steps and shows nothing."""

    def update(self, stats: StepStats) -> None: ...

    def refused(self, count: int) -> None:
        """Count requests that cannot run as done."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None: ...


def progress_of(total: int, use_tqdm: bool | Callable[..., Any]) -> Progress:
    """What shows the progress of `total` requests: nothing for a single one, unless `use_tqdm` is a class
    like tqdm.tqdm. TypeError for what is no bool and no such class."""
    if not callable(use_tqdm) and not isinstance(use_tqdm, bool):
        raise TypeError(f"use_tqdm must be True, False or a class like tqdm.tqdm, not {use_tqdm!r}")
    if not use_tqdm or (use_tqdm is True and total <= 1):
        return Progress()
    shown: Progress = _PROGRESS["shown"](total, use_tqdm)
    return shown


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
