"""What families add to the small kernels: partial and interleaved rotation, GELU, norms of float32."""

from __future__ import annotations

import layer_cases
import pytest
import torch
from attention_cases import Heads
from tensors import BF16, F16, F32, assert_near, randn

from nanovllm.kernels.activation import Activation, silu_and_mul_reference, silu_and_mul_triton
from nanovllm.kernels.compat import INTERPRET
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
)
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store_reference, qk_norm_rope_store_triton

pytestmark = pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine")


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, dim] rotated as transformers does it; cos, sin [T, rotary / 2]."""
    rotary = 2 * cos.shape[1]
    cos, sin = cos[:, None].double(), sin[:, None].double()
    first, second = x[..., :rotary].double().chunk(2, dim=-1)
    if interleaved:
        first, second = x[..., :rotary:2].double(), x[..., 1:rotary:2].double()
    pair = first * cos - second * sin, second * cos + first * sin
    whole = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((whole, x[..., rotary:].double()), dim=-1)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary", "interleaved"),
    [(12, 12, True), (12, 8, False), (12, 4, True), (80, 60, False), (16, 16, False), (256, 64, True)],
)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_partial_and_interleaved_rotation(
    head_dim: int, rotary: int, interleaved: bool, norm: bool, dtype: torch.dtype
) -> None:
    tokens, heads, kv_heads = 5, 6, 2
    angles = randn(tokens, rotary // 2, dtype=F32, device="cpu", seed=1)
    rest = torch.zeros(tokens, (head_dim - rotary) // 2)
    table = torch.cat((angles.cos(), rest + 1, angles.sin(), rest), 1)
    q, k, v = (
        randn(tokens, n, head_dim, dtype=dtype, device="cpu", seed=n) for n in (heads, kv_heads, kv_heads)
    )
    weights = [1 + randn(head_dim, dtype=F32, device="cpu", seed=each) / 4 for each in (8, 9)]
    q_weight, k_weight = weights if norm else (None, None)
    positions = torch.arange(tokens, dtype=torch.int32)
    rotation = Rotation(positions, table, q_weight, k_weight, 1e-5, rotary % head_dim, interleaved)
    wanted = [
        turned(x if weight is None else rms_norm_reference(x, weight, 1e-5), *angles_of(angles), interleaved)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    for store in (qk_norm_rope_store_triton, qk_norm_rope_store_reference):
        cache = KVCache(*(torch.full((2, 4, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in "kv"))
        out = store(q, k, v, rotation, cache, positions + 1)
        assert_near(out, wanted[0])
        assert_near(cache.k.flatten(0, 1)[1 : 1 + tokens], wanted[1])
        assert torch.equal(cache.v.flatten(0, 1)[1 : 1 + tokens], v)


def angles_of(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH])
def test_gelu(activation: Activation, dtype: torch.dtype) -> None:
    kind = "tanh" if activation is Activation.GELU_TANH else "erf"
    x = 3 * randn(5, 2 * 1030, dtype=dtype, device="cpu", seed=2)
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = x.double().chunk(2, dim=1)
    approximate = "tanh" if kind == "tanh" else "none"
    wanted = torch.nn.functional.gelu(gate, approximate=approximate).to(dtype).double() * up
    for run in (silu_and_mul_triton, silu_and_mul_reference):
        assert_near(run(x, kind), wanted)
    assert_near(activation.and_mul(x), wanted)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    x = 5 * randn(5, 2 * 1030, dtype=dtype, device="cpu", seed=2)
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, 7.0])
    x[1, 1030:1033] = torch.tensor([-200.0, 200.0, -7.0])
    gate, up = x.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    wanted = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    for run in (silu_and_mul_triton, silu_and_mul_reference):
        assert_near(run(x, "clamped"), wanted)
        assert run(torch.full((1, 2), torch.nan), "clamped").isnan().all()
    assert_near(Activation.CLAMPED.and_mul(x), wanted)
    with pytest.raises(ValueError, match="'' is not supported; supported: 'silu', 'gelu', 'gelu_pytorch"):
        Activation.of("")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_norms_with_float32_weights(dtype: torch.dtype) -> None:
    """As Gemma has them: 1 + w does not fit into bfloat16."""
    x = randn(3, 70, dtype=dtype, device="cpu", seed=3)
    weight = 1 + randn(70, dtype=F32, device="cpu", seed=4) / 100
    wide = x.double()
    wanted = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    for run in (add_rms_norm_triton, add_rms_norm_reference):
        out, total = run(x, None, weight, 1e-6)
        assert out.dtype == dtype and torch.equal(total, x)
        assert_near(out, wanted)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 80), (97, 48), (2, 300)])
def test_joined_norms(rows: int, n: int, dtype: torch.dtype) -> None:
    layer_cases.check_joined_norms(rows, n, dtype, "cpu")


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "dim"), [(1, 4, 2, 16), (5, 6, 3, 40), (3, 8, 8, 256)]
)
def test_norm_of_values(tokens: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    layer_cases.check_norm_of_values(tokens, Heads(q_heads, kv_heads, dim, 16, dtype), "cpu")
