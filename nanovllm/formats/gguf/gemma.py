"""GGUF files of Gemma 2 and Gemma 3 (text): names of the norms around each block, which files store plus 1.

Files leave out which layers have a window, and the scale of scores: as llama.cpp has them, so are they here.
Refuses by name what does not fit; opens no file.
"""

from __future__ import annotations

import re
from typing import Any

from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor
from nanovllm.formats.gguf.keys import Keys, distinct, less_1
from nanovllm.models.config import FULL, SLIDING

ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
_STORED = re.compile(r"blk\.(\d{1,9})\.(\w+)\.weight")
_NORMS = {  # of a layer, by the model's names
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_PERIODS = {"gemma2": 2, "gemma3": 6}  # the last of so many layers has no window
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose scores are scaled by hidden_size / heads
_DEFAULT_WINDOW = {"gemma2": 4096}
_LOCAL_THETA = 10_000.0


def read(
    file: GGUFFile, tensors: dict[str, GGUFTensor]
) -> tuple[dict[str, Any], dict[str, GGUFTensor], dict[str, Any]]:
    """The metadata without softcaps; the tensors, norms less 1 and by the model's names; and what config.json
    says besides. ModelLoadError for missing numbers."""
    reader = _Reader(file, tensors)
    renamed = ((stored, *_renamed(stored, tensor)) for stored, tensor in tensors.items())
    return reader.keys(), distinct(file, renamed), reader.settings()


def _renamed(stored: str, tensor: GGUFTensor) -> tuple[str, GGUFTensor]:
    """A tensor by the name that other files, or the model, have for it."""
    if stored == "output_norm.weight":
        return stored, less_1(tensor)
    match = _STORED.fullmatch(stored)
    if match is None or match[2] not in _NORMS:
        return stored, tensor
    return f"model.layers.{int(match[1])}.{_NORMS[match[2]]}.weight", less_1(tensor)


class _Reader(Keys):
    def keys(self) -> dict[str, Any]:
        return self._file.metadata | {self._key(name): None for name in _SOFTCAPS}

    def settings(self) -> dict[str, Any]:
        layers, heads = self._count("block_count"), self._count("attention.head_count")
        head_dim = self._count("attention.key_length")
        is_largest = layers == _LAYERS_OF_27B[self._architecture]
        default = _DEFAULT_WINDOW.get(self._architecture, 0)
        window = self._file.scalar(self._key("attention.sliding_window"), int, default)
        period = self._file.scalar(
            self._key("attention.sliding_window_pattern"), int, _PERIODS[self._architecture]
        )
        local = [
            window > 0 and (period < 1 or (layer + 1) % period != 0)
            for layer in range(min(layers, len(self._tensors)))
        ]
        found: dict[str, Any] = {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self._count("embedding_length") // heads if is_largest else head_dim,
            "layer_types": [SLIDING if each else FULL for each in local],
            "sliding_window": window or None,
        }
        for name in _SOFTCAPS:
            found[name] = self._file.scalar(self._key(name), float, 0.0) or None
        if self._architecture == "gemma3":
            theta = self._file.scalar(self._key("rope.freq_base_swa"), float, _LOCAL_THETA)
            found["rope_local_base_freq"] = theta
        kinds = {each.stored_as for each in self._tensors.values() if len(each.shape) > 1} - {"F32"}
        return found | ({"torch_dtype": "bfloat16"} if kinds == {"F16"} else {})  # which it was trained in
