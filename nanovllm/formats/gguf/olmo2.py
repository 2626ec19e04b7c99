"""GGUF files of OLMo 2 and OLMo 3: norms after the blocks, and of OLMo 3 windows and the ropes of layers.

A file with a window is OLMo 3's; layers with one have no scaling of rope. Without a list of them all layers
but every fourth have one, as in llama.cpp. Refuses by name what does not fit; opens no file.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor
from nanovllm.formats.gguf.keys import Keys, distinct, shortest
from nanovllm.models.config import FULL, SLIDING

ARCHITECTURES = {"olmo2": "Olmo2ForCausalLM"}
_STORED = re.compile(r"blk\.(\d{1,9})\.(\w+)\.weight")
_NORMS = {  # of a layer, by the model's names
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_PERIOD = 4  # the last of so many layers has no window
_LOCAL_THETA = "rope.freq_base_swa"


def read(
    file: GGUFFile, tensors: dict[str, GGUFTensor]
) -> tuple[dict[str, Any], dict[str, GGUFTensor], dict[str, Any]]:
    """The metadata; the tensors, norms by the model's names; and what config.json says besides.

    ModelLoadError for missing numbers, and for a list of windows that does not fit.
    """
    renamed = ((stored, _name(stored), tensor) for stored, tensor in tensors.items())
    return file.metadata, distinct(file, renamed), _Reader(file, tensors).settings()


def _name(stored: str) -> str:
    """The name that other files, or the model, have for a tensor."""
    match = _STORED.fullmatch(stored)
    if match is None or match[2] not in _NORMS:
        return stored
    return f"model.layers.{int(match[1])}.{_NORMS[match[2]]}.weight"


class _Reader(Keys):
    def settings(self) -> dict[str, Any]:
        if self._file.scalar(self._key(_WINDOW), int, 0) == 0:
            return {}
        found: dict[str, Any] = {
            "architectures": ["Olmo3ForCausalLM"],
            "layer_types": [SLIDING if each else FULL for each in self._local()],
        }
        theta = self._file.scalar(self._key(_LOCAL_THETA), float)
        if theta is not None:
            found["rope_parameters"] = {SLIDING: {"rope_type": "default", "rope_theta": shortest(theta)}}
        return found

    def _local(self) -> list[bool]:
        """Whether each layer has a window."""
        layers, stated = self._count("block_count"), self._file.metadata.get(self._key(_PATTERN), _PERIOD)
        if isinstance(stated, np.ndarray) and len(stated) == layers:
            return [bool(each) for each in stated]
        if type(stated) is not int or stated < 0:
            what = f"a list of {len(stated)}" if isinstance(stated, np.ndarray) else repr(stated)
            raise self._file.problem(
                f"{self._key(_PATTERN)} must say of each of {layers} layers whether it has a window, or "
                f"which one of so many has none, not {what}"
            )
        some = min(layers, len(self._tensors))
        return [stated == 0 or (layer + 1) % stated != 0 for layer in range(some)]
