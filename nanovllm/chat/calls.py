"""ChatCalls: `chat`, which answers conversations. Checks and renders none itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nanovllm.answers import RequestOutput
from nanovllm.chat.conversations import (
    Conversation,
    Thinking,
    check_template_options,
    parse_conversations,
    render_conversations,
)
from nanovllm.chat.templates import templates_of
from nanovllm.checks import BadRow, check_on_error, raise_first
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.inputs import calls_of_llm, refuse_others
from nanovllm.lifecycle import no_full_collections
from nanovllm.params import SamplingParams
from nanovllm.text.prompts import Prompt


@calls_of_llm
class ChatCalls(LLMEngine):
    """An engine that answers conversations."""

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        on_error: str = "raise",
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.

        A content is a string or a list of `{"type": "text", "text": ...}`; the template gets what it takes.
        chat_template: a Jinja template, a file that holds one, or the name of one of the model's templates.
        add_generation_prompt: end the prompt with the start of an assistant message.
        continue_final_message: continue the last message; needs `add_generation_prompt=False`.
        tools: JSON schemas, or functions with types and docstrings, for the template.
        chat_template_kwargs: variables of the template, such as `{"documents": [...]}`.
        enable_thinking: True or False for models that can switch thinking, whatever their template calls it.
        reasoning_effort: one of the words that the template knows, such as "low".
        others: vLLM's further arguments, with neutral values.

        ValueError or TypeError names the conversation and the message, or the argument, before anything runs.
        Otherwise as `generate`.
        """
        self._lifecycle.check_open()
        check_on_error(on_error)
        refuse_others(ChatCalls.chat, others, ". Variables of the template go into chat_template_kwargs")
        options = check_template_options(
            self.tokenizer,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            Thinking(enable_thinking, reasoning_effort),
        )
        with no_full_collections():
            prompts = self._rendered(messages, on_error, options)
            return self._generate(prompts, sampling_params, use_tqdm, on_error)

    def _rendered(
        self, messages: Conversation | Iterable[Conversation], on_error: str, options: Mapping[str, Any]
    ) -> list[Prompt | BadRow]:
        """The prompts of conversations. options: of `check_template_options`."""
        assert self.tokenizer is not None
        conversations = parse_conversations(messages)
        if on_error == "raise":
            raise_first(conversations)
        return render_conversations(self.tokenizer, conversations, options, templates_of(self._processor))
