"""Checks of the kernels of experts in 4 bits, for any device, against one row and one expert at a time.

Rows that are routed nowhere hold NaN in every check.
"""

from __future__ import annotations

import torch
from int4_cases import make_weight
from moe_cases import Sizes, exact_experts, make_mlp, slots_of
from tensors import assert_near, randn

from nanovllm.formats.int4.kernels.experts import Int4GemvChoice, int4_expert_gemv_triton
from nanovllm.formats.int4.kernels.layout import Int4Experts
from nanovllm.moe.kernels.grouped_matmul import (
    ExpertChoice,
    experts_triton,
    fitted,
    grouped_triton,
)
from nanovllm.moe.kernels.reference import experts_reference
from nanovllm.moe.kernels.routing import route_triton
from nanovllm.moe.kernels.tiles import Chosen


def make_stack(
    experts: int, n: int, k: int, group: int, dtype: torch.dtype, device: str
) -> tuple[Int4Experts, torch.Tensor]:
    """Random weights, and their exact values [experts, n, k] in float64. group: or MXFP4, or NVFP4."""
    made = [make_weight(n, k, group, dtype, device, seed) for seed in range(experts)]
    words, scales, exact = (
        torch.stack(each)
        for each in zip(*((weight.words, weight.scales, exact) for weight, exact in made), strict=True)
    )
    factors = [weight.factors for weight, _ in made if weight.factors is not None]
    stack = Int4Experts(words, scales, k, group, dtype, torch.stack(factors) if factors else None)
    assert torch.equal(stack[0], exact[0].float().to(dtype))
    return stack, exact


class Case:
    """x [rows, hidden] with gaps, logits, and both weights."""

    def __init__(
        self, rows: int, sizes: Sizes, groups: tuple[int, int], dtype: torch.dtype, device: str
    ) -> None:
        experts, self.top_k, hidden, width = sizes[:4]
        self.x = randn(rows, 2 * hidden, dtype=dtype, device=device)[:, hidden:]
        self.logits = randn(rows, experts, dtype=dtype, device=device, seed=3)
        self.gate_up, self.exact_gate_up = make_stack(experts, 2 * width, hidden, groups[0], dtype, device)
        self.down, self.exact_down = make_stack(experts, hidden, width, groups[1], dtype, device)
        self.slots = slots_of(rows, device)
        self.x[self.slots < 0] = torch.nan

        self.mlp = make_mlp(sizes, dtype, device, padding=0)

    def exact(self, chosen: Chosen) -> torch.Tensor:
        return exact_experts(self.x, self.exact_gate_up, self.exact_down, chosen, self.mlp)


def check_experts(
    rows: int,
    sizes: Sizes,
    groups: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    choice: ExpertChoice,
    only: tuple[int, ...] | None = None,
) -> None:
    """groups: of both weights. only: the experts that any row goes to."""
    case = Case(rows, sizes, groups, dtype, device)
    if only is not None:
        away = torch.ones(sizes.experts, dtype=torch.bool, device=device)
        away[list(only)] = False
        case.logits[:, away] = -1000.0
    weights = case.gate_up, case.down
    chosen, tiles = route_triton(case.logits, case.top_k, True, case.slots, choice.rows)
    assert tiles is not None
    expected = case.exact(chosen)
    out = experts_triton(case.x, *weights, tiles, choice, case.mlp)
    assert_near(out, expected)
    assert not out[case.slots < 0].any()
    assert_near(experts_reference(case.x, *weights, chosen, case.mlp), expected)
    if rows <= 2 and case.mlp.is_plain:
        assert_near(int4_expert_gemv_triton(case.x, *weights, chosen), expected)
        few = Int4GemvChoice(16, 64, blocks=2)
        assert_near(int4_expert_gemv_triton(case.x, *weights, chosen, few), expected)


def check_rows_are_independent(
    counts: list[int],
    sizes: Sizes,
    groups: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    choices: list[ExpertChoice],
) -> None:
    """The bits of a row are the same in every batch and with every tile."""
    case = Case(max(counts), sizes, groups, dtype, device)
    x = randn(max(counts), sizes.hidden, dtype=dtype, device=device)
    first = None
    for choice in choices:
        for rows in counts:
            _, tiles = route_triton(case.logits[:rows].contiguous(), case.top_k, True, None, choice.rows)
            assert tiles is not None
            out = experts_triton(x[:rows], case.gate_up, case.down, tiles, choice)
            first = out if first is None else first
            shared = min(len(first), rows)
            assert torch.equal(out[:shared], first[:shared]), (choice, rows)
            first = out if rows > len(first) else first


def check_dequantised(
    sizes: Sizes, group: int, dtype: torch.dtype, device: str, choice: ExpertChoice
) -> None:
    """Each product has the bits of that with dequantised weights."""
    case = Case(33, sizes, (group, group), dtype, device)
    x = randn(33, sizes.hidden, dtype=dtype, device=device)
    _, tiles = route_triton(case.logits, case.top_k, True, None, choice.rows)
    assert tiles is not None
    dense = torch.stack([case.gate_up[index] for index in range(sizes.experts)])
    options = {"is_gated": True, "gather": True, "scatter": True}
    fit = fitted(choice.gate_up, choice.rows, True, x.device)  # floats need more shared memory
    out = grouped_triton(x, case.gate_up, tiles, choice.gate_up, **options)
    assert torch.equal(out, grouped_triton(x, dense, tiles, fit, **options))
