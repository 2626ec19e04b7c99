"""Int4Config: which weights of a checkpoint are in 4 bits, read from config.json's quantization_config.

One function for each `quant_method`, which refuses what `int4_formats` cannot read. Opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.formats.int4.experts import Int4ExpertsMethod
from nanovllm.formats.int4.layouts import Int4Format, awq, gptq, pack_quantized
from nanovllm.formats.int4.method import Int4LinearMethod
from nanovllm.formats.stated import FourBitConfig, check_expressions, names_of
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.method import ExpertsMethod
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.config import QuantConfig

_GROUPS = (32, 64, 128, -1)
# AutoAWQ and GPTQModel leave routers and the gates of states, and do not say so.
_ROUTERS = (r"\.gate$", r"\.shared_expert_gate$", r"\.in_proj_(a|b|ba)$")
_KEY = "config.json: quantization_config"


@dataclass(frozen=True)
class Int4Config(FourBitConfig):
    """Linear layers are in 4 bits, except those whose names match one of `skipped`."""

    format: Int4Format
    skipped: tuple[str, ...] = ()  # regular expressions, found anywhere in a module's name
    only: tuple[str, ...] | None = None  # ends of the names of all modules in 4 bits; None: all but `skipped`
    head: bool = False  # whether the LM head is a linear layer of these

    def method(self, path: str, kind: Kind) -> LinearMethod:
        mine = kind == "linear" or (kind in ("lm_head", "tied_embedding") and self.head)
        name = "lm_head" if kind == "tied_embedding" else path
        if not mine or self._skips(self.names.of(name), kind):
            return super().method(path, kind)
        if kind == "tied_embedding":
            raise ValueError(
                f"{_KEY} quantises lm_head, which is also the embedding (tie_word_embeddings); a quantised "
                "embedding is not supported"
            )
        return Int4LinearMethod(self.format, self.packs)

    def experts(self, path: str) -> ExpertsMethod:
        """In 4 bits, unless the first expert's last projection is one of the skipped."""
        if self._skips(self.names.of_experts(path)):
            return UnquantizedExpertsMethod()
        return Int4ExpertsMethod(self.format, self.packs)

    def _skips(self, names: tuple[str, ...], kind: Kind = "linear") -> bool:
        """Whether a module with these names in files is not in 4 bits."""
        if any(re.search(pattern, name) for name in names for pattern in self.skipped):
            return True
        if self.only is None or kind != "linear":  # a LM head is in no block
            return False
        return not any(f".{name}".endswith(f".{end}") for name in names for end in self.only)

    @property
    def itemsize(self) -> float | None:
        """4 bits, and 4 bytes for each group; None: dequantised."""
        scales = 0.0 if self.format.group == -1 else 4 / self.format.group
        return 0.5 + scales if self.packs else None

    @property
    def note(self) -> str | None:
        """What a user should know of it at a start."""
        if self.packs:
            return None
        return f"{self.format.name} weights are dequantised, because this device has no product for 4 bits"


def from_awq(stated: Mapping[str, Any]) -> QuantConfig:
    """quant_method "awq", as AutoAWQ writes it. ValueError for what is not supported."""
    stated = _renamed(stated, {"w_bit": "bits", "q_group_size": "group_size"})
    _one_of(stated, "bits", (4,))
    _one_of(stated, "version", ("gemm",), default="gemm")
    group = _one_of(stated, "group_size", _GROUPS, default=128)
    zero_point = _one_of(stated, "zero_point", (True, False), default=True)
    names, key = stated.get("modules_to_not_convert"), f"{_KEY}: modules_to_not_convert"
    skipped = () if names is None else names_of(key, names)
    return Int4Config(awq(group, zero_point), _ROUTERS + tuple(map(re.escape, skipped)))


def from_gptq(stated: Mapping[str, Any]) -> QuantConfig:
    """quant_method "gptq", as AutoGPTQ and GPTQModel write it. ValueError for what is not supported."""
    _one_of(stated, "bits", (4,))
    group = _one_of(stated, "group_size", _GROUPS, default=128)
    sorts = _one_of(stated, "desc_act", (False, True), default=False)
    _one_of(stated, "sym", (True, False), default=True)
    key = "format" if stated.get("checkpoint_format") is None else "checkpoint_format"
    written = _one_of(stated, key, ("gptq", "gptq_v2"), default="gptq")
    _one_of(stated, "pack_dtype", ("int32",), default="int32")
    _one_of(stated, "is_marlin_format", (False,), default=False)
    skipped = _ROUTERS + _without(stated.get("dynamic") or {})
    head = _one_of(stated, "lm_head", (False, True), default=False)
    return Int4Config(gptq(group, sorts, {"gptq": 1, "gptq_v2": 2}[written]), skipped, _modules(stated), head)


def _without(dynamic: Any) -> tuple[str, ...]:
    """The modules that GPTQModel's `dynamic` leaves as they are: "-:" and a regular expression for the
    beginning of their names. ValueError for settings of single modules."""
    patterns = tuple(f"^(?:{key[2:]})" for key in dynamic if str(key).startswith("-:"))
    if not isinstance(dynamic, dict) or len(patterns) < len(dynamic):
        raise ValueError(
            f"{_KEY}: dynamic {dynamic!r} gives modules settings of their own, which is not "
            "supported; supported: the same bits and group_size for all, and '-:' with modules without them"
        )
    check_expressions(f"{_KEY}: dynamic", patterns)
    return patterns


def _modules(stated: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The modules of a block that GPTQ has quantised, in lists of those that it quantised together; None: all
    linear layers."""
    key = "modules_in_block_to_quantize"
    value = stated.get(key)
    if value is None:
        return None
    rows = (
        [row if isinstance(row, list) else [row] for row in value] if isinstance(value, list) else [[value]]
    )
    names = [name for row in rows for name in row]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{_KEY}: {key} must be names or lists of names, not {value!r}")
    return tuple(names)


def _renamed(stated: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The keys of another writer by their usual names. ValueError if both are there and differ."""
    found = dict(stated)
    for other, name in names.items():
        value, usual = found.pop(other, None), found.get(name)
        if None not in (value, usual) and value != usual:
            raise ValueError(f"{_KEY}: {other} {value!r} and {name} {usual!r} mean the same, and differ")
        found[name] = usual if value is None else value
    return found


def pack_quantized_config(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Int4Config:
    """What a group of compressed-tensors' config_groups with format "pack-quantized" states of its weights
    and input_activations, for all linear layers. `where` is for errors. ValueError for what is not supported.
    """
    if not isinstance(weights, dict) or inputs:
        wrong = f"input_activations {inputs!r}" if inputs else f"weights {weights!r}"
        raise ValueError(f"{where}: {wrong} is not supported with 4 bits; supported: weights of 4 bits only")
    _one_of(weights, "num_bits", (4,), where=where)
    _one_of(weights, "type", ("int",), default="int", where=where)
    _one_of(weights, "dynamic", (False,), default=False, where=where)
    strategy = _one_of(weights, "strategy", ("group", "channel"), where=where)
    group = _one_of(weights, "group_size", _GROUPS, where=where) if strategy == "group" else -1
    symmetric = _one_of(weights, "symmetric", (True, False), default=True, where=where)
    orders = ("weight", "static", "group", "dynamic", False)
    order = _one_of(weights, "actorder", orders, default=False, where=where)
    return Int4Config(pack_quantized(group, not symmetric, order in ("group", "dynamic")))


def _one_of(
    stated: Mapping[str, Any], key: str, values: Sequence[Any], default: Any = None, where: str = _KEY
) -> Any:
    """The value of a key, which must be one of `values`; null or missing means `default`."""
    value = default if stated.get(key) is None else stated[key]
    if isinstance(value, str):
        value = value.lower()
    if not any(type(value) is type(each) and value == each for each in values):
        supported = ", ".join(map(repr, values))
        raise ValueError(f"{where}: {key} {value!r} is not supported; supported: {supported}")
    return value
