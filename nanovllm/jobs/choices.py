"""Choices: the tokens of each choice behind a prompt, as a tree, and the choices' scores.

A score is the sum of the logprobs along a choice's tokens, so choices that share their first tokens are told
apart. Plans prompts and adds up what they return; runs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.answers import RequestOutput
from nanovllm.checks import BadRow, attempt
from nanovllm.extras.params import MAX_ASKED
from nanovllm.extras.structured_outputs import check_choices
from nanovllm.params import SamplingParams
from nanovllm.reasoning.marks import REASONING, Thinking
from nanovllm.text.processor import encode
from nanovllm.text.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEPT_ENDS = 1000  # ends of prompts whose choices stay tokenised
_MOST_CHOICES = 1000
_Ids = tuple[int, ...]


def parse_choices(text: str) -> list[str]:
    """The choices of `a,b,c` or of a JSON list of strings. ValueError for fewer than two, and for one that is
    empty or comes twice."""
    try:
        found = json.loads(text) if text.startswith("[") else text.split(",")
    except ValueError as error:
        raise ValueError(f"{text!r} is no JSON list of choices: {error}") from None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f'choices are a,b,c or a JSON list of strings, such as ["a", "b"], not {text!r}')
    if not 2 <= len(found) <= _MOST_CHOICES:
        raise ValueError(f"there are 2 to {_MOST_CHOICES:,} choices, not {len(found)}: {text[:200]!r}")
    check_choices(found)
    return found


class Query(NamedTuple):
    """A prompt that draws one token, and whose answer has the logprobs of `asked` at that place."""

    token_ids: list[int]
    asked: _Ids


@dataclass(frozen=True, slots=True)
class Plan:
    """What a prompt's choices need.

    num_prompt_tokens: of the prompt itself. lengths: tokens of each choice. queries: to run. steps: of each
    choice, for each of its tokens the query that tells its logprob, and the token. Where scores count the end
    of the answer, the last step has all tokens that end one.
    """

    num_prompt_tokens: int
    lengths: list[int]
    queries: list[Query]
    steps: list[list[list[tuple[int, int]]]]

    def logprobs(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """The score of each choice, from the output of each query. ValueError if one is not a number."""
        found: list[Mapping[int, Any]] = []
        for output in outputs:
            rows = output.outputs[0].logprobs
            assert rows is not None
            found.append(rows[0])
        scores = []
        for steps in self.steps:
            score = sum(log_of_sum([found[query][token].logprob for query, token in step]) for step in steps)
            if math.isnan(score):
                raise ValueError("the model's logits were not finite")
            scores.append(score)
        return scores


def log_of_sum(logprobs: Sequence[float]) -> float:
    """The logarithm of the sum of probabilities; -inf if all are 0."""
    most = max(logprobs)
    if math.isinf(most) or math.isnan(most):
        return most
    return most + math.log(sum(math.exp(each - most) for each in logprobs))


def shares(scores: Sequence[float]) -> list[float]:
    """The probability of each choice among all. ValueError if none has any."""
    whole = log_of_sum(scores)
    if math.isinf(whole):
        raise ValueError("the model gives each of the choices the probability 0")
    return [math.exp(each - whole) for each in scores]


class Choices:
    """The choices of a job.

    If the tokens of one choice begin another one, as those of "1" may begin "10", each score also counts the
    end of the answer. So no two choices ever count the same answer, and their probabilities may be compared.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, ends: Callable[[], Sequence[int]]
    ) -> None:
        """ends: returns the tokens that end an answer."""
        self.texts, self._tokenizer = texts, tokenizer
        self._find_ends = ends
        self._special = [str(each) for each in tokenizer.all_special_tokens if each]
        # By the end of a prompt: how many of its last tokens another spelling replaces, and each choice's.
        self._known: dict[str, tuple[list[int], list[list[int]]]] = {}
        self._params: dict[_Ids, SamplingParams] = {}

    def params(self, query: Query) -> SamplingParams:
        """The parameters of a query; equal ones are the same object."""
        if query.asked not in self._params:
            self._params[query.asked] = SamplingParams(
                temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprob_token_ids=query.asked
            )
        return self._params[query.asked]

    def plans(self, prompts: Sequence[Prompt | BadRow]) -> list[Plan | BadRow]:
        """The plan of each prompt; an error stays in its place, or replaces a prompt without one."""
        encoded: dict[int, list[int]] = {}
        for special in (True, False):
            texts = {
                row: str(prompt.text)
                for row, prompt in enumerate(prompts)
                if isinstance(prompt, Prompt)
                and prompt.token_ids is None
                and prompt.add_special_tokens is special
            }
            if texts:
                encoded |= zip(texts, encode(self._tokenizer, [*texts.values()], special), strict=True)
        return [
            attempt(self._plan, prompt, encoded.get(row)) if isinstance(prompt, Prompt) else prompt
            for row, prompt in enumerate(prompts)
        ]

    def _plan(self, prompt: Prompt, ids: list[int] | None) -> Plan:
        ids = list(prompt.token_ids or ()) if ids is None else ids
        wholes = self._wholes(prompt, ids)
        start = min(_same(ids, whole) for whole in wholes)
        if start == 0:
            raise ValueError(
                "the prompt has no token of its own before the choices; begin it with other text"
            )
        tails = [tuple(whole[start:]) for whole in wholes]
        self._check(tails)
        ordered = sorted(tails)
        ends = self._ends if any(b[: len(a)] == a for a, b in pairwise(ordered)) else ()
        asked: dict[_Ids, dict[int, None]] = {}  # by the tokens before it, the tokens that may follow
        for tail in tails:
            for place, token in enumerate(tail):
                asked.setdefault(tail[:place], {})[token] = None
            if ends:
                asked.setdefault(tail, {}).update(dict.fromkeys(ends))
        queries: list[Query] = []
        where: dict[tuple[_Ids, int], int] = {}
        for before, tokens in asked.items():
            rest = iter(tokens)
            while some := tuple(islice(rest, MAX_ASKED)):
                where |= {(before, token): len(queries) for token in some}
                queries.append(Query([*ids[:start], *before], some))
        steps = [
            [[(where[tail[:place], token], token)] for place, token in enumerate(tail)]
            + ([[(where[tail, token], token) for token in ends]] if ends else [])
            for tail in tails
        ]
        lengths = [max(1, len(whole) - len(ids)) for whole in wholes]
        return Plan(len(ids), lengths, queries, steps)

    def _wholes(self, prompt: Prompt, ids: list[int]) -> list[list[int]]:
        """The tokens of the prompt with each choice: of both texts together, so a token may span them."""
        text = prompt.text if prompt.token_ids is None else None
        if text is None:
            return [[*ids, *each] for each in self._behind("")[1]]
        # A special token parts a text, so what is before the last one does not matter behind it.
        last = max((text.rfind(each) for each in self._special), default=-1)
        if last > 0:
            before, behind = self._behind(text[last:])
            if before and ids[-len(before) :] == before:
                return [[*ids[: -len(before)], *each] for each in behind]
        self._check_thinking(text)
        return encode(self._tokenizer, [text + each for each in self.texts], prompt.add_special_tokens)

    def _behind(self, text: str) -> tuple[list[int], list[list[int]]]:
        """The tokens of the end of a prompt, alone and with each choice."""
        if text not in self._known:
            self._check_thinking(text)
            if len(self._known) >= _KEPT_ENDS:
                self._known.clear()
            both = [text, *(text + each for each in self.texts)] if text else [*self.texts]
            found = encode(self._tokenizer, both, False)
            before, behind = (found[0], found[1:]) if text else ([], found)
            self._known[text] = before, behind
        return self._known[text]

    def _check_thinking(self, text: str) -> None:
        """ValueError if the end of a prompt opens the thinking of a model, where no answer stands."""
        for family in REASONING.values():
            if isinstance(family, Thinking) and text.rstrip().endswith(
                (family.start, family.start + family.label.rstrip())
            ):
                raise ValueError(
                    f"the prompt ends with {family.start}, so the model would think first, and choices are "
                    "scored where its answer begins; switch thinking off, for many models with "
                    "--chat-template-kwargs '{\"enable_thinking\": false}'"
                )

    def _check(self, tails: Sequence[_Ids]) -> None:
        for place, tail in enumerate(tails):
            if not tail:
                raise ValueError(f"the choice {self.texts[place]!r} has no tokens behind the prompt")
            if tail in tails[:place]:
                other = self.texts[tails.index(tail)]
                raise ValueError(
                    f"the choices {other!r} and {self.texts[place]!r} have the same tokens; leave one out"
                )

    @cached_property
    def _ends(self) -> _Ids:
        ends = tuple(dict.fromkeys(self._find_ends()))
        if not ends:
            raise ValueError(
                "the tokens of one choice begin another one, and the model has no token that ends an answer; "
                "use choices of which none begins another"
            )
        if len(ends) > MAX_ASKED:
            raise ValueError(f"the model has {len(ends)} tokens that end an answer, above {MAX_ASKED}")
        return ends


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two lists share."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
