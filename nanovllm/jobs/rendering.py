"""Rendering: converts tasks to prompts for `LLM.stream`, conversations with the chat template.

Keeps no task.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.errors import BadRow, attempt
from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.tasks import Task
from nanovllm.text.prompts import Prompt
from nanovllm.text.templates import TemplateProcess
from nanovllm.text.tokenizer import check_template_options, render_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        self._process = TemplateProcess()
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
        found = render_conversations(self._tokenizer, conversations, options, self._process)
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
        )


def as_prompt(prompt: str | array[int]) -> dict[str, Any]:
    """A string or token ids as a dictionary, which is always one prompt."""
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def _without_number(error: BadRow) -> BadRow:
    """The error without the conversation's index in its call, which differs from that of its row."""
    return type(error)(re.sub(r"^conversation \d+", "the conversation", str(error)))
