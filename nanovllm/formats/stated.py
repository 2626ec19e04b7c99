"""What quantisations read in config.json in the same way. Every error says where. Opens no file."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.quantization.config import QuantConfig


def check_choices(where: str, stated: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """ValueError unless each key has one of its supported values; None: it may be absent."""
    for key, values in supported.items():
        if stated.get(key) not in values:
            names = ", ".join(repr(value) for value in values if value is not None)
            raise ValueError(f"{where}: {key} {stated.get(key)!r} is not supported; supported: {names}")


def names_of(where: str, value: Any, what: str = "a list of names") -> tuple[str, ...]:
    """The names of modules that a key has as its value. ValueError for anything but a list of strings."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where} must be {what}, not {value!r}")
    return tuple(value)


def check_expressions(where: str, expressions: Iterable[str], prefix: str = "") -> None:
    """ValueError for the first that is no regular expression behind the prefix."""
    for each in expressions:
        try:
            re.compile(each.removeprefix(prefix))
        except re.error as error:
            raise ValueError(f"{where}: {each!r} is no regular expression: {error}") from None


@dataclass(frozen=True)
class FourBitConfig(QuantConfig):
    """Weights are in 4 bits; a device that cannot read them gets them dequantised."""

    packs: bool = field(default=True, kw_only=True)  # whether the device can

    def on(self, capability: tuple[int, int]) -> QuantConfig:
        return replace(self, packs=capability >= (8, 0))


class SeveralFormats(QuantConfig):
    """Modules have formats of their own; for estimates that of most counts."""

    @abstractmethod
    def most(self, experts: bool) -> QuantConfig:
        """The format of most modules that are named, or of experts."""

    @property
    def itemsize(self) -> float | None:
        return self.most(experts=False).itemsize

    @property
    def expert_itemsize(self) -> float | None:
        return self.most(experts=True).expert_itemsize

    @property
    def speed(self) -> float:
        return self.most(experts=False).speed
