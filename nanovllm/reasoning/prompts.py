"""Where an answer begins, read from the tokens of its prompt; and which marks are tokens. Splits nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from nanovllm.reasoning.harmony import Harmony
from nanovllm.reasoning.marks import Channels, Mark, Thinking
from nanovllm.reasoning.splitter import Begin, Splits, Splitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Vocabulary:
    """The marks of a family, and which of them are one token of a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, marks: Collection[str], call_marks: Collection[str] = ()
    ) -> None:
        """marks: of the thinking. call_marks: of tool calls, which stay in the text."""
        self.tokenizer = tokenizer
        added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        wanted = {*marks, *call_marks}
        known = added if wanted <= added.keys() else {**tokenizer.get_vocab(), **added}
        self.mark_of = {known[mark]: Mark(mark) for mark in wanted if mark in known}  # by token id
        self.searched = frozenset(marks) - set(self.mark_of.values())
        # Tokens that users' texts cannot hold by accident: turns begin and end with them.
        self._turns = frozenset(added.values()) - self.mark_of.keys()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with marks and special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text with marks, as a model writes them within an answer."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def last_turn(self, prompt_ids: Sequence[int]) -> list[int]:
        """The tokens behind the last one that begins or ends a turn."""
        for index in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[index] in self._turns:
                return list(prompt_ids[index + 1 :])
        return list(prompt_ids)


def begin(family: Thinking | Channels, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> Splits:
    """What separates the answer to a prompt: inside the thinking if the last mark behind the prompt's last
    turn is a start mark, behind it if that is an end mark, and else as its first piece says.

    prompt_ids: all tokens of the prompt, on which the model continues.
    """
    if isinstance(family, Channels):
        text = vocabulary.decode(_behind(prompt_ids, vocabulary.mark_of, family.begin))
        _, mark, behind = text.rpartition(family.begin)
        return Harmony(family, behind if mark else "", vocabulary.searched)  # other text has no header
    turn = vocabulary.last_turn(prompt_ids)
    for index in range(len(turn) - 1, -1, -1):
        if vocabulary.mark_of.get(turn[index]) == family.start:
            behind = vocabulary.decode(turn[index + 1 :])
            return Splitter(family, Begin.INSIDE, vocabulary.searched, behind)
        if vocabulary.mark_of.get(turn[index]) == family.end:
            return Splitter(family, Begin.OUTSIDE, vocabulary.searched)
    if {family.start, family.end} & vocabulary.searched:
        text = vocabulary.decode(turn)
        start, end = text.rfind(family.start), text.rfind(family.end)
        if start > end:
            behind = text[start + len(family.start) :]
            return Splitter(family, Begin.INSIDE, vocabulary.searched, behind)
        if end >= 0:
            return Splitter(family, Begin.OUTSIDE, vocabulary.searched)
    return Splitter(family, Begin.OPEN, vocabulary.searched)


def _behind(prompt_ids: Sequence[int], mark_of: Mapping[int, str], mark: str) -> list[int]:
    """The tokens from the last mark on; all without one."""
    for index in range(len(prompt_ids) - 1, -1, -1):
        if mark_of.get(prompt_ids[index]) == mark:
            return list(prompt_ids[index:])
    return list(prompt_ids)
