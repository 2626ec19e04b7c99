"""Jobs with a model that classifies: each row's answer is its likeliest label, and its line has all values.

Makes lines; `JobRunner` writes them. A model that generates keeps the format of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanovllm.answers import RequestOutput
from nanovllm.checks import BadRow
from nanovllm.inputs import show
from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.output import to_text
from nanovllm.jobs.params import PARAMS_COLUMN, own_params
from nanovllm.jobs.sources import SourceRow, Values
from nanovllm.jobs.tasks import PlainFormat, RowFormat, Task
from nanovllm.pooling_heads.head import HeadConfig
from nanovllm.pooling_heads.outputs import ClassificationRequestOutput

_DIGITS = 6


def format_for(head: HeadConfig | None, row_format: RowFormat, sampling: Mapping[str, Any]) -> RowFormat:
    """The format of a job's rows, with a model of this head. JobRefusedError for a job that the head cannot
    serve. sampling: of the command line."""
    if head is None:
        return row_format
    if type(row_format) is not PlainFormat:
        raise JobRefusedError(f"{head}; rows of an OpenAI batch and --choice need a model that generates")
    if head.each_token:
        raise JobRefusedError(f"{head}; a job classifies whole rows")
    if sampling:
        raise JobRefusedError(f"--sampling {to_text(dict(sampling))} draws tokens, and {head}; leave it out")
    if len(set(head.labels)) < len(head.labels):
        raise JobRefusedError("two labels of id2label in config.json have one name; give each its own")
    return HeadFormat(row_format)


class HeadFormat(RowFormat):
    """Rows with columns, whose answers are labels."""

    def __init__(self, plain: PlainFormat) -> None:
        super().__init__(plain.params, 0)
        self._plain, self.columns = plain, plain.columns

    def task(self, row: SourceRow, values: Values) -> Task:
        if own := own_params(values.get(PARAMS_COLUMN)):
            raise ValueError(f"column {PARAMS_COLUMN!r} is {show(own)}, and nothing is drawn; leave it empty")
        task = self._plain.task(row, values)
        task.kind = "classify"
        return task

    def row_id(self, values: Values) -> Any:
        return self._plain.row_id(values)

    def answer(self, task: Task, output: RequestOutput) -> dict[str, Any]:
        raise TypeError("a model with a head generates nothing")

    def copied(self, values: Values) -> str:
        return self._plain.copied(values)

    def error(self, index: int, row_id: Any, message: str) -> dict[str, Any]:
        return self._plain.error(index, row_id, message)


def classified(
    llm: Any, tasks: Sequence[Task], prompts: Sequence[Any]
) -> Iterator[tuple[Task, ClassificationRequestOutput | BadRow]]:
    """Each task with its output, or its error. prompts: of the tasks, or the error of one."""
    good = [each for each in prompts if not isinstance(each, Exception)]
    outputs = iter(enumerate(llm.classify(good, use_tqdm=False, on_error="return") if good else ()))
    for task, prompt in zip(tasks, prompts, strict=True):
        if isinstance(prompt, (TypeError, ValueError)):
            yield task, prompt
            continue
        number, output = next(outputs)
        error = output.error
        yield task, ValueError(error.replace(f"prompts[{number}]", "the prompt")) if error else output


def line_of(task: Task, output: ClassificationRequestOutput) -> dict[str, Any]:
    """The record of a row."""
    found = output.outputs
    return {
        "index": task.index,
        "id": task.id,
        "text": found.label,
        "finish_reason": "stop",
        "choice_scores": {
            name: round(value, _DIGITS) for name, value in zip(found.labels, found.probs, strict=True)
        },
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": 0,
        "error": None,
    }
