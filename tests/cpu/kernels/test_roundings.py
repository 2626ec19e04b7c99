"""In 16 bits each step between two products is rounded once: to the number next to the exact one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bf16_nearness import measure
from layer_cases import exact_rms_norm
from outlier_models import FAMILIES, Sizes
from tensors import BF16, F16, randn

from nanovllm.cpu import isa
from nanovllm.families.norms import HeadsNorm
from nanovllm.kernels.activation import Activation, silu_and_mul_reference, silu_and_mul_triton
from nanovllm.kernels.compat import cpu_kernel
from nanovllm.kernels.gemv import gemv_reference, gemv_triton
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.rms_norm import rms_norm_reference, rms_norm_triton
from nanovllm.kernels.rotary import (
    Rotation,
    q_norm_rope_reference,
    qk_norm_rope_store_reference,
    qk_norm_rope_store_triton,
)
from nanovllm.layers.weights import allocate
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions

EPS = 1e-6


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, noise: float = 2e-6) -> None:
    """noise: of the steps in float32, for values of a size of 1."""
    spacing = torch.finfo(found.dtype).eps * 2.0 ** exact.abs().clamp(min=2e-5).log2().floor()
    excess = (found.double() - exact).abs() - spacing / 2 - noise * (1 + exact.abs())
    assert (excess <= 0).all(), (excess / spacing).max()


def implementations(name: str, triton: Any, reference: Any) -> Iterator[tuple[torch.dtype, Any]]:
    """With their dtypes. Triton's interpreter truncates to bfloat16, and rounds to float16."""
    yield F16, triton
    yield from ((dtype, reference) for dtype in (F16, BF16))
    if isa.has_kernels():
        yield from ((dtype, cpu_kernel(name)) for dtype in (F16, BF16))


def test_norms() -> None:
    for dtype, norm in implementations("rms_norm.rms_norm", rms_norm_triton, rms_norm_reference):
        x, weight = randn(9, 200, dtype=dtype), randn(200, dtype=dtype, seed=1)
        assert_rounded_once(norm(x, weight, EPS), exact_rms_norm(x, weight, EPS))
        wide = randn(200, seed=1)  # as Gemma's
        assert_rounded_once(norm(x, wide, EPS), exact_rms_norm(x, wide, EPS))


@pytest.mark.parametrize(("gemv", "dtype"), [(gemv_triton, F16), (gemv_reference, BF16)])
def test_norms_within_products(gemv: Callable[..., Any], dtype: torch.dtype) -> None:
    """The product with an identity is what the product reads."""
    x, weight = randn(2, 64, dtype=dtype), randn(64, dtype=dtype, seed=1)
    found = gemv(x, torch.eye(64, dtype=dtype), norm_weight=weight, eps=EPS)[0]
    assert_rounded_once(found, exact_rms_norm(x, weight, EPS))


class _SecondRank(TPGroup):
    """Whose other rank has the same heads."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_over_the_heads_of_all_ranks(ranks: int) -> None:
    norm = HeadsNorm(4 * ranks, 16, EPS, TPGroup() if ranks == 1 else _SecondRank(1, 2))
    allocate(norm, WeightOptions(BF16, torch.device("cpu")), QuantConfig())
    norm.weight.data.copy_(randn(64, seed=1))
    x = randn(9, 4, 16, dtype=BF16)
    assert_rounded_once(norm(x).flatten(1), exact_rms_norm(x.flatten(1), norm.weight, EPS))


@pytest.mark.parametrize("form", [{}, {"rotary": 16}, {"interleaved": True}], ids=str)
def test_rotations_of_normalised_heads(form: dict[str, Any]) -> None:
    """The norm, its weight and the rotation are one step; the same for keys in the cache."""
    angles = torch.outer(torch.arange(20.0), torch.linspace(1, 0.01, 16))
    turned = form.get("rotary", 32) // 2
    angles[:, turned:] = 0
    table = torch.cat((angles.cos(), angles.sin()), 1)
    first = 2 * torch.arange(16) if form.get("interleaved") else torch.arange(turned)
    second = first + (1 if form.get("interleaved") else turned)
    positions = torch.arange(9, dtype=torch.int32)

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = exact_rms_norm(x, weight, EPS)
        cos, sin = (each[:9, None, : len(first)].double() for each in table.chunk(2, 1))
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    stores = qk_norm_rope_store_triton, qk_norm_rope_store_reference
    for dtype, store in implementations("rotary.qk_norm_rope_store", *stores):
        q, k = randn(9, 4, 32, dtype=dtype), randn(9, 2, 32, dtype=dtype, seed=1)
        weights = randn(32, dtype=dtype, seed=2), randn(32, dtype=dtype, seed=3)
        cache = KVCache(torch.zeros(3, 4, 2, 32, dtype=dtype), torch.zeros(3, 4, 2, 32, dtype=dtype))
        rotation = Rotation(positions, table, *weights, EPS, **form)
        found = store(q, k, k.clone(), rotation, cache, positions)
        assert_rounded_once(found, exact(q, weights[0]))
        assert_rounded_once(cache.k.flatten(0, 1)[:9], exact(k, weights[1]))
        assert_rounded_once(q_norm_rope_reference(q, rotation), exact(q, weights[0]))


@pytest.mark.parametrize("activation", Activation)
def test_gated_activations(activation: Activation) -> None:
    functions = silu_and_mul_triton, silu_and_mul_reference
    for dtype, gated in implementations("activation.silu_and_mul", *functions):
        x = randn(9, 200, dtype=dtype)
        exact = silu_and_mul_reference(x.double(), activation.kind)
        assert_rounded_once(gated(x, activation.kind), exact)


OFTEN = ("llama", "olmo2", "gemma3")  # in each run; the others take a second each
CASES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full, id=name) for name in FAMILIES]


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_as_near_to_float32_as_transformers(name: str) -> None:
    """On the mean of some checkpoints; families with experts sometimes choose another one, so they may differ
    more."""
    sizes = Sizes(layers=2, hidden=256, vocab=128)
    args = Namespace(
        **{"device": "cpu", "seed": 0, "peak": 1, "checkpoints": 6, "prompts": 12, "positions": 12},
        **{"vocab": sizes.vocab, "max_num_seqs": 8, "enforce_eager": False},
    )
    limit = 2.0 if "moe" in name or name in ("mixtral", "gpt_oss") else 1.1
    for row in measure(FAMILIES[name], sizes, args):
        assert row["own"] <= limit * row["transformers"], row
