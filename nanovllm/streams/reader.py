"""PromptReader: reads prompts from iterables of any length, in batches, and no further than requested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from time import perf_counter
from typing import Any

from nanovllm.checks import BadRow, attempt
from nanovllm.inputs import NUMBERS, PromptLike, show
from nanovllm.params import SamplingParams
from nanovllm.text.prompts import Prompt, check_params, parse_prompt, parse_sampling_params, split_prompts

READ_SECONDS = 0.005  # time limit for reading a batch, checked after each prompt
_READ_CHARS = 2**22  # of text in a batch, checked after each prompt
_END = object()


class PromptReader:
    """Reads prompts in the forms of `generate`, with one SamplingParams for all or one for each."""

    ended = False  # whether all prompts were read

    def __init__(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Iterable[SamplingParams],
    ) -> None:
        """Reads nothing yet. ValueError or TypeError for wrong parameters, or for a wrong number of them if
        both lengths are known."""
        self._prompts = prompts
        self._items: Iterator[Any] | None = None  # of `_prompts`, from the first read on
        self._where = ""
        self._index = 0  # of the next prompt
        self._same: SamplingParams | None = None
        self._params: Iterator[SamplingParams] = iter(())
        if isinstance(sampling_params, SamplingParams):
            self._same = check_params(sampling_params, "sampling_params")
            return
        if isinstance(sampling_params, (str, Mapping)) or not isinstance(sampling_params, Iterable):
            raise TypeError(
                f"sampling_params must be SamplingParams or an iterable of them, not {show(sampling_params)}"
            )
        if isinstance(prompts, (list, tuple)) and isinstance(sampling_params, Sized):
            many = not prompts or not isinstance(prompts[0], NUMBERS)
            num_prompts = len(prompts) if many else 1
            if len(sampling_params) != num_prompts:
                raise self._unequal(f"{len(sampling_params)} sampling_params for {num_prompts} prompts")
        self._params = iter(sampling_params)

    def read(self, most: int) -> tuple[int, list[Prompt | BadRow], list[SamplingParams | BadRow]]:
        """Return up to `most` prompts, at least one unless all were read: the index of the first one among
        all prompts, the prompts, and the checked parameters of each.

        Raises the iterables' own errors, TypeError if `prompts` is not iterable, and ValueError if one
        iterable ends before the other.
        """
        if self._items is None:
            self._items, self._where = split_prompts(self._prompts)
        first = self._index
        prompts: list[Prompt | BadRow] = []
        params: list[Any] = []
        num_chars = 0
        until = perf_counter() + READ_SECONDS
        while len(prompts) < most and num_chars < _READ_CHARS and not (prompts and perf_counter() > until):
            item, param = next(self._items, _END), self._same or next(self._params, _END)
            if item is _END:
                self.ended = True
                if self._same is None and param is not _END:
                    raise self._unequal(
                        f"prompts end after {first + len(prompts)}, but sampling_params do not"
                    )
                break
            if param is _END:
                raise self._unequal(f"sampling_params end after {first + len(prompts)}, but prompts do not")
            prompt = attempt(parse_prompt, item, self._where.format(first + len(prompts)))
            num_chars += len(prompt.text or "") if isinstance(prompt, Prompt) else 0
            prompts.append(prompt)
            params.append(param)
        self._index += len(prompts)
        if self._same is None:
            params = parse_sampling_params(params, len(params), first)
        return first, prompts, params

    @staticmethod
    def _unequal(what: str) -> ValueError:
        return ValueError(f"{what}; pass one for all or one for each")
