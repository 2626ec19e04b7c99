"""Types of rope that scale the angles of long texts: a class for each name of `rope_type` in config.json.

`doors.ROPES` names them. The numbers are those of transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math

import torch

from nanovllm.attention.rotary import RopeConfig, RopeType, exponents


class Linear(RopeType):
    """All frequencies are divided by `factor`."""

    required = ("factor",)

    @classmethod
    def max_position(cls, config: RopeConfig, stated: int) -> int:
        return int(stated * config.factor)

    @classmethod
    def frequencies(cls, config: RopeConfig, head_dim: int) -> torch.Tensor:
        return super().frequencies(config, head_dim) / config.factor


class Dynamic(RopeType):
    """Plain up to the stated length; beyond it transformers grows theta with the length of a sequence."""

    required = ("factor",)
    angles_move = True

    @classmethod
    def max_position(cls, config: RopeConfig, stated: int) -> int:
        return int(stated * config.factor)


class Proportional(RopeType):
    """The first elements of each half of a head rotate, with the frequencies of whole heads (Gemma 4)."""

    rotates_whole_heads = True

    @classmethod
    def frequencies(cls, config: RopeConfig, head_dim: int) -> torch.Tensor:
        frequencies = super().frequencies(config, head_dim) / config.factor
        frequencies[int(config.rotary_share * head_dim // 2) :] = 0
        return frequencies


class LongRope(RopeType):
    """A factor for each pair of elements (LongRoPE, https://arxiv.org/abs/2402.13753)."""

    required = ("short_factor", "long_factor")
    states_original = factor_is_ratio = scales_pairs = True

    @classmethod
    def frequencies(cls, config: RopeConfig, head_dim: int) -> torch.Tensor:
        if len(config.long_factor) != head_dim // 2:
            raise ValueError(
                f"rope type 'longrope' needs {head_dim // 2} factors, and the config has "
                f"{len(config.long_factor)}"
            )
        return 1.0 / (torch.tensor(config.long_factor) * config.theta ** exponents(head_dim))

    @classmethod
    def attention_factor(cls, config: RopeConfig) -> float:
        if config.attention_factor is not None:
            return config.attention_factor
        stretched = math.log(max(config.factor, 1.0)) / math.log(config.original_max_position)
        return math.sqrt(1 + stretched)


class Llama3(RopeType):
    """Divide slow frequencies by `factor`, keep fast ones, interpolate between them (Llama 3.1)."""

    required = ("factor", "low_freq_factor", "high_freq_factor")
    states_original = True

    @classmethod
    def check(cls, config: RopeConfig) -> None:
        if not 0 < config.low_freq_factor < config.high_freq_factor:
            raise ValueError(
                "low_freq_factor must be positive and below high_freq_factor, not "
                f"{config.low_freq_factor} and {config.high_freq_factor}"
            )

    @classmethod
    def frequencies(cls, config: RopeConfig, head_dim: int) -> torch.Tensor:
        trained, low, high = config.original_max_position, config.low_freq_factor, config.high_freq_factor
        frequencies = super().frequencies(config, head_dim)
        wavelengths = 2 * math.pi / frequencies
        scaled = torch.where(wavelengths > trained / low, frequencies / config.factor, frequencies)
        smooth = (trained / wavelengths - low) / (high - low)
        between = (1 - smooth) * scaled / config.factor + smooth * scaled
        is_between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
        return torch.where(is_between, between, scaled)


class Yarn(RopeType):
    """Keep frequencies with many rotations in the training length, divide slow ones by `factor`, with a ramp
    between (YaRN, https://arxiv.org/abs/2309.00071)."""

    states_original = factor_is_ratio = True

    @classmethod
    def check(cls, config: RopeConfig) -> None:
        if config.theta == 1:
            raise ValueError("rope_theta must not be 1 with rope type 'yarn': no dimension would differ")

    @classmethod
    def max_position(cls, config: RopeConfig, stated: int) -> int:
        return max(stated, int(config.original_max_position * config.factor))

    @classmethod
    def frequencies(cls, config: RopeConfig, head_dim: int) -> torch.Tensor:
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
        base = config.theta ** exponents(head_dim)
        kept = 1 - ramp
        return 1.0 / (config.factor * base) * (1 - kept) + 1.0 / base * kept

    @classmethod
    def attention_factor(cls, config: RopeConfig) -> float:
        if config.attention_factor is not None:
            return config.attention_factor

        def temperature(mscale: float) -> float:
            return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

        if config.mscale and config.mscale_all_dim:
            return temperature(config.mscale) / temperature(config.mscale_all_dim)
        return temperature(1.0)
