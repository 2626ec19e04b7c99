"""GGUF files of LFM2, dense and with experts: names of layers with a short convolution or with attention.

The first product of a convolution becomes its three parts, and experts are chosen by a sigmoid. Refuses by
name what does not fit; opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor
from nanovllm.formats.gguf.keys import Keys, distinct
from nanovllm.states.short_conv import PARTS

ARCHITECTURES = {"lfm2": "Lfm2ForCausalLM", "lfm2moe": "Lfm2MoeForCausalLM"}
_FULL, _CONV = "full_attention", "conv"
_MODULES = {_FULL: "attn_q", _CONV: "shortconv.in_proj"}  # that only layers of a kind have
_STORED = re.compile(r"blk\.(\d{1,9})\.(.+)")
_NORM, _OUTPUT_NORM = "token_embd_norm.weight", "output_norm.weight"  # stored; as other files call it
_IN_PROJ, _TAPS = "shortconv.in_proj.weight", "shortconv.conv.weight"
_OWN = {  # of a layer, and the model's names below it
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    _TAPS: "conv.conv.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
    "ffn_gate.weight": "feed_forward.gate_proj.weight",
    "ffn_up.weight": "feed_forward.up_proj.weight",
    "ffn_down.weight": "feed_forward.down_proj.weight",
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_EXPERTS = {  # a projection of all experts: in the files of transformers, and as the model calls it
    "ffn_gate_exps.weight": ("w1", "gate_proj"),
    "ffn_up_exps.weight": ("w3", "up_proj"),
    "ffn_down_exps.weight": ("w2", "down_proj"),
}
_COLUMNS = {  # of some matrices, by the key that states how many there are
    "token_embd.weight": "embedding_length",
    "ffn_down.weight": "feed_forward_length",
    "ffn_down_exps.weight": "expert_feed_forward_length",
}
_MAX_EXPERTS = 2**12
_SIGMOID = 2  # of expert_gating_func
_FLOATS = ("F32", "F16", "BF16")


def read(
    file: GGUFFile, tensors: dict[str, GGUFTensor]
) -> tuple[dict[str, Any], dict[str, GGUFTensor], dict[str, Any]]:
    """The metadata as those of a model whose layers all have attention; the tensors, those of layers by the
    model's own names; and what config.json says besides.

    ModelLoadError for missing numbers, for layers of no known kind, other settings and unknown tensors.
    """
    reader = _Reader(file, tensors)
    renamed = ((stored, *item) for stored, each in tensors.items() for item in reader.renamed(stored, each))
    return reader.keys(), distinct(file, renamed), reader.settings()


class _Reader(Keys):
    def __init__(self, file: GGUFFile, tensors: dict[str, GGUFTensor]) -> None:
        super().__init__(file, tensors)
        self._has_experts = self._architecture == "lfm2moe"
        layers, here = (
            self._count("block_count"),
            {match[1] for match in map(_STORED.match, tensors) if match},
        )
        if layers > len(here):
            raise file.problem(
                f"{self._key('block_count')} says that it has {layers} layers, and the file has {len(here)}"
            )
        self._kinds = [self._kind(layer, _MODULES) for layer in range(layers)]

    def keys(self) -> dict[str, Any]:
        """The metadata, in which all layers are alike, without settings that are checked here."""
        if window := self._number("attention.sliding_window", 0):
            raise self._file.problem(f"{self._key('attention.sliding_window')} {window} is not supported")
        changed: dict[str, Any] = {
            "attention.head_count": self._same("attention.head_count"),
            "attention.head_count_kv": self._same("attention.head_count_kv"),
        }
        if self._has_experts:
            if (gating := self._number("expert_gating_func")) != _SIGMOID:
                raise self._file.problem(
                    f"{self._key('expert_gating_func')} {gating} is not supported; it must be {_SIGMOID}, a "
                    "sigmoid"
                )
            changed |= {"expert_gating_func": None, "leading_dense_block_count": None}
        return self._file.metadata | {self._key(key): value for key, value in changed.items()}

    def settings(self) -> dict[str, Any]:
        """What config.json says of convolutions and of layers with experts. The width of an MLP is stated as
        it is."""
        found: dict[str, Any] = {
            "layer_types": self._kinds,
            "conv_L_cache": self._count("shortconv.l_cache"),
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
        }
        if self._has_experts:
            found["num_dense_layers"] = self._number("leading_dense_block_count", 0)
            if self._file.metadata.get(self._key("expert_weights_norm")) is None:
                found["norm_topk_prob"] = True
        types = dict(self._types())
        return found | ({"quantization_config": {"quant_method": "gguf", "types": types}} if types else {})

    def renamed(self, stored: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
        """A tensor under the model's names, or the name that it has in a file of other layers."""
        match = _STORED.fullmatch(stored)
        key = _COLUMNS.get(stored if match is None else match[2])
        stated = self._file.metadata.get(self._key(key)) if key is not None else None
        if type(stated) is int and stated != tensor.shape[-1]:
            raise self._file.problem(
                f"{self._key(str(key))} is {stated}, and {stored!r} has {tensor.shape[-1]} columns"
            )
        if match is None:
            yield _OUTPUT_NORM if stored == _NORM else stored, tensor
            return
        prefix, last, shape = f"model.layers.{int(match[1])}", match[2], tensor.shape
        if last == _IN_PROJ:
            rows, rest = divmod(shape[0], len(PARTS))
            if len(shape) != 2 or rest:
                raise self._shape(stored, tensor, f"{len(PARTS)} parts of equally many rows")
            for number, part in enumerate(PARTS):
                own = tensor.ordered(np.arange(rows * number, rows * (number + 1)))
                yield f"{prefix}.conv.{part}.weight", own.reshaped((rows, shape[1]))
        elif last in _EXPERTS:
            if len(shape) != 3 or shape[0] > _MAX_EXPERTS:
                raise self._shape(stored, tensor, f"the matrices of at most {_MAX_EXPERTS} experts")
            for index, expert in enumerate(tensor.parts()):
                yield f"{prefix}.feed_forward.experts.{index}.{_EXPERTS[last][0]}.weight", expert
        elif last in _OWN:
            if last == _TAPS:
                if len(shape) != 2:
                    raise self._shape(stored, tensor, "two dimensions")
                tensor = tensor.reshaped((shape[0], 1, shape[1]))
            yield f"{prefix}.{_OWN[last]}", tensor
        else:
            raise self._file.problem(f"tensor {stored!r} is none of {self._architecture}")

    def _types(self) -> Iterator[tuple[str, str]]:
        """What quantised matrices are stored as, by their module."""
        plain = {"token_embd.weight": "model.embed_tokens", "output.weight": "lm_head"}
        for stored, tensor in self._tensors.items():
            if len(tensor.shape) == 1 or tensor.stored_as in _FLOATS:
                continue
            match = _STORED.fullmatch(stored)
            if match is None:
                yield plain.get(stored, stored), tensor.kept_as
                continue
            last, prefix = match[2], f"model.layers.{int(match[1])}"
            names = [f"conv.{part}" for part in PARTS] if last == _IN_PROJ else []
            if last in _EXPERTS:
                names = [f"feed_forward.experts.{_EXPERTS[last][1]}"]
            for name in names or [_OWN.get(last, last).removesuffix(".weight")]:
                yield f"{prefix}.{name}", tensor.kept_as

    # -- numbers ---------------------------------------------------------------------------------------------

    def _number(self, key: str, default: int | None = None) -> Any:
        return self._file.scalar(self._key(key), int, default)

    def _shape(self, stored: str, tensor: GGUFTensor, needed: str) -> Exception:
        return self._file.problem(f"tensor {stored!r} has the shape {tensor.shape}; {needed} are needed")
