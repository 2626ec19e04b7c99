"""LLM: what a user calls. LLMEngine with conversations on top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Conversation = Sequence[Mapping[str, Any]]


class LLM(LLMEngine):
    """A model, ready for prompts: `LLM(folder_or_hub_id, **options)`; the options are listed in `Config`.

    >>> with LLM(nanovllm.demo_model_path()) as llm:
    ...     llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))[0]["text"]
    """

    def __enter__(self) -> LLM:
        super().__enter__()
        return self

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.

        `template_options` go to the model's chat template (such as `enable_thinking=False`). Otherwise as
        `generate`. ValueError when the model has no chat template.
        """
        self._check_open()
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError("this model has no chat template; use generate() with complete prompts")
        conversations: Sequence[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        for index, conversation in enumerate(conversations):
            whole = isinstance(conversation, (list, tuple)) and len(conversation) > 0
            if not whole or not all(isinstance(message, Mapping) for message in conversation):
                raise ValueError(
                    f"conversation {index} must be a list of messages {{'role': ..., 'content': ...}}, "
                    f"not {conversation!r}"
                )
        texts = [
            self.tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                tokenize=False,
                add_generation_prompt=True,
                **template_options,
            )
            for conversation in conversations
        ]
        # The template has written the special tokens already.
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        prompts = [{"prompt": text, "prompt_token_ids": row} for text, row in zip(texts, ids, strict=True)]
        return self.generate(prompts, sampling_params, use_tqdm)
