"""AttentionSpec: what a layer's attention computes. Rotary position embedding: the rotation angle of each
position and dimension.

RopeConfig holds a checkpoint's rope settings, which its reader has checked; `rope_table` computes the angles'
cosines and sines. Types that scale the angles are a door, which `doors.ROPES` names. Everything is float32;
an unknown type is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nanovllm import doors
from nanovllm.doors import Table
from nanovllm.kernels.kinds import unknown

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

    @property
    def kind(self) -> type[RopeType]:
        """What its type computes."""
        if self.rope_type not in ROPES:
            raise unknown("rope type", self.rope_type)
        return ROPES[self.rope_type]

    @property
    def longest_fixed(self) -> int | None:
        """In longer sequences the angle of a position depends on their length; None: it never does."""
        return self.original_max_position if self.kind.angles_move else None

    def up_to(self, length: int) -> RopeConfig:
        """The same for sequences of at most `length` tokens: of longrope's two sets of factors, one."""
        factors = self.long_factor if length > self.original_max_position else self.short_factor
        return replace(self, short_factor=factors, long_factor=factors)

    def max_position(self, stated: int) -> int:
        """The longest sequence that the scaling supports, if the config states `stated` positions."""
        return self.kind.max_position(self, stated)

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are rotated, by angle 0 or another."""
        if self.kind.rotates_whole_heads:
            return head_dim
        rotary = int(head_dim * self.rotary_share)
        if rotary % 2 or rotary < 2:
            raise ValueError(f"rope of config.json must rotate an even number of elements, not {rotary}")
        return rotary


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention of one layer computes. The defaults are plain causal attention without positions.

    In a `ModelConfig` the heads are those of the model, in a layer those of its rank.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    window: int | None = None  # a token attends to so many tokens, itself included; None: to all before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: bool = False  # a learned score for each head, which takes weight and adds nothing (gpt-oss)
    qk_norm: Literal["head", "all"] | None = None  # RMSNorm over each head (Qwen3), or over all (OLMo 2)
    rope: RopeConfig | None = None  # None: queries and keys are not rotated
    v_from_k: bool = False  # values are the keys' projection, before norm and rope: there is no v_proj
    v_norm: bool = False  # values are divided by the root mean square of their head (Gemma 4)
    gate: Literal["head", "element"] | None = None  # what its layer multiplies of what was attended
    kv_from: int | None = None  # an earlier layer whose keys and values it reads, with none of its own
    state: Any = None  # of a layer with a state in place of all this, `StateSpec` of `states/spec.py`

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        for name in ("window", "softcap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    def of_rank(self, ranks: int) -> AttentionSpec:
        """The same for one of `ranks` ranks, which split the heads."""
        heads, kv_heads = self.num_heads // ranks, max(1, self.num_kv_heads // ranks)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)


class RopeType:
    """A type of rope, as `rope_type` names it. This is "default", which scales nothing; others extend it."""

    required: tuple[str, ...] = ()  # keys that it must have, besides "rope_theta", which has a default
    states_original = False  # `original_max_position_embeddings` is read; else it is the stated length
    factor_is_ratio = False  # without `factor`, that is the ratio of the stated and the original length
    scales_pairs = False  # has factors for each pair of elements
    angles_move = False  # beyond the original length all angles depend on the length of a sequence
    rotates_whole_heads = False  # by angle 0 or another

    @classmethod
    def check(cls, config: RopeConfig) -> None:
        """Raise ValueError for values that do not go together."""

    @classmethod
    def max_position(cls, config: RopeConfig, stated: int) -> int:
        """As `RopeConfig.max_position`."""
        return stated

    @classmethod
    def frequencies(cls, config: RopeConfig, head_dim: int) -> torch.Tensor:
        """The angle per position of each pair of dimensions, [head_dim / 2]."""
        return 1.0 / (config.theta ** exponents(head_dim))

    @classmethod
    def attention_factor(cls, config: RopeConfig) -> float:
        """The factor of cosines and sines."""
        return 1.0


ROPES: Table[type[RopeType]] = Table(doors.ROPES)


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
    angles = positions[:, None] * config.kind.frequencies(config.up_to(num_positions - 1), rotary)
    scale = config.kind.attention_factor(config)
    rest = positions.new_zeros(num_positions, (head_dim - rotary) // 2)
    return torch.cat((angles.cos() * scale, rest + 1, angles.sin() * scale, rest), dim=-1)


def exponents(head_dim: int) -> torch.Tensor:
    """What theta is raised to for each pair of dimensions, [head_dim / 2]."""
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
