"""The token by which a chat template ends an answer. Files that do not list all ends of answers need it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.chat.conversations import render_conversations
from nanovllm.chat.templates import TemplateProcess, templates_of
from nanovllm.text.processor import Processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger("nanovllm")

_ANSWER = "ANSWER"
_CONVERSATION = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "question"},
]
_OPTIONS = {"add_generation_prompt": False, "continue_final_message": False}


def add_written_end(processor: Processor) -> None:
    """Have answers end by the token, too, that the chat template writes after them."""
    process = templates_of(processor)
    processor.own_eos = with_written_end(processor.tokenizer, processor.eos_token_ids, process)


def with_written_end(
    tokenizer: PreTrainedTokenizerBase | None, known: Sequence[int], process: TemplateProcess
) -> list[int]:
    """`known`, the tokens that end an answer, and the one that the chat template writes after an answer.

    A template that names one of `known` ends its turns by it and is not applied. Logs a warning if answers
    have no end.
    """
    template = None if tokenizer is None else tokenizer.chat_template
    if tokenizer is None or not template:
        if not known:
            _logger.warning(
                "the model's file names no token that ends a text: answers end at max_tokens, at stop "
                "strings or at stop_token_ids"
            )
        return list(known)
    names = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in known]
    if tokenizer.eos_token_id in known:
        names.append("eos_token")
    if any(name in str(template) for name in names):
        return list(known)
    written = _written_end(tokenizer, process)
    if written is None:
        _logger.warning(
            "the model's file names no token that ends a turn, and its chat template writes none after an "
            "answer: answers of chat may run on into invented turns; pass the text that begins a turn as "
            "stop, or the token that ends one as stop_token_ids"
        )
        return list(known)
    _logger.info("answers end by %r too, as the chat template ends them", written[1])
    return [*known, written[0]]


def _written_end(tokenizer: PreTrainedTokenizerBase, process: TemplateProcess) -> tuple[int, str] | None:
    """The control token after an answer, id and text; None if there is none, or the template fails."""
    added = tokenizer.added_tokens_decoder.items()
    special = {str(each): token_id for token_id, each in added if each.special}
    special.pop(str(tokenizer.bos_token), None)
    for messages in (
        _CONVERSATION,
        _CONVERSATION[:2],
    ):  # some refuse the last question
        [prompt] = render_conversations(tokenizer, [messages], _OPTIONS, process)
        text = "" if isinstance(prompt, Exception) else str(prompt.text)
        if _ANSWER in text:
            rest = text.partition(_ANSWER)[2].lstrip()
            found = max((name for name in special if rest.startswith(name)), key=len, default=None)
            return None if found is None else (special[found], found)
    return None
