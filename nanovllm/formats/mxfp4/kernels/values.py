"""MXFP4: values of 4 bits (E2M1), two in a byte, in groups of 32 that share a scale, a power of two (E8M0).

The layout is that of checkpoints. Owns no weight. Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import torch

GROUP = 32  # values that share a scale
BYTES = GROUP // 2  # of a group
SCALE_BIAS = 127  # a scale's byte s means 2 ** (s - SCALE_BIAS)
SCALE_NAN = 255  # this byte means NaN
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; the fourth bit is the sign
VALUES = (*MAGNITUDES, *(-each for each in MAGNITUDES))


def dequantise_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values [..., K] of blocks [..., K / 32, 16] and scales [..., K / 32], both uint8.

    The lower four bits of a byte are the earlier value. Exact in bfloat16 and float32, but for values beyond
    their range; rounded once in other dtypes.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).int()
    values = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)[codes]
    bits = scales.int() << 23  # the exponent of a float32, but for 2 ** -127 and NaN
    powers = torch.where((scales == 0) | (scales == SCALE_NAN), bits | 2**22, bits).view(torch.float32)
    return (values * powers[..., None, None]).to(dtype).flatten(-3)
