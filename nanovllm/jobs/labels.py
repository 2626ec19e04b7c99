"""Jobs with `--choice`: each row's answer is its most probable choice, and its line has the scores of all.

Asks the engine for logprobs and makes lines of them. What a score is, `choices.py` says.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from nanovllm.answers import RequestOutput
from nanovllm.chat.ends import with_written_end
from nanovllm.checks import BadRow, attempt
from nanovllm.inputs import show
from nanovllm.jobs.choices import Choices, Plan, log_of_sum, shares
from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.output import to_text
from nanovllm.jobs.params import PARAMS_COLUMN, own_params
from nanovllm.jobs.sources import SourceRow, Values
from nanovllm.jobs.tasks import PlainFormat, Renderer, Task
from nanovllm.params import SamplingParams
from nanovllm.stats.summary import counted
from nanovllm.text.prompts import Prompt, parse_prompt

LEAST_LOGPROB = -9999.0  # for JSON, which has no infinity
_DIGITS = 6
_SHOWN_CHOICES = 10
_NOTED = 0.5  # a job whose choices take less of the probability says so


class LabelFormat(PlainFormat):
    """Rows with columns, whose answers are choices."""

    def task(self, row: SourceRow, values: Values) -> Task:
        if own := own_params(values.get(PARAMS_COLUMN)):
            raise ValueError(
                f"column {PARAMS_COLUMN!r} is {show(own)}, and with --choice nothing is drawn; leave it empty"
            )
        task = super().task(row, values)
        task.kind = "choice"
        return task


class Label(NamedTuple):
    """The answer to a row: its most probable choice.

    scores: logprobs by choice. tokens: of the prompt, of the choice. read, drawn: what the queries took.
    prompt: that the model read, if it came from a text.
    """

    text: str
    scores: dict[str, float]
    tokens: tuple[int, int]
    read: int
    drawn: int
    prompt: str | None

    def line(self, task: Task) -> dict[str, Any]:
        """The record of a row."""
        parts = zip(self.scores, shares(list(self.scores.values())), strict=True)
        return {
            "index": task.index,
            "id": task.id,
            "text": self.text,
            "finish_reason": "stop",
            "choice_scores": {choice: round(share, _DIGITS) for choice, share in parts},
            "choice_logprobs": {
                choice: round(max(score, LEAST_LOGPROB), _DIGITS) for choice, score in self.scores.items()
            },
            "prompt_tokens": self.tokens[0],
            "completion_tokens": self.tokens[1],
            "error": None,
        }

    @property
    def share(self) -> float:
        """The probability of all choices together, among all answers of the model."""
        return min(1.0, math.exp(log_of_sum(list(self.scores.values()))))


def check_arguments(
    texts: Sequence[str] | None, sampling: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """JobRefusedError if `--choice` comes with what it cannot serve."""
    if texts is None:
        return
    if sampling:
        raise JobRefusedError(
            f"--sampling {to_text(dict(sampling))} sets how tokens are drawn, and with --choice none is: "
            "each row's answer is its most probable choice; leave one of them out"
        )
    for name in ("reasoning_parser", "tool_parser"):
        if options.get(name) is not None:
            raise JobRefusedError(
                f"--{name.replace('_', '-')} parts answers, and choices have no parts; leave it out"
            )
    if options.get("skip_tokenizer_init"):
        raise JobRefusedError("--choice needs a tokenizer; leave out --skip-tokenizer-init")
    mode = options.get("logprobs_mode", "raw_logprobs")
    if mode != "raw_logprobs":
        raise JobRefusedError(f"--choice needs --logprobs-mode raw_logprobs, not {mode}; leave it out")


class Labeller:
    """Labels rows: runs what their choices need, and adds up what comes back."""

    def __init__(self, texts: Sequence[str], llm: Any, renderer: Renderer) -> None:
        """llm: an LLM with a tokenizer."""
        own = llm.tokenizer.eos_token_id
        known = [*llm.model_config.eos_token_ids, *([] if own is None else [own])]
        self._llm, self._renderer = llm, renderer
        self.choices = Choices(
            texts,
            llm.tokenizer,
            lambda: with_written_end(llm.tokenizer, [*dict.fromkeys(known)], renderer.process),
        )

    def labels(
        self, portions: Iterable[list[Task]], planned: Callable[[list[tuple[Task, Plan]]], None]
    ) -> Iterator[tuple[Task, Label | BadRow]]:
        """Yield each task with its label or its error, as soon as it is known.

        planned: called with some tasks and their plans, when they are known.
        """
        open_rows: dict[int, _Open] = {}  # by the number of a query in the stream
        refused: deque[tuple[Task, BadRow]] = deque()
        params: deque[SamplingParams] = deque()

        def queries() -> Iterator[dict[str, Any]]:
            number = 0
            for some in portions:
                rendered = [_prompt_of(each) for each in self._renderer.prompts(some)]
                good: list[tuple[Task, Plan]] = []
                prompts: list[str | None] = []
                for task, prompt, plan in zip(some, rendered, self.choices.plans(rendered), strict=True):
                    if isinstance(plan, Exception):
                        refused.append((task, plan))
                    else:
                        good.append((task, plan))
                        prompts.append(prompt.text if isinstance(prompt, Prompt) else None)
                planned(good)
                for (task, plan), text in zip(good, prompts, strict=True):
                    row = _Open(task, plan, text)
                    for place, query in enumerate(plan.queries):
                        open_rows[number] = row
                        row.numbers[number] = place
                        number += 1
                        params.append(self.choices.params(query))
                        yield {"prompt_token_ids": query.token_ids}

        def parameters() -> Iterator[SamplingParams]:
            while params:
                yield params.popleft()

        stream = self._llm.stream(queries(), parameters(), on_error="return")
        with closing(stream):
            for output in stream:
                while refused:
                    yield refused.popleft()
                row = open_rows.pop(output.index)
                label = row.take(output, self.choices.texts)
                if label is not None:
                    yield row.task, label
            while refused:
                yield refused.popleft()


def _prompt_of(prompt: Any) -> Prompt | BadRow:
    if isinstance(prompt, (TypeError, ValueError)):
        return prompt
    plain = prompt.get("prompt", prompt) if isinstance(prompt, dict) else prompt  # names no key in errors
    return attempt(parse_prompt, plain, "the prompt")


class _Open:
    """A row whose queries run."""

    def __init__(self, task: Task, plan: Plan, prompt: str | None) -> None:
        self.task, self._plan, self._prompt = task, plan, prompt
        self.numbers: dict[int, int] = {}  # of its queries in the stream: their place in the plan
        self._outputs: list[RequestOutput | None] = [None] * len(plan.queries)
        self._left = len(plan.queries)

    def take(self, output: RequestOutput, texts: Sequence[str]) -> Label | BadRow | None:
        """Take the output of a query; the label after the last one, or the first error."""
        self._outputs[self.numbers[output.index]] = output
        self._left -= 1
        if self._left:
            return None
        outputs = [each for each in self._outputs if each is not None]
        for each in outputs:
            if each.error is not None:
                return ValueError(each.error.replace(f"prompts[{each.index}]", "the prompt with a choice"))
        return attempt(self._label, outputs, texts)

    def _label(self, outputs: Sequence[RequestOutput], texts: Sequence[str]) -> Label:
        scores = self._plan.logprobs(outputs)
        shares(scores)  # ValueError if all are 0
        best = max(range(len(scores)), key=scores.__getitem__)  # the first of equal ones
        read = sum(len(query.token_ids) for query in self._plan.queries)
        tokens = self._plan.num_prompt_tokens, self._plan.lengths[best]
        found = dict(zip(texts, scores, strict=True))
        return Label(texts[best], found, tokens, read, len(outputs), self._prompt)


class LabelCounts:
    """How often a run chose each choice, and what the choices have of the probability."""

    def __init__(self, texts: Sequence[str] | None) -> None:
        """texts: the choices; None for a job without."""
        self._counts: Counter[str] = Counter(dict.fromkeys(texts or (), 0))
        self._share = 0.0

    @property
    def number(self) -> int:
        return self._counts.total()

    def add(self, label: Label) -> None:
        self._counts[label.text] += 1
        self._share += label.share

    def summary(self) -> str:
        """How often each choice came, the most common first; also some that never came."""
        found = [f"{count:,} {text.strip()}" for text, count in self._counts.most_common(_SHOWN_CHOICES)]
        more = len(self._counts) - len(found)
        return ", ".join([*found, f"{counted(more, 'choice')} less often"] if more > 0 else found)

    def note(self) -> str:
        """What a user should know; "" if nothing."""
        mean = self._share / self.number if self.number else 1.0
        if mean >= _NOTED:
            return ""
        return (
            f"the choices have {mean:.2g} of the probability on average, so the model would mostly answer "
            "otherwise: name the choices in the prompt, write them as the model would (capitals; without "
            "--chat a space before them), or switch thinking off"
        )
