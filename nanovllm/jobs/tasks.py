"""Tasks: the prompt and parameters of a row; and the JSON of its answer.

`RowFormat` is the interface of row formats; `PlainFormat` reads columns. Renders and runs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from nanovllm.errors import raise_first
from nanovllm.jobs.logprobs import plain_logprobs
from nanovllm.jobs.params import PARAMS_COLUMN, ParamsMaker, own_params
from nanovllm.jobs.sources import SourceRow, Values, parse_json
from nanovllm.outputs import EmbeddingRequestOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.conversations import parse_conversations
from nanovllm.text.prompts import show

Kind: TypeAlias = Literal["generate", "embed"]


@dataclass(slots=True)
class Task:
    """A row that can run.

    id: of the row in its file. prompt: a string, token ids, or with `is_chat` a list of messages; for "embed"
    a list of strings and lists of token ids. template: arguments of `LLM.chat` for this row. request: the
    parts of an OpenAI body that the answer repeats. place, num_bytes: as in `SourceRow`.
    """

    index: int
    id: Any
    prompt: Any
    params: SamplingParams
    is_chat: bool = False
    kind: Kind = "generate"
    template: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    num_bytes: int = 0


class RowFormat(ABC):
    """Reads rows as tasks, and writes answers as dictionaries for JSON."""

    columns: set[str] | None = None  # the columns that it uses; None: each row's keys decide
    default_params: Mapping[str, Any] = MappingProxyType({})  # of rows, beneath `--sampling`
    params_of_several: Mapping[str, Any] = MappingProxyType({})  # the same, of rows with `n` above 1

    def __init__(self, params: ParamsMaker) -> None:
        self.params = params

    @abstractmethod
    def task(self, row: SourceRow, values: Values) -> Task:
        """Return the task of a row. ValueError or TypeError if the row is wrong."""

    @abstractmethod
    def row_id(self, values: Values) -> Any:
        """Return the id of a row, None if it has none."""

    @abstractmethod
    def answer(self, task: Task, output: RequestOutput) -> dict[str, Any]:
        """Return the answer to a task."""

    def embeddings(self, task: Task, outputs: Sequence[EmbeddingRequestOutput]) -> dict[str, Any]:
        """Return the answer to a task of the kind "embed", with one output for each of its prompts."""
        raise TypeError(f"{type(self).__name__} makes no tasks of the kind {task.kind!r}")

    @abstractmethod
    def error(self, index: int, row_id: Any, message: str) -> dict[str, Any]:
        """Return the error row of a row."""


@dataclass(frozen=True)
class Columns:
    """The column of a row's prompt: one of three options, or all None for its `prompt` or `messages`."""

    prompt: str | None = None
    template: str | None = None
    messages: str | None = None
    id: str | None = None  # None: `id` or `custom_id`, if there is one

    def needed(self) -> list[str]:
        """The required columns; ValueError for a wrong template."""
        if self.template is None:
            return [name for name in (self.prompt, self.messages, self.id) if name is not None]
        try:
            parts = [name for _, name, _, _ in Formatter().parse(self.template) if name is not None]
        except ValueError as error:
            raise ValueError(f"the template {self.template!r}: {error}; write {{{{ for a brace") from None
        names = [name.partition(".")[0].partition("[")[0] for name in parts]
        if not names or not all(names):
            raise ValueError(f"the template {self.template!r} must name a column in braces, such as {{text}}")
        return [*dict.fromkeys(names), *filter(None, [self.id])]


DEFAULTS = {"prompt", "messages"}  # columns of the prompt if none is given
NOT_GIVEN: tuple[Any, ...] = (
    None,
    "",
    [],
)  # values of a prompt that a row has not; an empty cell of CSV is ""


class PlainFormat(RowFormat):
    """Rows with columns: a prompt, and optionally an id and a dictionary `sampling_params`."""

    def __init__(self, params: ParamsMaker, columns: Columns) -> None:
        """ValueError for a wrong template."""
        super().__init__(params)
        self._where = columns
        self.needed = columns.needed()
        self._filled = replace(columns, id=None).needed()  # of a template
        self._ids = ("id", "custom_id") if columns.id is None else (columns.id,)
        self.needs_default = (columns.prompt, columns.template, columns.messages) == (None, None, None)
        self.columns = {PARAMS_COLUMN, *self._ids, *self.needed}
        if self.needs_default:
            self.columns |= DEFAULTS

    def task(self, row: SourceRow, values: Values) -> Task:
        for name in self.needed:
            if name not in values:
                raise ValueError(f"there is no column {name!r}; there are {_names(values)}")
        prompt, is_chat = self._prompt(values)
        params = self.params.make(row.index, own_params(values.get(PARAMS_COLUMN)))
        return Task(row.index, self.row_id(values), prompt, params, is_chat, place=row.place)

    def row_id(self, values: Values) -> Any:
        return next((values[name] for name in self._ids if values.get(name) is not None), None)

    def answer(self, task: Task, output: RequestOutput) -> dict[str, Any]:
        texts = [each.text for each in output.outputs]
        reasons = [each.finish_reason for each in output.outputs]
        more: dict[str, Any] = {}
        if len(texts) > 1:
            more = {"texts": texts, "finish_reasons": reasons}
        if output.outputs[0].logprobs is not None:
            more["logprobs"] = [plain_logprobs(each) for each in output.outputs]
        return {
            "index": task.index,
            "id": task.id,
            "text": texts[0],
            "finish_reason": reasons[0],
            **more,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(each.token_ids) for each in output.outputs),
            "error": None,
        }

    def error(self, index: int, row_id: Any, message: str) -> dict[str, Any]:
        return {
            "index": index,
            "id": row_id,
            "text": None,
            "finish_reason": "error",
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "error": message,
        }

    def _prompt(self, values: Values) -> tuple[Any, bool]:
        """The prompt of a row, and whether it is a conversation."""
        where = self._where
        if where.template is not None:
            if empty := [name for name in self._filled if values[name] is None]:
                raise ValueError(f"column {empty[0]!r} is null, and the template needs it; give it a value")
            return fill(where.template, values), False
        if where.messages is not None:
            return conversation(values[where.messages], where.messages), True
        if where.prompt is not None:
            return prompt_of(values[where.prompt], f"column {where.prompt!r}"), False
        given = [name for name in ("prompt", "messages") if values.get(name) not in NOT_GIVEN]
        if len(given) == 2:
            raise ValueError(
                "it has both 'prompt' and 'messages'; leave one of them out, or choose a column for all "
                "rows with --prompt-column or --messages-column"
            )
        if given == ["messages"] or ("messages" in values and "prompt" not in values):
            return conversation(values["messages"], "messages"), True
        if "prompt" not in values:
            raise ValueError(
                f"there is no column 'prompt' or 'messages'; there are {_names(values)}: say which one with "
                "--prompt-column, --messages-column or --template"
            )
        return prompt_of(values["prompt"], "column 'prompt'"), False


def fill(template: str, values: Values) -> str:
    """Fill a row's values into the braces of the template, like `str.format`."""
    try:
        return template.format_map(values)
    except Exception as error:  # formatting may raise anything
        raise ValueError(f"the template cannot be filled: {type(error).__name__}: {error}") from None


def prompt_of(value: Any, where: str) -> str | array[int]:
    """Return a string unchanged, or token ids as a compact array; TypeError for anything else.

    The vocabulary is checked later, when the prompt runs.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and set(map(type, value)) == {int}:
        try:
            return array("i", value)
        except OverflowError:
            raise ValueError(f"{where} has a token id that does not fit into 32 bits") from None
    raise TypeError(f"{where} must be a string or a list of token ids, not {show(value)}")


def conversation(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the messages, of a text those that it holds as JSON. ValueError or TypeError for a wrong one."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(
                f"column {column!r} is a string, but not a JSON list of messages: {error}"
            ) from None
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        raise TypeError(f"column {column!r} must be a list of messages, not {show(value)}")
    rows = parse_conversations([value])
    try:
        raise_first(rows)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("conversation 0", f"column {column!r}", 1)) from None
    messages = rows[0]
    assert isinstance(messages, list)
    return messages


def _names(values: Sequence[str] | Values) -> str:
    names = [repr(name) for name in values]
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "none"
