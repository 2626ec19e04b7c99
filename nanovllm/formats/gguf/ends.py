"""The tokens that end an answer, as a GGUF file names them: by keys of its metadata, or only by their text.

Many files state <|endoftext|> or nothing, while the model ends its turns by another token. llama.cpp knows
such tokens by their text; so does this table.
"""

from __future__ import annotations

import numpy as np

from nanovllm.formats.gguf.file import GGUFFile
from nanovllm.formats.tokenizer_json.bpe import CONTROL

_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Texts that nothing but a token has: such a token is a control token, whatever type the file gives it.
TURN_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>"),
        *("<|flush|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<|ifm|im_end|>"),
    )
)
# The end of a text, which a base model writes too.
_TEXT_ENDS = frozenset(["<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"])
# Texts that may stand in an answer: only control tokens.
_CONTROL_ENDS = frozenset(["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["])
# Between an analysis and the answer stands <|end|> where these others end a turn.
_WITHIN_TURNS = "<|end|>"
_OTHERS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})


def stated_ends(file: GGUFFile) -> list[int]:
    """The ids under the keys of a file, sorted."""
    ids = (file.scalar(f"tokenizer.ggml.{key}", int) for key in _KEYS)
    return sorted({each for each in ids if each is not None})


def ends(file: GGUFFile) -> list[int]:
    """The ids under the keys of a file, and of tokens with a text that ends answers, sorted."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return stated_ends(file)
    types = file.metadata.get("tokenizer.ggml.token_type")
    found: dict[str, int] = {}
    for index, token in enumerate(file.strings("tokenizer.ggml.tokens")):
        is_control = isinstance(types, np.ndarray) and index < len(types) and types[index] == CONTROL
        if token in TURN_ENDS or token in _TEXT_ENDS or (is_control and token in _CONTROL_ENDS):
            found[token] = index
    if any(each <= found.keys() for each in _OTHERS):
        found.pop(_WITHIN_TURNS, None)
    return sorted({*stated_ends(file), *found.values()})
