"""Checks of the FP8 kernels for any device: rows, norms, activations and products in FP8.

A check compares the Triton launcher with its reference in plain torch, and both with exact sums.
"""

from __future__ import annotations

import torch
from moe_cases import slots_of
from tensors import BF16, F32, assert_near, randn

from nanovllm.formats.fp8.kernels.fused import (
    add_rms_norm_fp8_reference,
    add_rms_norm_fp8_triton,
    silu_and_mul_fp8_reference,
    silu_and_mul_fp8_triton,
)
from nanovllm.formats.fp8.kernels.gemv import fp8_gemv_reference, fp8_gemv_triton
from nanovllm.formats.fp8.kernels.grouped import Fp8Experts, fp8_experts_reference, fp8_experts_triton
from nanovllm.formats.fp8.kernels.matmul import (
    BLOCK_TILES,
    TILES,
    Fp8Weight,
    fitted_fp8,
    fp8_linear_reference,
    fp8_linear_triton,
)
from nanovllm.formats.fp8.kernels.values import (
    FP8,
    GROUP,
    Fp8Rows,
    quantise_rows_reference,
    quantise_rows_triton,
)
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.fp8 import FP8_MAX
from nanovllm.kernels.matmul import Tile
from nanovllm.moe.kernels.grouped_matmul import ExpertChoice
from nanovllm.moe.kernels.routing import route_triton


def make_weight(n: int, k: int, group: int | None, device: str, group_rows: int = GROUP) -> Fp8Weight:
    """A random weight with scales that differ much."""
    codes = (randn(n, k, dtype=torch.float32, device=device, seed=3) * 100).clamp(-448, 448).to(FP8)
    shape = (n,) if group is None else (-(-n // group_rows), -(-k // group))
    scales = randn(*shape, dtype=torch.float32, device=device, seed=4).abs() * 0.01 + 1e-4
    return Fp8Weight(codes, scales)


def assert_same_rows(ours: Fp8Rows, reference: Fp8Rows, exact: bool = True) -> None:
    """Equal scales and codes; not `exact`: some codes may be one step apart, because their inputs are (the
    interpreter truncates to bfloat16)."""
    assert ours.codes.shape == reference.codes.shape and ours.scales.shape == reference.scales.shape
    torch.testing.assert_close(ours.scales, reference.scales, rtol=0 if exact else 3e-2, atol=0)
    apart = (ours.codes.float() != reference.codes.float()).float().mean()
    assert not ours.codes.numel() or apart <= (0 if exact else 0.3), apart
    step = 2.0**-9 * reference.scales.max() if reference.scales.numel() else 0
    torch.testing.assert_close(ours.float(), reference.float(), rtol=0.16, atol=2 * float(step))


def check_rows(rows: int, n: int, group: int | None, device: str, dtype: torch.dtype = BF16) -> None:
    """Rows alone, of the norm, and of the activation."""
    x = randn(rows, 2 * n, dtype=dtype, device=device)[:, n:]
    if rows > 2:
        x[1], x[2, 0] = 0, 3e4
    ours, reference = quantise_rows_triton(x, group), quantise_rows_reference(x, group)
    assert_same_rows(ours, reference)
    top = x.float().abs().amax(1)
    codes = ours.codes.float().abs()
    assert codes.numel() == 0 or codes.max() <= FP8_MAX
    assert ((ours.float() - x.float()).abs().amax(1) <= top / 26).all()
    weight = 1 + 0.1 * randn(n, dtype=dtype, device=device, seed=1)
    for residual in (None, randn(rows, n, dtype=dtype, device=device, seed=2)):
        ours, total = add_rms_norm_fp8_triton(x, residual, weight, 1e-6, group)
        reference, expected = add_rms_norm_fp8_reference(x, residual, weight, 1e-6, group)
        assert_near(total, expected)
        assert_same_rows(ours, reference, exact=False)
    pairs = randn(rows, 2 * n, dtype=dtype, device=device, seed=5)
    assert_same_rows(
        silu_and_mul_fp8_triton(pairs, group), silu_and_mul_fp8_reference(pairs, group), exact=False
    )


def assert_near_sums(out: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    """The rounding of the result's dtype, and of tensor cores, which keep 14 bits of a sum of `size`."""
    limit = torch.finfo(out.dtype).eps * exact.abs() + 2.0**-10 * size + 1e-6
    assert ((out.double() - exact).abs() <= limit).all(), (out.double() - exact).abs().max()


def tiles_for(group: int | None, device: str) -> list[Tile | None]:
    """All tiles that fit on the device; None: the one that is chosen."""
    if device == "cpu":  # the interpreter is slow
        small = Tile(32, 64, 64, 2, cost=1), Tile(32, 64, 128, 2, cost=1, swap=True, persistent=True)
        return [None, *(each if group is None else each._replace(k=group) for each in small)]
    known = TILES if group is None else BLOCK_TILES
    return [None, *(fitted_fp8(tile, torch.device(device, 0)) for tile in known)]


def check_linear(
    rows: int,
    shape: tuple[int, int],
    group: int | None,
    device: str,
    *,
    full: bool = False,
    group_rows: int = GROUP,
) -> None:
    """The product with each tile, with and without bias and residual; one or two rows also by `fp8_gemv`."""
    n, k = shape
    weight = make_weight(n, k, group, device, group_rows)
    x = randn(rows, k, dtype=BF16, device=device)
    bias = randn(n, dtype=BF16, device=device, seed=6)
    codes = quantise_rows_reference(x, group)
    product = codes.float().double() @ weight.float().double().T
    size = codes.float().double().abs() @ weight.float().double().abs().T
    reference = fp8_linear_reference(codes, weight, bias)
    assert_near_sums(reference, product + bias.double(), size)
    for tile in tiles_for(group, device) if full else [None]:
        out = fp8_linear_triton(codes, weight, bias, tile=tile)
        assert_near_sums(out, product + bias.double(), size)
        residual = randn(rows, n, dtype=BF16, device=device, seed=7)
        expected = product + residual.double()
        assert fp8_linear_triton(codes, weight, None, residual, tile=tile) is residual
        assert_near_sums(residual, expected, size)
    if 0 < rows <= 3:
        for gemv in (fp8_gemv_triton, fp8_gemv_reference):
            out, total = gemv(x, weight, bias)
            assert total is x
            assert_near_sums(out, product + bias.double(), size)


def check_gemv(
    rows: int, shape: tuple[int, int], group: int | None, device: str, dtype: torch.dtype = BF16
) -> None:
    """Norm, residual and SiLU fused in, against the reference."""
    n, k = shape
    weight = make_weight(n, k, group, device)
    x, residual = (randn(rows, k, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    norm = 1 + 0.1 * randn(k, dtype=dtype, device=device, seed=2)
    bias = randn(n, dtype=dtype, device=device, seed=6)
    for silu in (False, True):
        for each in (None, residual):
            options = {"norm_weight": norm, "eps": 1e-6, "residual": each, "silu": silu}
            out, total = fp8_gemv_triton(x, weight, bias, **options)
            expected, same = fp8_gemv_reference(x, weight, bias, **options)
            assert_near(total, same)
            error = (out.float() - expected.float()).norm() / expected.float().norm()
            assert error < 0.01, error


def check_rows_are_independent(shape: tuple[int, int], group: int | None, device: str) -> None:
    """A row has the same bits in every tile and batch."""
    n, k = shape
    weight = make_weight(n, k, group, device)
    x = randn(256, k, dtype=BF16, device=device)
    whole = fp8_linear_triton(quantise_rows_triton(x, group), weight)
    for rows in (1, 2, 3, 16, 17, 64, 97, 129):
        for tile in tiles_for(group, device):
            some = fp8_linear_triton(quantise_rows_triton(x[:rows], group), weight, tile=tile)
            assert torch.equal(some, whole[:rows]), (rows, tile)


def make_fp8_experts(
    num_experts: int, hidden: int, width: int, group: int | None, device: str
) -> tuple[Fp8Experts, Fp8Experts]:
    """Random weights, gate and up, and down, whose scales differ by expert."""
    gate_up, down = (
        [make_weight(*shape, group, device, group_rows=1) for _ in range(num_experts)]
        for shape in ((2 * width, hidden), (hidden, width))
    )
    return _stacked(gate_up), _stacked(down)


def _stacked(weights: list[Fp8Weight]) -> Fp8Experts:
    return Fp8Experts(
        torch.stack([each.codes.view(torch.uint8) for each in weights]).view(FP8),
        torch.stack([(index + 1) * each.scales for index, each in enumerate(weights)]),
    )


def check_experts(
    rows: int,
    group: int | None,
    device: str,
    choice: ExpertChoice,
    activation: Activation = Activation.SILU,
) -> None:
    """Both products of experts, against the reference; padding holds NaN."""
    num_experts, top_k, hidden, width = 5, 2, 144, 80
    logits = randn(rows, num_experts, dtype=BF16, device=device)
    x = randn(rows, hidden, dtype=BF16, device=device, seed=1)
    slots = slots_of(rows, device)
    x[slots < 0] = torch.nan
    gate_up, down = make_fp8_experts(num_experts, hidden, width, group, device)
    chosen, tiles = route_triton(logits, top_k, True, slots, choice.rows)
    assert tiles is not None
    out = fp8_experts_triton(x, gate_up, down, tiles, choice, activation)
    expected = fp8_experts_reference(x, gate_up, down, chosen, activation)
    assert not out[slots < 0].any()
    assert (out.float() - expected.float()).norm() <= 0.04 * expected.float().norm()


def check_rows_of_experts_are_independent(
    counts: list[int], sizes: tuple[int, int], group: int | None, device: str, choices: list[ExpertChoice]
) -> None:
    """A row has the same bits in every batch and with every choice.

    NumPy, which the interpreter adds with, rounds differently for another tile: there the codes of weights
    are -1, 0 and 1, whose sums are exact, and only the scales round.
    """
    num_experts, top_k = 5, 2
    weights = make_fp8_experts(num_experts, *sizes, group, device)
    if device == "cpu":
        weights = tuple(Fp8Experts(each.codes.float().sign().to(FP8), each.scales) for each in weights)
    x = randn(max(counts), sizes[0], dtype=F32, device=device, seed=1)
    logits = randn(max(counts), num_experts, dtype=BF16, device=device)
    whole = None
    for choice in choices:
        for rows in sorted(counts, reverse=True):
            _, tiles = route_triton(logits[:rows].contiguous(), top_k, True, None, choice.rows)
            assert tiles is not None
            out = fp8_experts_triton(x[:rows], *weights, tiles, choice)
            whole = out if whole is None else whole
            assert out.any() and torch.equal(out, whole[:rows]), (choice, rows)
