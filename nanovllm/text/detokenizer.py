"""Detokenizer: the text of a whole output. Keeps no request; `extras/stop_strings.py` decodes in parts."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.text.characters import CUT, Characters


class Detokenizer(Characters):
    """Decodes outputs: prompt and output are decoded together, and the prompt's text is removed.

    This keeps a space between the two. Special tokens are skipped or kept, as requested. An incomplete
    character at the end is left out; a U+FFFD that the model generated stays. A character that the prompt
    begins and the output does not continue is a U+FFFD of the prompt.
    """

    def text(self, prompt_ids: Sequence[int], output_ids: list[int]) -> str:
        """Return the text of `output_ids`, which follow `prompt_ids`."""
        if not output_ids:
            return ""
        if self.joins:
            text = self.decode(output_ids)
            if not (text.startswith(CUT) or text.endswith(CUT)):
                return text
        context = self.context(prompt_ids)
        before, is_cut = self._before(tuple(context))
        first = next((token_id for token_id in output_ids if token_id not in self.skipped), None)
        if is_cut and first is not None and not self.continues(first):
            before = self.decode(context)
        both, _ = self.whole_characters(context + output_ids)
        if both.startswith(before):
            return both[len(before) :]
        before = self.decode(context)  # the output continues the prompt's character and does not finish it
        return both[len(before) :] if both.startswith(before) else self.decode(output_ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, with U+FFFD for bytes that are no character."""
        if not token_ids:
            return ""
        if not self._bytes.keys().isdisjoint(token_ids):
            token_ids = self._repaired(token_ids)
        if self._unmarked and not self._unmarked.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._unmarked]
        return str(self._decode_ids(token_ids, skip_special_tokens=self._skip_special_tokens))
