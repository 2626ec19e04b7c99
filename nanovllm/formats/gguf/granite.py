"""GGUF files of Granite 3 and 4, dense: Llama's tensors, and multipliers by keys of their own.

A key that a file leaves out, or has as 0, multiplies nothing, as in llama.cpp; `logit_scale`, which divides,
is needed there. Refuses by name what does not fit; opens no file.
"""

from __future__ import annotations

from typing import Any

from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor
from nanovllm.formats.gguf.keys import Keys, shortest

ARCHITECTURES = {"granite": "GraniteForCausalLM"}
_MULTIPLIERS = {  # by the key, and as config.json calls them
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}
_LOGITS, _SCORES = "logit_scale", "attention.scale"
_ROTATES = "rope.scaling.finetuned"  # which llama.cpp has for whether there is a rope


def read(
    file: GGUFFile, tensors: dict[str, GGUFTensor]
) -> tuple[dict[str, Any], dict[str, GGUFTensor], dict[str, Any]]:
    """The metadata without multipliers; the tensors; and what config.json says besides. ModelLoadError for
    missing numbers and for models without rope."""
    reader = _Reader(file, tensors)
    return reader.keys(), tensors, reader.settings()


class _Reader(Keys):
    def keys(self) -> dict[str, Any]:
        if not self._file.scalar(self._key(_ROTATES), bool, True):
            raise self._file.problem(f"{self._key(_ROTATES)} False, no rope, is not supported")
        return self._file.metadata | {self._key(name): None for name in (*_MULTIPLIERS, _LOGITS, _SCORES)}

    def settings(self) -> dict[str, Any]:
        head_dim = self._count("embedding_length") // self._same("attention.head_count")
        found = {ours: self._multiplier(key) or 1.0 for key, ours in _MULTIPLIERS.items()}
        divisor = self._multiplier(_LOGITS)
        if not divisor > 0:
            raise self._file.problem(f"{self._key(_LOGITS)} must be a number above 0, not {divisor}")
        scale = self._multiplier(_SCORES) or head_dim**-0.5
        return found | {"logits_scaling": divisor, "attention_multiplier": scale}

    def _multiplier(self, key: str) -> float:
        value: float = shortest(self._file.scalar(self._key(key), float, 0.0))
        return value
