"""GGUF files of Phi-3, Phi-3.5 and Phi-4: matrices that hold several projections, partial rotation, and both
sets of LongRoPE's factors as tensors.

`ffn_up` holds the gate before the up projection. Refuses by name what does not fit; opens no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor
from nanovllm.formats.gguf.keys import Keys, distinct, shortest

ARCHITECTURES = {"phi3": "Phi3ForCausalLM"}
_STORED = re.compile(r"blk\.(\d{1,9})\.(\w+)\.weight")
_ROTATED = "rope.dimension_count"
_SCALE = "rope.scaling.attn_factor"  # of cosines and sines; llama.cpp has 1 without it
_TYPE = "rope.scaling.type"
_ORIGINAL = "rope.scaling.original_context_length"
_FACTORS = {  # tensors, and as config.json calls them
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}


def read(
    file: GGUFFile, tensors: dict[str, GGUFTensor]
) -> tuple[dict[str, Any], dict[str, GGUFTensor], dict[str, Any]]:
    """The metadata without those of rope; the tensors, parts of matrices by the model's names; and what
    config.json says besides. ModelLoadError for missing numbers, other shapes, and one set of factors."""
    reader = _Reader(file, tensors)
    renamed = ((stored, *item) for stored, each in tensors.items() for item in reader.parts(stored, each))
    return reader.keys(), distinct(file, renamed), reader.settings()


class _Reader(Keys):
    def __init__(self, file: GGUFFile, tensors: dict[str, GGUFTensor]) -> None:
        super().__init__(file, tensors)
        heads, size = self._same("attention.head_count"), self._same("feed_forward_length")
        is_stated = file.metadata.get(self._key("attention.head_count_kv")) is not None
        kv_heads = self._same("attention.head_count_kv") if is_stated else heads
        self._head_dim = self._count("embedding_length") // heads
        q, kv = heads * self._head_dim, kv_heads * self._head_dim
        self._packed = {
            "attn_qkv": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            "ffn_up": {"mlp.gate_proj": size, "mlp.up_proj": size},
        }

    def keys(self) -> dict[str, Any]:
        own = (_ROTATED, _SCALE, *([_TYPE] if self._type() == "longrope" else []))
        return self._file.metadata | {self._key(name): None for name in own}

    def parts(self, stored: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
        """A tensor by the name that other files have, or the projections that it holds."""
        match = _STORED.fullmatch(stored)
        if stored in _FACTORS:
            return
        if match is None or match[2] not in self._packed:
            yield stored, tensor
            return
        rows, start = self._packed[match[2]], 0
        if len(tensor.shape) != 2 or tensor.shape[0] != sum(rows.values()):
            raise self._file.problem(
                f"tensor {stored!r} has the shape {tensor.shape}; {' + '.join(map(str, rows.values()))} rows "
                "are needed"
            )
        for name, count in rows.items():
            part = replace(tensor, shape=(count, tensor.shape[1]), raw=tensor.raw[start : start + count])
            yield f"model.layers.{int(match[1])}.{name}.weight", part
            start += count

    def settings(self) -> dict[str, Any]:
        rotated = self._file.scalar(self._key(_ROTATED), int, self._head_dim)
        if rotated % 2 or not 0 < rotated <= self._head_dim:
            raise self._file.problem(
                f"{self._key(_ROTATED)} {rotated} must be an even number of at most {self._head_dim}, the "
                "elements of a head"
            )
        share = rotated / self._head_dim
        if int(self._head_dim * share) < rotated:
            share = math.nextafter(share, 1)
        return {"partial_rotary_factor": share} | self._scaling(rotated)

    def _scaling(self, rotated: int) -> dict[str, Any]:
        """Nothing without factors."""
        stored = {name: self._tensors[name] for name in _FACTORS if name in self._tensors}
        scale, kind = shortest(self._file.scalar(self._key(_SCALE), float, 1.0)), self._type()
        if not stored and kind != "longrope" and scale == 1:
            return {}
        if stored and kind not in (None, "none", "longrope"):
            raise self._file.problem(f"{self._key(_TYPE)} {kind} together with {', '.join(stored)}")
        for name in _FACTORS:
            if name not in stored or stored[name].shape != (rotated // 2,):
                found = f"it has {stored[name].shape}" if name in stored else "it is missing"
                raise self._file.problem(f"tensor {name!r} must have the shape ({rotated // 2},); {found}")
        factors = {_FACTORS[name]: list(map(shortest, each[:].tolist())) for name, each in stored.items()}
        return {
            "original_max_position_embeddings": self._count(_ORIGINAL),
            "rope_scaling": {"rope_type": "longrope", "attention_factor": scale, **factors},
        }

    def _type(self) -> str | None:
        return self._file.scalar(self._key(_TYPE), str)
