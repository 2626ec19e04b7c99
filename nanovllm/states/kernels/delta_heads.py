"""The heads of a gated delta rule, the gates of its tokens, and what both kernels compute of them.

    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  o = S^T q

for each token and value head, with a state S [dk, dv] (Gated Delta Networks, Yang, Kautz, Hatamizadeh, 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import jit, tl, wide
from nanovllm.kernels.kinds import Kinds

L2_EPS = 1e-6  # added to the sum of squares of q and of k
MOST_DIM, MOST_RATIO = 256, 8
# The precision of products of float32, by the dtype of q, k and v.
PRECISIONS = Kinds("dtype", {torch.float32: "ieee", torch.bfloat16: "tf32", torch.float16: "tf32"})


class DeltaHeads(NamedTuple):
    """Value head h uses key head h // (v_heads / k_heads)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    most_beta: float = 1.0  # beta is sigmoid(b) times this

    @property
    def channels(self) -> int:
        """The width of a row of all q, all k, all v."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a row of the pool."""
        return self.v_heads, self.k_dim, self.v_dim


class Gates(NamedTuple):
    """beta = sigmoid(b), rounded to b's dtype, times `DeltaHeads.most_beta`; g = -exp(a_log) * softplus(a +
    dt_bias), in float32."""

    a: torch.Tensor  # [T, v_heads] with contiguous rows, as b
    b: torch.Tensor
    a_log: torch.Tensor  # [v_heads], any float dtype, as dt_bias
    dt_bias: torch.Tensor


def check_delta(qkv: torch.Tensor, gates: Gates, heads: DeltaHeads, pool: torch.Tensor) -> None:
    """ValueError if the sizes do not fit each other or no kernel has them."""
    ratio, rest = divmod(heads.v_heads, heads.k_heads)
    dims = (heads.k_dim, heads.v_dim)
    if rest or not 1 <= ratio <= MOST_RATIO or any(dim % 16 or not 0 < dim <= MOST_DIM for dim in dims):
        raise ValueError(
            f"{heads} is not supported: there are 1 to {MOST_RATIO} value heads for each key head, and dims "
            f"are multiples of 16 up to {MOST_DIM}"
        )
    if qkv.shape[1:] != (heads.channels,) or pool.shape[1:] != heads.state:
        raise ValueError(
            f"qkv is [T, {heads.channels}] and pool [rows, {', '.join(map(str, heads.state))}] for {heads}, "
            f"but they have {[*qkv.shape]} and {[*pool.shape]}"
        )
    token = (len(qkv), heads.v_heads)
    expected = (token, token, token[1:], token[1:])
    if any(each.shape != shape for each, shape in zip(gates, expected, strict=True)):
        raise ValueError(
            f"a and b are [{token[0]}, {token[1]}], a_log and dt_bias [{token[1]}], but they have "
            f"{', '.join(str([*each.shape]) for each in gates)}"
        )
    assert qkv.stride(1) == 1 and pool.stride()[1:] == inner_strides(heads)
    assert gates.a.stride(1) == 1 and gates.b.stride(1) == 1
    assert gates.a_log.is_contiguous() and gates.dt_bias.is_contiguous()


def inner_strides(heads: DeltaHeads) -> tuple[int, int, int]:
    """The strides of a row of the pool."""
    return heads.k_dim * heads.v_dim, heads.v_dim, 1


@jit()
def decay_and_beta(
    a: tl.tensor, b: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor, MOST_BETA: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """g and beta, float32, of what was loaded."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    e = tl.exp(-tl.abs(x))
    one_more = 1.0 + e
    # log(1 + e), exact for a small e too (Kahan).
    log = tl.where(
        one_more == 1.0, e, tl.log(one_more) * (e / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    )
    g = -tl.exp(a_log.to(tl.float32)) * (tl.maximum(x, 0.0) + log)
    beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    return g, beta.to(b.dtype).to(tl.float32) * MOST_BETA


def gates_reference(gates: Gates, most_beta: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta of `gates`, [T, v_heads], in float32; float64 stays float64."""
    a = wide(gates.a)
    x = a + gates.dt_bias.to(a.dtype)
    g = -torch.exp(gates.a_log.to(a.dtype)) * F.softplus(x)
    return g, wide(torch.sigmoid(wide(gates.b)).to(gates.b.dtype)) * most_beta


def heads_reference(qkv: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k with norm 1, q times k_dim ** -0.5, and v: [v_heads, T, dim], contiguous, in float32; float64
    stays float64."""
    width = heads.k_heads * heads.k_dim
    q, k, v = wide(qkv).split([width, width, heads.v_heads * heads.v_dim], dim=1)
    ratio = heads.v_heads // heads.k_heads

    def normed(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(len(x), heads.k_heads, heads.k_dim).transpose(0, 1)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
        return x.repeat_interleave(ratio, dim=0)

    v = v.reshape(len(v), heads.v_heads, heads.v_dim).transpose(0, 1).contiguous()
    return normed(q) * heads.k_dim**-0.5, normed(k), v
