"""Reads what ModelOpt states of a checkpoint: quantization_config with quant_method "modelopt", or the same
keys of hf_quant_config.json. Which modules are stored in which format. Opens no file and stores no weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from nanovllm.formats.fp8.kernels.values import GROUP as BLOCK
from nanovllm.formats.fp8.loading import Stored, rows_in_blocks
from nanovllm.formats.fp8.method import OTHER_CACHE, Fp8Config, is_fp8_cache
from nanovllm.formats.mxfp8.method import GROUP as MX_GROUP
from nanovllm.formats.mxfp8.method import MXFP8
from nanovllm.formats.nvfp4.configs import Nvfp4Config
from nanovllm.formats.nvfp4.kernels.values import GROUP
from nanovllm.formats.nvfp4.layouts import MODELOPT
from nanovllm.formats.stated import SeveralFormats
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightMethod, is_cache_scale

_WHERE = "quantisation by ModelOpt"
_NVFP4, _MIXED = Nvfp4Config(MODELOPT), "MIXED_PRECISION"
# By quant_algo in capitals: how modules are stored, and the group_size that may be stated.
_ALGORITHMS: dict[str, tuple[QuantConfig, tuple[int | None, ...]]] = {
    "NVFP4": (_NVFP4, (GROUP, None)),
    "W4A16_NVFP4": (_NVFP4, (GROUP, None)),
    "NVFP4_FOUR_OVER_SIX": (_NVFP4, (GROUP, None)),
    "FP8": (Fp8Config(Stored.TENSOR), (None,)),
    "FP8_PER_CHANNEL_PER_TOKEN": (Fp8Config(Stored.ROWS), (None,)),
    "FP8_PB_WO": (Fp8Config(Stored.SCALED_BLOCKS), (BLOCK, None)),
    "MXFP8": (MXFP8, (MX_GROUP, None)),
}


@dataclass(frozen=True)
class ModelOptConfig(SeveralFormats):
    """All linear layers and the LM head are in one format, but for `excluded`; or each of `layers` is in one
    of its own, and nothing else is."""

    every: QuantConfig | None = None
    excluded: tuple[str, ...] = ()  # names, also of what holds modules, perhaps with *
    layers: Mapping[str, QuantConfig] = field(default_factory=dict, hash=False)  # by the name in files
    others: tuple[str, ...] = ()  # what the files hold besides, and nothing reads

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> ModelOptConfig:
        """Read a quantization_config, or the object `quantization` of hf_quant_config.json. ValueError for
        what is malformed or not supported."""
        algorithm = stated.get("quant_algo")
        layers: dict[str, QuantConfig] = {}
        if isinstance(algorithm, str) and algorithm.upper() == _MIXED:
            found = stated.get("quantized_layers")
            if not isinstance(found, dict) or not found:
                raise ValueError(f"{_WHERE}: quantized_layers must be an object of modules, not {found!r}")
            for name, each in found.items():
                if not isinstance(each, dict):
                    raise ValueError(f"{_WHERE}: {name} must be an object with quant_algo, not {each!r}")
                layers[name] = _format(f"{_WHERE}: {name}", each)
        every = None if layers else _format(_WHERE, stated)
        excluded = () if layers else _names(stated)
        scheme, cache = stated.get("kv_cache_scheme"), stated.get("kv_cache_quant_algo")
        is_fp8 = bool(scheme or cache) and is_fp8_cache(scheme or cache)
        others = () if is_fp8 or not (scheme or cache) else ("k_scale", "v_scale", "k_bias", "v_bias")
        return cls(every, excluded, layers, others, cache_scales=is_fp8)

    def _of(self, names: tuple[str, ...]) -> QuantConfig | None:
        """How a module with these names in files is stored; None: in floats."""
        if self.every is not None:
            return (
                None if any(_covers(each, name) for each in self.excluded for name in names) else self.every
            )
        for name in names:
            while name:
                if name in self.layers:
                    return self.layers[name]
                name = name.rpartition(".")[0]  # experts have one entry for all
        return None

    def method(self, path: str, kind: Kind) -> LinearMethod:
        found = self._of(self.names.of(path)) if kind in ("linear", "lm_head") else None
        return super().method(path, kind) if found is None else found.method(path, "linear")

    def experts(self, path: str) -> WeightMethod | None:
        found = self._of(self.names.of_experts(path))
        return super().experts(path) if found is None else found.experts(path)

    def on(self, capability: tuple[int, int]) -> ModelOptConfig:
        every = None if self.every is None else self.every.on(capability)
        layers = {name: each.on(capability) for name, each in self.layers.items()}
        return replace(self, every=every, layers=layers)

    def packed_rows(self, name: str, shape: Any, rows: Mapping[str, int]) -> Mapping[str, int]:
        return rows_in_blocks(name, shape, rows)

    def leaves_out(self, name: str) -> bool:
        """Scales of activations too: those in FP8 have scales of their own, others stay as they are."""
        last = name.rpartition(".")[2]
        others = last in self.others and (is_cache_scale(name) or last.endswith("_bias"))
        return last == "input_scale" or others or super().leaves_out(name)

    def most(self, experts: bool) -> QuantConfig:
        """The format of most modules, or of those of experts."""
        formats = Counter(each for name, each in self.layers.items() if (".experts" in name) == experts)
        found = formats or Counter(self.layers.values())
        return self.every or found.most_common(1)[0][0]

    @property
    def note(self) -> str | None:
        formats = [self.every] if self.every is not None else self.layers.values()
        notes = [each.note for each in formats if each is not None and each.note]
        if self.others:
            notes.append(OTHER_CACHE)
        return "; ".join(dict.fromkeys(notes)) or None


def _format(where: str, stated: Mapping[str, Any]) -> QuantConfig:
    """The format that a quant_algo names. ValueError for others, and for another group."""
    algorithm, group = stated.get("quant_algo"), stated.get("group_size")
    name = algorithm.upper() if isinstance(algorithm, str) else ""
    if name not in _ALGORITHMS:
        supported = ", ".join(map(repr, (*_ALGORITHMS, _MIXED)))
        raise ValueError(
            f"{where}: quant_algo {algorithm!r} is not supported; supported: {supported}. Use such a "
            "checkpoint, or the model's bfloat16 or float16 checkpoint"
        )
    found, groups = _ALGORITHMS[name]
    if group not in groups and group != 0:
        raise ValueError(
            f"{where}: group_size {group!r} of quant_algo {algorithm!r} is not supported; supported: "
            f"{', '.join(str(each) for each in groups if each is not None) or 'none'}"
        )
    return found


def _names(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that are not quantised: `exclude_modules` of one file is `ignore` of the other."""
    found: list[str] = []
    for key in ("exclude_modules", "ignore"):
        names = stated.get(key) or []
        if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
            raise ValueError(f"{_WHERE}: {key} must be a list of names, not {names!r}")
        found += names
    return tuple(found)


def _covers(pattern: str, name: str) -> bool:
    """Whether a pattern is for a module of this name, or for one that holds it. Older files have parts of
    names."""
    parts = name.split(".")
    holders = (".".join(parts[: index + 1]) for index in range(len(parts)))
    return f".{pattern}." in f".{name}." or any(fnmatchcase(each, pattern) for each in holders)
