"""The gated activations of an MLP. Owns no weight."""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import await_inputs, by_device, jit, pdl_options, tl, wide
from nanovllm.kernels.kinds import Kinds, unknown

_BLOCK = 1024  # columns of a program, measured on an H200 (docs/log/2026-11-22-techniques.md)

# Besides SiLU, for kernels: GELU, and gpt-oss's SwiGLU. Triton 3.6 takes no string as a default.
_KINDS = Kinds("activation", {"": 0, "tanh": 1, "erf": 2, "clamped": 3})
_ALPHA, _LIMIT = 1.702, 7.0  # of the clamped SwiGLU


@jit()
def gated(
    gate: tl.tensor,
    up: tl.tensor,
    dtype: tl.constexpr,
    KIND: tl.constexpr = 0,
    ALPHA: tl.constexpr = _ALPHA,
    LIMIT: tl.constexpr = _LIMIT,
) -> tl.tensor:
    """act(gate) * up of float32 values, rounded once to `dtype`. KIND: of _KINDS."""
    if KIND == 0:
        active = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:  # 1 + tanh(x) is 2 / (1 + exp(-2 x))
        cubic = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * cubic))
    elif KIND == 2:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == 3:  # comparisons keep NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        active = gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        tl.static_assert(False, "no code here for this KIND of activation")
    return (active * up).to(dtype)


@jit()
def _silu_and_mul_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: int,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
    KIND: tl.constexpr = 0,
) -> None:
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    await_inputs(USE_PDL)
    x_ptrs = x_ptr + row * x_stride + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + N, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * N + columns, gated(gate, up, dtype, KIND), mask=mask)


def silu_and_mul_triton(x: torch.Tensor, kind: str = "") -> torch.Tensor:
    """Return silu(x[:, :N]) * x[:, N:], [T, N], for x [T, 2N], rounded once to x's dtype.

    kind: "tanh" or "erf" computes GELU instead, with this function; "clamped" the SwiGLU of gpt-oss,
    gate * sigmoid(1.702 gate) * (up + 1) with gate at most 7 and up from -7 to 7.
    """
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    assert x.stride(1) == 1
    _silu_and_mul_kernel[(rows, -(-n // _BLOCK))](
        x, out, x.stride(0), N=n, BLOCK=_BLOCK, KIND=_KINDS[kind], num_warps=4, **pdl_options(x)
    )
    return out


def silu_and_mul_reference(x: torch.Tensor, kind: str = "") -> torch.Tensor:
    """`silu_and_mul` in plain torch; float64 stays float64."""
    gate, up = wide(x).chunk(2, dim=-1)
    if kind == "clamped":
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return (gate * torch.sigmoid(_ALPHA * gate) * (up + 1.0)).to(x.dtype)
    if kind == "tanh":
        return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)
    if kind == "erf":
        return (F.gelu(gate) * up).to(x.dtype)
    if kind == "":
        return (F.silu(gate) * up).to(x.dtype)
    raise unknown("activation", kind)


silu_and_mul = by_device(silu_and_mul_triton, silu_and_mul_reference, "activation.silu_and_mul")


class Activation(Enum):
    """A gated activation: act(gate) * up, for rows [gate, up]. The values are the names in config.json, but
    for the clamped SwiGLU, which has none; see `silu_and_mul`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    CLAMPED = ""

    @classmethod
    def of(cls, name: object) -> Activation:
        """ValueError with the supported names if there is none called `name`."""
        for each in cls:
            if name and each.value == name:
                return each
        supported = ", ".join(repr(each.value) for each in cls if each.value)
        raise ValueError(f"{name!r} is not supported; supported: {supported}")

    def and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """act(x[:, :N]) * x[:, N:], [T, N], for x [T, 2N]."""
        return silu_and_mul(x, self.kind)

    @property
    def kind(self) -> str:
        """As the argument of `silu_and_mul`."""
        return _KIND_OF[self]

    @property
    def number(self) -> int:
        """The KIND of `gated`."""
        return _KINDS[self.kind]


_KIND_OF = Kinds(
    "activation",
    {
        Activation.SILU: "",
        Activation.GELU: "erf",
        Activation.GELU_TANH: "tanh",
        Activation.CLAMPED: "clamped",
    },
)
