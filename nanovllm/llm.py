"""LLM: what a user calls. LLMEngine with conversations on top."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nanovllm.engine.arguments import refuse_others
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.conversations import Conversation, parse_conversations
from nanovllm.text.tokenizer import check_template_options, render_conversations
from nanovllm.vllm_arguments import CHAT


class LLM(LLMEngine):
    """A model, ready for prompts: `LLM(folder_or_hub_id, **options)`; the options are listed in `Config`.

    >>> with LLM(nanovllm.demo_model_path()) as llm:
    ...     llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))[0]["text"]
    """

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.

        A content is a text or a list of `{"type": "text", "text": ...}`, which are joined by line ends.
        chat_template: a Jinja template instead of the model's own.
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: go on with the last message; needs `add_generation_prompt=False`.
        tools: JSON schemas, or functions with types and docstrings, for the template.
        chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`.
        others: vLLM's, with values that ask for nothing.

        ValueError or TypeError names the conversation and the message, or the argument; nothing has run then.
        Otherwise as `generate`.
        """
        self._lifecycle.check_open()
        hint = ". Variables of the template go into chat_template_kwargs"
        refuse_others(LLM.chat, others, CHAT, hint)
        options = check_template_options(
            self.tokenizer,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        assert self.tokenizer is not None
        texts = render_conversations(self.tokenizer, parse_conversations(messages), options)
        # The template has written the special tokens already.
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        prompts = [{"prompt": text, "prompt_token_ids": row} for text, row in zip(texts, ids, strict=True)]
        return self.generate(prompts, sampling_params, use_tqdm)
