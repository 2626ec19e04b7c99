"""Tasks: the prompt and parameters of a row, as `LLM.stream` takes them; and the JSON of its answer.

`RowFormat` is the interface of row formats; `PlainFormat` reads columns. `Renderer` applies chat templates.
Runs nothing.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.answers import CompletionOutput, Logprob, RequestOutput, unlisted
from nanovllm.chat.conversations import check_template_options, parse_conversations, render_conversations
from nanovllm.chat.templates import TemplateProcess
from nanovllm.checks import BadRow, attempt, raise_first
from nanovllm.extras.outputs import EmbeddingRequestOutput
from nanovllm.inputs import show
from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.output import COLUMNS, PARSED, to_text
from nanovllm.jobs.params import PARAMS_COLUMN, own_params, row_params
from nanovllm.jobs.parsed import parsed_columns, thinking_of
from nanovllm.jobs.sources import SourceRow, Values, parse_json
from nanovllm.params import SamplingParams
from nanovllm.text.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULTS = {"prompt", "messages"}  # columns of the prompt if none is given
_PREFIX = "input_"  # of a column of the input whose name an answer has, too
_KEPT_NAMES = 10_000


@dataclass(slots=True)
class Task:
    """A row that can run.

    id: of the row in its file. prompt: a string, token ids, or with `is_chat` a list of messages; for "embed"
    a list of strings and lists of token ids. template: arguments of `LLM.chat` for this row. request: the
    parts of an OpenAI body that the answer repeats. columns: of the row, that its line repeats, as JSON.
    place, num_bytes: as in `SourceRow`. work: about how many tokens it takes, as `JobProgress` counts them.
    """

    index: int
    id: Any
    prompt: Any
    params: SamplingParams
    is_chat: bool = False
    kind: Literal["generate", "embed", "choice", "classify"] = "generate"
    template: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    columns: str = ""
    work: Any = None
    place: str = ""
    num_bytes: int = 0


class RowFormat(ABC):
    """Reads rows as tasks, and writes answers as dictionaries for JSON."""

    columns: set[str] | None = None  # the columns that it uses; None: each row's keys decide
    default_params: Mapping[str, Any] = MappingProxyType({})  # of rows, beneath `--sampling`
    params_of_several: Mapping[str, Any] = MappingProxyType({})  # the same, of rows with `n` above 1

    def __init__(self, params: SamplingParams, seed: int, given: Container[str] = ()) -> None:
        """params: of rows without their own. seed: the engine's. given: parameters that `--sampling` sets."""
        of_several = {name: each for name, each in self.params_of_several.items() if name not in given}
        self.params = params
        self.params_of = partial(row_params, params, seed, of_several)

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

    def copied(self, values: Values) -> str:
        """Return the columns of a row that its line repeats, as JSON. A window of rows as text takes less
        memory, and less time to visit, than their values."""
        return ""

    @abstractmethod
    def error(self, index: int, row_id: Any, message: str) -> dict[str, Any]:
        """Return the error row of a row."""


class PlainFormat(RowFormat):
    """Rows with columns: a prompt, and optionally an id and a dictionary `sampling_params`."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        prompt: str | None = None,
        template: str | None = None,
        messages: str | None = None,
        id: str | None = None,
        copied: Sequence[str] | None = (),
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        """prompt, template, messages: one of them, or all None for a row's `prompt` or `messages`. id: None
        for `id` or `custom_id`, if there is one. copied: the columns that answers repeat; None: all. chat:
        a prompt is a user's message. system: the first message of a conversation that has none of the system.
        ValueError for a wrong template, and for values that exclude each other."""
        super().__init__(params, seed)
        if chat and messages is not None:
            raise ValueError("--messages-column is of conversations already; leave out --chat")
        if system is not None and not chat and messages is None:
            raise ValueError("--system is for conversations; add --chat, or --messages-column")
        self._chat, self._system = chat, system
        self._prompts, self._template, self._messages = prompt, template, messages
        self._filled = [] if template is None else _names_in(template)
        self.needed = [*dict.fromkeys(filter(None, [*self._filled, prompt, messages, id]))]
        self._ids = ("id", "custom_id") if id is None else (id,)
        self.needs_default = (prompt, template, messages) == (None, None, None)
        self.named = [*dict.fromkeys([*self.needed, *(copied or ())])]
        self._copied = copied
        self._new_names: dict[str, str] = {}
        self.columns = None if copied is None else {PARAMS_COLUMN, *self._ids, *self.named}
        if self.needs_default and self.columns is not None:
            self.columns |= DEFAULTS

    def task(self, row: SourceRow, values: Values) -> Task:
        for name in self.needed:
            if name not in values:
                raise ValueError(f"there is no column {name!r}; there are {_names(values)}")
        prompt, is_chat = self._prompt(values)
        params = self.params_of(row.index, own_params(values.get(PARAMS_COLUMN)))
        return Task(
            row.index,
            self.row_id(values),
            prompt,
            params,
            is_chat,
            place=row.place,
            num_bytes=row.num_bytes,
            columns=self.copied(values),
        )

    def row_id(self, values: Values) -> Any:
        return next((values[name] for name in self._ids if values.get(name) is not None), None)

    def answer(self, task: Task, output: RequestOutput) -> dict[str, Any]:
        texts = [each.text for each in output.outputs]
        reasons = [each.finish_reason for each in output.outputs]
        more: dict[str, Any] = {}
        if len(texts) > 1:
            more = {"texts": texts, "finish_reasons": reasons}
        if output.outputs[0].logprobs is not None:
            more["logprobs"] = [_logprobs(each) for each in output.outputs]
        more |= parsed_columns(output.outputs)
        return {
            "index": task.index,
            "id": task.id,
            "text": texts[0],
            "finish_reason": reasons[0],
            **more,
            "prompt_tokens": len(unlisted(output, "prompt_token_ids")),
            "completion_tokens": sum(len(each.token_ids) for each in output.outputs),
            "error": None,
        }

    def copied(self, values: Values) -> str:
        names = values if self._copied is None else [name for name in self._copied if name in values]
        columns = {
            self._new_name(name): None if isinstance(values[name], bytes) else values[name]
            for name in names
            if name != "id" or "id" not in self._ids
        }
        return to_text(columns)

    def _new_name(self, name: str) -> str:
        """The name of a column of the input in an answer. No two columns have the same."""
        if name not in self._new_names:
            if len(self._new_names) > _KEPT_NAMES:
                self._new_names.clear()
            is_ours = re.fullmatch(rf"(?:{_PREFIX})*(?:{'|'.join(COLUMNS + PARSED)})", name)
            self._new_names[name] = _PREFIX + name if is_ours else name
        return self._new_names[name]

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
        prompt, is_chat = self._written_prompt(values)
        if self._chat and not is_chat:
            if not isinstance(prompt, str) or not prompt:
                what = "the prompt is empty" if prompt == "" else "the prompt is a list of token ids"
                raise ValueError(f"{what}, and --chat needs a text for the user's message")
            prompt, is_chat = [{"role": "user", "content": prompt}], True
        if is_chat and self._system is not None and prompt[0]["role"] not in ("system", "developer"):
            prompt = [{"role": "system", "content": self._system}, *prompt]
        return prompt, is_chat

    def _written_prompt(self, values: Values) -> tuple[Any, bool]:
        """The prompt as the row has it, and whether it is a conversation."""
        if self._template is not None:
            if empty := [name for name in self._filled if values[name] is None]:
                raise ValueError(f"column {empty[0]!r} is null, and the template needs it; give it a value")
            return _fill(self._template, values), False
        if self._messages is not None:
            return conversation(values[self._messages], self._messages), True
        if self._prompts is not None:
            return prompt_of(values[self._prompts], f"column {self._prompts!r}"), False
        # An empty cell of CSV is "".
        given = [name for name in ("prompt", "messages") if values.get(name) not in (None, "", [])]
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


def _names_in(template: str) -> list[str]:
    """The columns of a template. ValueError for a wrong one."""
    try:
        parts = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"the template {template!r}: {error}; write {{{{ for a brace") from None
    names = [name.partition(".")[0].partition("[")[0] for name in parts]
    if not names or not all(names):
        raise ValueError(f"the template {template!r} must name a column in braces, such as {{text}}")
    return names


def _fill(template: str, values: Values) -> str:
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


def _logprobs(output: CompletionOutput) -> list[list[dict[str, Any]]] | None:
    """For each token a list: the drawn token, then the requested likeliest tokens."""
    if output.logprobs is None:
        return None
    return [[_logprob(token_id, each) for token_id, each in row.items()] for row in output.logprobs]


def _logprob(token_id: int, token: Logprob) -> dict[str, Any]:
    named = {"token_id": token_id, "token": token.decoded_token}
    return named | {"logprob": logprob_number(token), "rank": token.rank}


def logprob_number(token: Logprob) -> float:
    """For JSON, which has no infinity; OpenAI writes -9999."""
    return round(max(token.logprob, -9999.0), 4)


class Renderer:
    """Applies a model's chat template.

    chat_template_kwargs: variables of the template for all rows; a row's own variables override them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        chat_template_kwargs: Mapping[str, Any],
        all_chats: bool = False,
    ) -> None:
        """all_chats: whether each row is a conversation. JobRefusedError if the model then has no chat
        template, and for wrong variables."""
        self._tokenizer = tokenizer
        self._variables = chat_template_kwargs
        self.process = TemplateProcess()
        self._options = attempt(self._check, {})  # of rows without their own
        if isinstance(self._options, Exception) and (all_chats or chat_template_kwargs):
            raise JobRefusedError(f"rows with messages: {self._options}")

    def prompts(self, tasks: Sequence[Task]) -> list[Prompt | dict[str, Any] | BadRow]:
        """Return the prompt of each task, or the error of a bad one."""
        plain = iter(self._plain([task for task in tasks if task.is_chat and not task.template]))
        prompts: list[Prompt | dict[str, Any] | BadRow] = []
        for task in tasks:
            if not task.is_chat:
                prompts.append(as_prompt(task.prompt))
            else:
                prompts.append(attempt(self._own, task) if task.template else next(plain))
        return prompts

    def _plain(self, tasks: Sequence[Task]) -> list[Prompt | BadRow]:
        if isinstance(self._options, Exception):
            return [self._options] * len(tasks)
        return self._render([task.prompt for task in tasks], self._options)

    def _own(self, task: Task) -> Prompt:
        """The prompt of a task with its own arguments of the template."""
        [found] = self._render([task.prompt], self._check(task.template))
        if isinstance(found, Exception):
            raise found
        return found

    def _render(self, conversations: list[Any], options: Mapping[str, Any]) -> list[Prompt | BadRow]:
        assert self._tokenizer is not None
        found = render_conversations(self._tokenizer, conversations, options, self.process)
        return [_without_number(each) if isinstance(each, Exception) else each for each in found]

    def _check(self, template: Mapping[str, Any]) -> dict[str, Any]:
        variables = template.get("chat_template_kwargs", {})
        if not isinstance(variables, Mapping):
            raise TypeError(f"chat_template_kwargs must be an object {{...}}, not {variables!r}")
        return check_template_options(
            self._tokenizer,
            None,
            template.get("add_generation_prompt", True),
            template.get("continue_final_message", False),
            template.get("tools"),
            {**self._variables, **variables},
            thinking_of(template),
        )


def as_prompt(prompt: str | array[int]) -> dict[str, Any]:
    """A string or token ids as a dictionary, which is always one prompt."""
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def _without_number(error: BadRow) -> BadRow:
    """The error without the conversation's index in its call, which differs from that of its row."""
    return type(error)(re.sub(r"^conversation \d+", "the conversation", str(error)))
