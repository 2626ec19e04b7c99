"""Rotary position embedding: the rotation angle of each position and dimension, for each known scaling.

RopeConfig holds a checkpoint's checked rope settings; `rope_table` computes the angles' cosines and sines.
Everything is float32; an unknown type is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.kernels.kinds import Kinds, unknown

# Keys that each type must have, besides "rope_theta", which has a default.
_REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
LARGEST = 2.0**31  # settings and positions are below


@dataclass(frozen=True)
class RopeConfig:
    """Rope settings, named as in transformers' `rope_parameters`; each type uses only its own."""

    rope_type: str = "default"
    theta: float = 10000.0
    original_max_position: int = 0  # the training length, before scaling; for dynamic, llama3 and yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope: of each pair of elements, up to the training length
    long_factor: tuple[float, ...] = ()  # the same beyond; see `up_to`
    # Of a head's elements, the first ones; the others are not rotated. With "proportional" the first ones of
    # each half, with the frequencies of whole heads.
    rotary_share: float = 1.0
    interleaved: bool = False  # rotates neighbouring elements, and not those of the two halves

    @classmethod
    def from_dict(cls, params: Mapping[str, Any], theta: float, max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_scaling` (4, where the type may be called "type").

        theta, max_position_embeddings: defaults for keys missing in `params`. Raises ValueError for an
        unknown type, a missing key, and a value that is not a number.
        """
        rope_type = params.get("rope_type", params.get("type", "default"))
        if not isinstance(rope_type, str) or rope_type not in _REQUIRED_KEYS:
            raise ValueError(
                f"rope type {rope_type!r} is not supported; supported: {', '.join(_REQUIRED_KEYS)}"
            )
        for key in _REQUIRED_KEYS[rope_type]:
            if params.get(key) is None:
                raise ValueError(
                    f"rope type {rope_type!r} needs {key!r}, and the config has only {dict(params)}"
                )

        def number(key: str, default: float | None) -> Any:
            value = params.get(key)
            if value is None:
                value = default
            if value is None:
                return None
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LARGEST:
                raise ValueError(f"rope setting {key!r} must be a number of at least 0, not {value!r}")
            return value

        def numbers(key: str) -> tuple[float, ...]:
            values = params.get(key) or ()
            if rope_type != "longrope":
                return ()
            if not isinstance(values, list) or not all(isinstance(each, (int, float)) for each in values):
                raise ValueError(f"rope setting {key!r} must be a list of numbers, not {values!r}")
            return tuple(map(float, values))

        original = number("original_max_position_embeddings", max_position_embeddings)
        if rope_type not in ("llama3", "yarn", "longrope"):
            original = max_position_embeddings  # beyond it transformers grows the base of "dynamic"
        if original <= 0:
            raise ValueError(f"original_max_position_embeddings must be positive, not {original}")
        # In a config of these types without a factor, the factor is the ratio of the two lengths.
        stretched = rope_type in ("yarn", "longrope")
        factor = number("factor", max_position_embeddings / original if stretched else 1.0)
        own = ("low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim")
        config = cls(
            rope_type=rope_type,
            theta=float(number("rope_theta", theta)),
            original_max_position=original,
            factor=factor,
            beta_fast=number("beta_fast", 0) or 32.0,
            beta_slow=number("beta_slow", 0) or 1.0,
            truncate=bool(params.get("truncate", True)),
            short_factor=numbers("short_factor"),
            long_factor=numbers("long_factor"),
            **{key: number(key, getattr(cls, key)) for key in own},
        )
        config._check(max_position_embeddings)
        return config

    def _check(self, stated: int) -> None:
        """Raise ValueError for values that do not go together, with `stated` positions."""
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(f"rope_theta and factor must be positive, not {self.theta} and {self.factor}")
        if self.rope_type == "yarn" and self.theta == 1:
            raise ValueError("rope_theta must not be 1 with rope type 'yarn': no dimension would differ")
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "low_freq_factor must be positive and below high_freq_factor, not "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if not 1 <= self.max_position(stated) < LARGEST:
            raise ValueError(
                f"max_position_embeddings {stated} with the factor {self.factor} must "
                "be at least 1 and below 2**31"
            )

    @property
    def longest_fixed(self) -> int | None:
        """In longer sequences the angle of a position depends on their length; None: it never does."""
        return self.original_max_position if self.rope_type == "dynamic" else None

    def up_to(self, length: int) -> RopeConfig:
        """The same for sequences of at most `length` tokens: of longrope's two sets of factors, one."""
        factors = self.long_factor if length > self.original_max_position else self.short_factor
        return replace(self, short_factor=factors, long_factor=factors)

    def max_position(self, stated: int) -> int:
        """The longest sequence that the scaling supports, if the config states `stated` positions."""
        if self.rope_type in ("linear", "dynamic"):
            return int(stated * self.factor)
        if self.rope_type == "yarn":
            return max(stated, int(self.original_max_position * self.factor))
        if self.rope_type in ("default", "llama3", "longrope", "proportional"):
            return stated  # the scaled length
        raise unknown("rope type", self.rope_type)

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are rotated, by angle 0 or another."""
        if self.rope_type == "proportional":
            return head_dim
        rotary = int(head_dim * self.rotary_share)
        if rotary % 2 or rotary < 2:
            raise ValueError(f"rope must rotate an even number of elements of a head, not {rotary}")
        return rotary


def rope_table(config: RopeConfig | None, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return [num_positions, head_dim] float32 on the CPU: head_dim / 2 cosines, then head_dim / 2 sines;
    without a config those of angle 0.

    The same numbers as transformers' `modeling_rope_utils`. Those of "dynamic" hold up to `longest_fixed`: in
    a longer sequence every token changes them all, and a cache of rotated keys cannot follow. With "longrope"
    `RopeConfig.up_to` chooses the factors, for all sequences; transformers chooses for each sequence.
    The pairs that are not rotated come last, with angle 0.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    if config is None:
        angles = positions.new_zeros(num_positions, head_dim // 2)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)
    rotary = config.rotary_dim(head_dim)
    angles = positions[:, None] * _frequencies(config.up_to(num_positions - 1), rotary)
    scale = attention_factor(config)
    rest = positions.new_zeros(num_positions, (head_dim - rotary) // 2)
    return torch.cat((angles.cos() * scale, rest + 1, angles.sin() * scale, rest), dim=-1)


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """The angle per position of each pair of dimensions, [head_dim / 2]."""
    return _FREQUENCIES[config.rope_type](config, head_dim)


def _plain_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    return 1.0 / (config.theta ** _exponents(head_dim))


def _linear_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    return _plain_frequencies(config, head_dim) / config.factor


def _proportional_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    frequencies = _linear_frequencies(config, head_dim)
    frequencies[int(config.rotary_share * head_dim // 2) :] = 0
    return frequencies


def _longrope_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    if len(config.long_factor) != head_dim // 2:
        raise ValueError(
            f"rope type 'longrope' needs {head_dim // 2} factors, and the config has "
            f"{len(config.long_factor)}"
        )
    return 1.0 / (torch.tensor(config.long_factor) * config.theta ** _exponents(head_dim))


def _llama3_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, interpolate between them (Llama 3.1)."""
    trained, low, high = config.original_max_position, config.low_freq_factor, config.high_freq_factor
    frequencies = _plain_frequencies(config, head_dim)
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > trained / low, frequencies / config.factor, frequencies)
    smooth = (trained / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / config.factor + smooth * scaled
    is_between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(is_between, between, scaled)


def _yarn_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Keep frequencies with many rotations in the training length, divide slow ones by `factor`, with a ramp
    between (YaRN, https://arxiv.org/abs/2309.00071)."""

    def dimension(rotations: float) -> float:  # the dimension with this many rotations in that length
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    base = config.theta ** _exponents(head_dim)
    kept = 1 - ramp
    return 1.0 / (config.factor * base) * (1 - kept) + 1.0 / base * kept


_FREQUENCIES: Kinds[str, Callable[[RopeConfig, int], torch.Tensor]] = Kinds(
    "rope type",
    {
        "default": _plain_frequencies,
        "linear": _linear_frequencies,
        "dynamic": _plain_frequencies,
        "llama3": _llama3_frequencies,
        "yarn": _yarn_frequencies,
        "longrope": _longrope_frequencies,
        "proportional": _proportional_frequencies,
    },
)


def attention_factor(config: RopeConfig) -> float:
    """The factor of cosines and sines; 1 for all types except yarn and longrope."""
    if config.rope_type in ("default", "linear", "dynamic", "llama3", "proportional"):
        return 1.0
    if config.rope_type not in ("yarn", "longrope"):
        raise unknown("rope type", config.rope_type)
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type == "longrope":
        stretched = math.log(max(config.factor, 1.0)) / math.log(config.original_max_position)
        return math.sqrt(1 + stretched)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)
