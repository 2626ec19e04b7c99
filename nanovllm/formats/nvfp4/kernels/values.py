"""NVFP4: values of 4 bits (E2M1), two in a byte, in groups of 16 that share a scale in E4M3; and a float32
number for all scales of a tensor.

The layout is that of checkpoints. Owns no weight. Source: files of ModelOpt and of compressed-tensors.
"""

from __future__ import annotations

import torch

from nanovllm.formats.mxfp4.kernels.values import VALUES

GROUP = 16  # columns that share a scale


def codes_of(octets: torch.Tensor) -> torch.Tensor:
    """Bytes [n, K / 2] as codes [n, K] uint8; the lower four bits of a byte are the earlier one."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def dequantise_nvfp4(octets: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values [n, K] of bytes [n, K / 2] uint8 and float32 scales [n, K / 16], which contain the
    number of the tensor."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=octets.device)[codes_of(octets).int()]
    return values * scales.repeat_interleave(GROUP, -1)
