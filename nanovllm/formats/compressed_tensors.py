"""Reads a quantization_config of quant_method "compressed-tensors": which modules are stored in which format.

A format is a function in `_FORMATS`. Opens no file and stores no weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.formats.fp8.kernels.values import GROUP
from nanovllm.formats.fp8.loading import Stored, rows_in_blocks
from nanovllm.formats.fp8.method import OTHER_CACHE, Fp8Config, is_fp8_cache
from nanovllm.formats.int4.configs import pack_quantized_config
from nanovllm.formats.int8.method import int_quantized
from nanovllm.formats.mxfp8.method import mxfp8_quantized
from nanovllm.formats.nvfp4.configs import nvfp4_pack_quantized
from nanovllm.formats.stated import SeveralFormats, check_choices, check_expressions, names_of
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightMethod, is_cache_scale

_WHERE = "config.json: quantization_config"
_CLASSES = {"Linear": ("linear", "lm_head")}  # kinds of weights by the name of their class in torch
_IN_WEIGHTS = ("weight_input", "weight_output")  # of rotations: stored weights contain them


@dataclass(frozen=True)
class _Group:
    """The modules that `targets` name, and how all of them are stored."""

    targets: tuple[str, ...]
    quant: QuantConfig

    def has(self, names: tuple[str, ...], kind: Kind) -> bool:
        """Whether it has a module with these names in files."""
        of_class = any(kind in _CLASSES.get(target, ()) for target in self.targets)
        return of_class or (kind in _CLASSES["Linear"] and _matches(names, self.targets))


@dataclass(frozen=True)
class CompressedTensorsConfig(SeveralFormats):
    """Each group of modules is in a format of its own; those in `ignored` are in none."""

    groups: tuple[_Group, ...]
    ignored: tuple[str, ...] = ()  # names, or "re:" with a regular expression for their beginning
    other_cache: bool = False  # the files hold scales of a KV cache that is not in FP8; they are not used

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> CompressedTensorsConfig:
        """Read a quantization_config. ValueError for what is malformed or not supported."""
        sparsity, cache = stated.get("sparsity_config"), stated.get("kv_cache_scheme")
        if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
            raise ValueError(f"{_WHERE}: sparsity_config {sparsity!r} is not supported; supported: null")
        if not isinstance(cache or {}, dict):
            raise ValueError(f"{_WHERE}: kv_cache_scheme must be an object, not {cache!r}")
        _check_rotations(stated.get("transform_config") or {})
        groups = stated.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ValueError(f"{_WHERE}: config_groups must be an object with groups, not {groups!r}")
        found = tuple(_group(each, groups[each], stated.get("format")) for each in groups)
        in_fp8 = bool(cache) and is_fp8_cache(cache)
        others = bool(cache) and not in_fp8
        return cls(found, _names("ignore", stated.get("ignore") or []), others, cache_scales=in_fp8)

    def method(self, path: str, kind: Kind) -> LinearMethod:
        names = self.names.of(path)
        if not _matches(names, self.ignored):
            for group in self.groups:
                if group.has(names, kind):
                    return group.quant.method(path, "linear")
        return super().method(path, kind)

    def experts(self, path: str) -> WeightMethod | None:
        """The groups and ignored names are those of their modules, of which the first expert's decide."""
        first = self.names.of_experts(path)
        if not _matches(first, self.ignored):
            for group in self.groups:
                if group.has(first, "linear"):
                    return group.quant.experts(path)
        return super().experts(path)

    def on(self, capability: tuple[int, int]) -> CompressedTensorsConfig:
        groups = (replace(group, quant=group.quant.on(capability)) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def packed_rows(self, name: str, shape: Sequence[int], rows: Mapping[str, int]) -> Mapping[str, int]:
        return rows_in_blocks(name, shape, rows)

    def leaves_out(self, name: str) -> bool:
        others = self.other_cache and is_cache_scale(name)
        return others or super().leaves_out(name) or any(g.quant.leaves_out(name) for g in self.groups)

    def most(self, experts: bool) -> QuantConfig:
        """The format of most modules that are named, or of experts; of equally many the first."""
        counts = [sum((".experts" in each) == experts for each in group.targets) for group in self.groups]
        return self.groups[counts.index(max(counts))].quant

    @property
    def note(self) -> str | None:
        notes = dict.fromkeys(group.quant.note for group in self.groups if group.quant.note)
        return "; ".join((*notes, *([OTHER_CACHE] if self.other_cache else []))) or None


def _group(name: str, stated: Any, format_: Any) -> _Group:
    """Read one of config_groups. `format_`: of the file, for a group that states none."""
    if not isinstance(stated, dict) or not isinstance(weights := stated.get("weights"), dict):
        raise ValueError(f"{_WHERE}: {name} must be an object with weights, not {stated!r}")
    format_ = stated.get("format") or format_
    if not isinstance(format_, str) or format_ not in _FORMATS:
        raise ValueError(
            f"{_WHERE}: format {format_!r} of {name} is not supported; supported: "
            f"{', '.join(map(repr, _FORMATS))}"
        )
    if stated.get("output_activations"):
        raise ValueError(f"{_WHERE}: {name}: output_activations are not supported")
    inputs = stated.get("input_activations") or {}
    if not isinstance(inputs, dict):
        raise ValueError(f"{_WHERE}: {name}: input_activations must be an object, not {inputs!r}")
    quant = _FORMATS[format_](f"{_WHERE}: {name}", weights, inputs)
    return _Group(_names("targets", stated.get("targets")), quant)


def _names(key: str, value: Any) -> tuple[str, ...]:
    names = names_of(f"{_WHERE}: {key}", value)
    check_expressions(f"{_WHERE}: {key}", (name for name in names if name.startswith("re:")), "re:")
    return names


def _matches(names: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Whether a module with these names in files is one of those that `patterns` name."""
    return any(
        re.match(pattern.removeprefix("re:"), name) is not None if pattern[:3] == "re:" else pattern == name
        for name in names
        for pattern in patterns
    )


def _check_rotations(stated: Any) -> None:
    """ValueError for a transform_config with rotations that are computed while the model runs."""
    schemes = stated.get("config_groups") or {} if isinstance(stated, dict) else None
    if not isinstance(schemes, dict):
        raise ValueError(f"{_WHERE}: transform_config must be an object with config_groups, not {stated!r}")
    for name, scheme in schemes.items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for each in applied if isinstance(applied, list) else [applied]:
            location = each.get("location") if isinstance(each, dict) else each
            if location not in _IN_WEIGHTS:
                raise ValueError(
                    f"{_WHERE}: transform_config: {name} at location {location!r} is computed while the "
                    "model runs, which is not supported; supported: locations "
                    f"{' and '.join(map(repr, _IN_WEIGHTS))}, which stored weights contain. Use a checkpoint "
                    "without it"
                )


def _fp8(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> QuantConfig:
    """W8A8 in FP8: weights with scales of rows, of the whole tensor or of blocks."""
    float8 = {"type": ("float",), "num_bits": (8,), "symmetric": (True, None)}
    strategies = {"channel": Stored.ROWS, "tensor": Stored.TENSOR, "block": Stored.SCALED_BLOCKS}
    check_choices(
        f"{where}: weights", weights, float8 | {"strategy": (*strategies,), "dynamic": (False, None)}
    )
    if weights["strategy"] == "block":
        check_choices(f"{where}: weights", weights, {"block_structure": ([GROUP, GROUP],)})
    if inputs:
        check_choices(f"{where}: input_activations", inputs, float8)
    is_static = bool(inputs) and not inputs.get("dynamic")
    if is_static:  # else each row has a scale of its own
        check_choices(f"{where}: input_activations", inputs, {"strategy": ("tensor",)})
    return Fp8Config(strategies[weights["strategy"]], input_scales=is_static)


def _naive(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> QuantConfig:
    """Codes as they are, of the type that is stated."""
    types = {"float": _fp8, "int": int_quantized}
    check_choices(f"{where}: weights", weights, {"type": (*types,)})
    return types[weights["type"]](where, weights, inputs)


# By the name in the file: (where in config.json, weights, input_activations) -> how linear layers are stored.
_FORMATS: dict[str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], QuantConfig]] = {
    "float-quantized": _fp8,
    "int-quantized": int_quantized,
    "naive-quantized": _naive,
    "pack-quantized": pack_quantized_config,
    "mxfp8-quantized": mxfp8_quantized,
    "nvfp4-pack-quantized": nvfp4_pack_quantized,
}
