"""Checks of the kernels for weights of 4 bits, for any device, against exact products."""

from __future__ import annotations

import torch
from tensors import F16, assert_near, randn

from nanovllm.formats.int4.kernels.layout import (
    BLOCK,
    FACTOR,
    MXFP4,
    NVFP4,
    Int4Weight,
    dequantise_reference,
    pack_codes,
    pack_mxfp4,
    pack_nvfp4,
    pack_scales,
    unpack_codes,
    unpack_scales,
)
from nanovllm.formats.int4.kernels.matmul import Int4Tile, int4_linear_reference, int4_linear_triton
from nanovllm.formats.int4.kernels.values import dequantise_triton
from nanovllm.formats.mxfp4.kernels.values import dequantise_mxfp4
from nanovllm.formats.nvfp4.kernels.values import dequantise_nvfp4


def make_weight(
    n: int, k: int, group: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Int4Weight, torch.Tensor]:
    """A random weight, and its exact values [n, k] in float64."""
    if group == MXFP4:
        return make_mxfp4(n, k, device, seed)
    if group == NVFP4:
        return make_nvfp4(n, k, device, seed)
    generator = torch.Generator().manual_seed(n * k + group + seed)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    groups = -(-(k + -k % BLOCK) // group)
    zeros = torch.randint(0, 16, (groups, n), generator=generator)
    signs = torch.randint(0, 2, (groups, n), generator=generator) * 2 - 1  # AutoRound has both
    scales = ((torch.rand(groups, n, generator=generator) * 0.02 + 0.002) * signs).to(dtype)
    weight = Int4Weight(pack_codes(codes), pack_scales(scales, zeros), k, group)
    assert torch.equal(unpack_codes(weight.words, k), codes)
    again, zeros_again = unpack_scales(weight.scales, dtype)
    assert torch.equal(again, scales) and torch.equal(zeros_again, zeros.int())
    at = torch.arange(k) // group
    exact = (codes.double() - zeros[at].T) * scales[at].T.double()
    return weight._replace(words=weight.words.to(device), scales=weight.scales.to(device)), exact.to(device)


def make_mxfp4(n: int, k: int, device: str, seed: int) -> tuple[Int4Weight, torch.Tensor]:
    """All codes, and scales of 2 ** -8 to 2 ** -2; one is the least that is not 0. Larger ones make gates of
    SiLU so large that their rounding counts for more than the bound of `assert_near`."""
    generator = torch.Generator().manual_seed(n * k + seed)
    blocks = torch.randint(0, 256, (n, k // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(119, 123, (n, k // 32), dtype=torch.uint8, generator=generator)
    scales[0, 0], scales[1, -1] = 1, 125
    words, octets = pack_mxfp4(blocks, scales)
    weight = Int4Weight(words.to(device), octets.to(device), k, MXFP4)
    return weight, dequantise_mxfp4(blocks, scales).double().to(device)


def make_nvfp4(n: int, k: int, device: str, seed: int) -> tuple[Int4Weight, torch.Tensor]:
    """All codes, scales of 0, of the least and of the largest value, and a factor for each row."""
    generator = torch.Generator().manual_seed(n * k + seed)
    octets = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    bits = torch.randint(48, 72, (n, k // NVFP4), dtype=torch.uint8, generator=generator)
    bits[:4, 0] = torch.tensor([0, 1, 9, 126], dtype=torch.uint8)
    scales = bits.view(torch.float8_e4m3fn).float()
    factors = torch.rand(n, generator=generator) * 0.01 + 0.001
    factors[3] /= 100  # of the largest scale
    words, packed = pack_nvfp4(octets, scales)
    made = [each.to(device) for each in (words, packed, factors * FACTOR)]
    exact = dequantise_nvfp4(octets, scales).double() * factors.double()[:, None]
    return Int4Weight(*made[:2], k, NVFP4, made[2]), exact.to(device)


def check_dequantise(n: int, k: int, group: int, dtype: torch.dtype, device: str) -> None:
    """Bit for bit, but for the interpreter, which truncates to bfloat16."""
    weight, exact = make_weight(n, k, group, dtype, device)
    assert torch.equal(dequantise_reference(weight.words, weight, dtype), exact.float().to(dtype))
    out = dequantise_triton(weight.words, weight, dtype)
    if dtype == F16 or device != "cpu":
        assert torch.equal(out, exact.float().to(dtype))
    assert_near(out, exact)


def check_product(
    rows: int, n: int, k: int, group: int, dtype: torch.dtype, device: str, tile: Int4Tile | None
) -> None:
    """With bias, with a residual, and with SiLU, for rows with gaps."""
    weight, exact = make_weight(n, k, group, dtype, device)
    x = randn(rows, 2 * k, dtype=dtype, device=device)[:, k:]
    bias = randn(n, dtype=dtype, device=device, seed=1)
    wanted = x.double() @ exact.T + bias.double()
    residual = randn(rows, n, dtype=dtype, device=device, seed=2)
    gate, up = wanted.to(dtype).double().chunk(2, dim=1)
    outs = [int4_linear_triton(x, weight, bias, tile=tile), int4_linear_reference(x, weight, bias)]
    for out in outs:
        assert out.dtype == dtype
        assert_near(out, wanted)
    place = residual.clone()
    assert int4_linear_triton(x, weight, bias, place, tile=tile) is place
    assert_near(place, wanted + residual.double())
    assert_near(int4_linear_triton(x, weight, bias, silu=True, tile=tile), gate * torch.sigmoid(gate) * up)
