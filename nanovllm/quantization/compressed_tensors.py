"""Reads a quantization_config of quant_method "compressed-tensors": which modules are stored in which format.

A format is a function in `_FORMATS`. Opens no file and stores no weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.quantization.base import ExpertsMethod, Kind, LinearMethod
from nanovllm.quantization.fp8 import Fp8Config, check_choices
from nanovllm.quantization.fp8_loading import Stored
from nanovllm.quantization.int4_configs import pack_quantized_config
from nanovllm.quantization.unquantized import QuantConfig

_WHERE = "config.json: quantization_config"
_CLASSES = {"Linear": ("linear", "lm_head")}  # kinds of weights by the name of their class in torch


@dataclass(frozen=True)
class _Group:
    """The modules that `targets` name, and how all of them are stored."""

    targets: tuple[str, ...]
    quant: QuantConfig

    def has(self, path: str, kind: Kind) -> bool:
        of_class = any(kind in _CLASSES.get(target, ()) for target in self.targets)
        return of_class or (kind in _CLASSES["Linear"] and _matches(path, self.targets))


@dataclass(frozen=True)
class CompressedTensorsConfig(QuantConfig):
    """Each group of modules is in a format of its own; those in `ignored` are in none."""

    groups: tuple[_Group, ...]
    ignored: tuple[str, ...] = ()  # names, or "re:" with a regular expression for their beginning

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> CompressedTensorsConfig:
        """Read a quantization_config. ValueError for what is malformed or not supported."""
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            value = stated.get(key)
            if value and not (isinstance(value, dict) and value.get("format") == "dense"):
                raise ValueError(f"{_WHERE}: {key} {value!r} is not supported; supported: null")
        groups = stated.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ValueError(f"{_WHERE}: config_groups must be an object with groups, not {groups!r}")
        found = tuple(_group(each, groups[each], stated.get("format")) for each in groups)
        return cls(found, _names("ignore", stated.get("ignore") or []))

    def method(self, path: str, kind: Kind) -> LinearMethod:
        if not _matches(path, self.ignored):
            for group in self.groups:
                if group.has(path, kind):
                    return group.quant.method(path, "linear")
        return super().method(path, kind)

    def experts(self, path: str) -> ExpertsMethod:
        """The groups and ignored names are those of their modules, of which the first expert's decide."""
        first = f"{path}.0.down_proj"
        if not _matches(first, self.ignored):
            for group in self.groups:
                if group.has(first, "linear"):
                    return group.quant.experts(path)
        return super().experts(path)

    def on(self, capability: tuple[int, int]) -> CompressedTensorsConfig:
        groups = (replace(group, quant=group.quant.on(capability)) for group in self.groups)
        return replace(self, groups=tuple(groups))

    @property
    def itemsize(self) -> float | None:
        return self.groups[0].quant.itemsize

    @property
    def speed(self) -> float:
        return self.groups[0].quant.speed

    @property
    def note(self) -> str | None:
        notes = dict.fromkeys(group.quant.note for group in self.groups if group.quant.note)
        return "; ".join(notes) or None


def _group(name: str, stated: Any, format_: Any) -> _Group:
    """Read one of config_groups. `format_`: of the file, for a group that states none."""
    if not isinstance(stated, dict) or not isinstance(weights := stated.get("weights"), dict):
        raise ValueError(f"{_WHERE}: {name} must be an object with weights, not {stated!r}")
    format_ = stated.get("format") or format_
    if format_ not in _FORMATS:
        raise ValueError(
            f"{_WHERE}: format {format_!r} of {name} is not supported; supported: "
            f"{', '.join(map(repr, _FORMATS))}"
        )
    if stated.get("output_activations"):
        raise ValueError(f"{_WHERE}: {name}: output_activations are not supported")
    quant = _FORMATS[format_](f"{_WHERE}: {name}", weights, stated.get("input_activations") or {})
    return _Group(_names("targets", stated.get("targets")), quant)


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{_WHERE}: {key} must be a list of names, not {value!r}")
    for name in value:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{_WHERE}: {key}: {name!r} is no regular expression: {error}") from None
    return tuple(value)


def _matches(path: str, names: tuple[str, ...]) -> bool:
    return any(
        re.match(name.removeprefix("re:"), path) is not None if name.startswith("re:") else name == path
        for name in names
    )


def _fp8(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> QuantConfig:
    """W8A8 in FP8: weights with scales of rows or of the whole tensor."""
    float8 = {"type": ("float",), "num_bits": (8,), "symmetric": (True, None)}
    strategies = {"channel": Stored.ROWS, "tensor": Stored.TENSOR}
    check_choices(
        f"{where}: weights", weights, float8 | {"strategy": (*strategies,), "dynamic": (False, None)}
    )
    if inputs:
        check_choices(f"{where}: input_activations", inputs, float8)
    is_static = bool(inputs) and not inputs.get("dynamic")
    if is_static:  # else each row has a scale of its own
        check_choices(f"{where}: input_activations", inputs, {"strategy": ("tensor",)})
    return Fp8Config(strategies[weights["strategy"]], input_scales=is_static)


# By the name in the file: (where in config.json, weights, input_activations) -> how linear layers are stored.
_FORMATS: dict[str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], QuantConfig]] = {
    "float-quantized": _fp8,
    "naive-quantized": _fp8,
    "pack-quantized": pack_quantized_config,
}
