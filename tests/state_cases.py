"""Checks of the kernels of states for any device, against a computation step by step in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensors import F32, randn

from nanovllm.batch import PADDING
from nanovllm.kernels.compat import INTERPRET
from nanovllm.states.kernels.causal_conv import causal_conv_step_triton, causal_conv_triton
from nanovllm.states.kernels.delta_heads import DeltaHeads, Gates
from nanovllm.states.kernels.delta_prefill import delta_prefill_triton
from nanovllm.states.kernels.delta_prefill_reference import delta_prefill_reference
from nanovllm.states.kernels.delta_step import delta_step_reference, delta_step_triton
from nanovllm.states.kernels.packed import Packed, Saves, pack

# Of results. The interpreter truncates to bfloat16.
BOUND = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def state_bound(operation: Any, case: Case) -> float:
    """The twins compute states in float32. Kernels have prompts' products in the dtype of the input, and a
    beta that lies between two values of it may be rounded to the other one."""
    of_dtype = "triton" in operation.__name__
    return max(BOUND[case.pool.dtype], BOUND[case.qkv.dtype] if of_dtype else 0)


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Within `bound` of the greatest of `expected`; also fails for NaN."""
    assert found.shape == expected.shape
    if expected.numel():
        error = (found.double() - expected.double()).abs().max()
        assert error <= bound * expected.double().abs().max() + 1e-30, error


class Case(NamedTuple):
    """Tokens of several sequences, and a pool whose other rows are NaN."""

    heads: DeltaHeads
    qkv: torch.Tensor
    gates: Gates
    pool: torch.Tensor
    lengths: Sequence[int]
    positions: Sequence[int]
    rows: Sequence[int]

    @property
    def packed(self) -> Packed:
        return packed_of(self.lengths, self.positions, self.rows, self.qkv.device)


def packed_of(
    lengths: Sequence[int],
    positions: Sequence[int],
    rows: Sequence[int],
    device: Any = "cpu",
    sources: Sequence[int] | None = None,
) -> Packed:
    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)
    return pack(
        starts,
        column(positions),
        column(rows),
        sum(lengths),
        None if sources is None else column(sources),
    )


def make_case(
    heads: DeltaHeads,
    lengths: Sequence[int],
    positions: Sequence[int] | None = None,
    dtype: torch.dtype = F32,
    device: str = "cpu",
    seed: int = 0,
    spare: int = 2,
    pool_dtype: torch.dtype = F32,
) -> Case:
    """Gates as a model has them: A_log about N(0, 0.5), dt_bias about N(0, 1)."""
    total = sum(lengths)
    positions = [0] * len(lengths) if positions is None else positions
    order = torch.randperm(len(lengths) + spare, generator=torch.Generator().manual_seed(seed))
    rows = order[: len(lengths)].tolist()
    pool = torch.full((len(order), *heads.state), float("nan"))
    for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
        if position:
            pool[row] = randn(*heads.state, seed=seed + 10 + index)
    ab = randn(total, 2 * heads.v_heads, dtype=dtype, device=device, seed=seed + 2)
    gates = Gates(
        ab[:, heads.v_heads :],
        ab[:, : heads.v_heads],
        0.5 * randn(heads.v_heads, dtype=dtype, device=device, seed=seed + 3),
        randn(heads.v_heads, dtype=dtype, device=device, seed=seed + 4),
    )
    wide = randn(total, heads.channels + 16, dtype=dtype, device=device, seed=seed + 1)
    qkv = wide[:, : heads.channels]
    wide_dtype = torch.float64 if dtype == torch.float64 else pool_dtype
    return Case(heads, qkv, gates, pool.to(device, wide_dtype), lengths, positions, rows)


def repeated(heads: DeltaHeads, length: int, b: float, dtype: torch.dtype, device: str) -> Case:
    """One token again and again, q equal to k, with hardly any decay: powers of A would be huge, and the rows
    of the chunk's inverse sum to almost nothing."""
    case = make_case(heads, [length], dtype=dtype, device=device)
    width = heads.k_heads * heads.k_dim
    case.qkv[:] = case.qkv[:1].clone()
    case.qkv[:, :width] = case.qkv[:, width : 2 * width]
    case.gates.b[:] = b
    case.gates.a_log[:] = -9.0
    return case


def exact_heads(qkv: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, ...]:
    """q, k, v [T, v_heads, dim] in float64, with norms and scale."""
    x, ratio = qkv.double(), heads.v_heads // heads.k_heads
    size = heads.k_heads * heads.k_dim
    q, k = (
        each.reshape(len(x), heads.k_heads, heads.k_dim)[:, torch.arange(heads.v_heads) // ratio]
        for each in (x[:, :size], x[:, size : 2 * size])
    )
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    return q / heads.k_dim**0.5, k, x[:, 2 * size :].reshape(len(x), heads.v_heads, heads.v_dim)


def exact_delta(
    case: Case, saves: Sequence[tuple[int, int]] = ()
) -> tuple[torch.Tensor, list[torch.Tensor], dict[tuple[int, int], torch.Tensor]]:
    """Results, final states and the states at (sequence, position), step by step in float64."""
    heads, gates = case.heads, case.gates
    q, k, v = exact_heads(case.qkv, heads)
    g = -gates.a_log.double().exp() * F.softplus(gates.a.double() + gates.dt_bias.double())
    beta = torch.sigmoid(gates.b.double())
    if gates.b.itemsize < 4:
        beta = beta.to(gates.b.dtype).double()
    beta = beta * heads.most_beta
    out, finals, saved, at = torch.zeros_like(v), [], {}, 0
    for index, (length, position, row) in enumerate(
        zip(case.lengths, case.positions, case.rows, strict=True)
    ):
        state = torch.zeros(heads.state, dtype=torch.float64, device=v.device)
        if position:
            state = case.pool[row].double()
        for step in range(length + 1):
            if (index, position + step) in saves:
                saved[index, position + step] = state.clone()
            if step < length:
                t = at + step
                state = state * g[t].exp()[:, None, None]
                d = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
                state = state + k[t][:, :, None] * d[:, None]
                out[t] = torch.einsum("hkv,hk->hv", state, q[t])
        finals.append(state)
        at += length
    return out, finals, saved


def check_prefill(
    operation: Any, case: Case, saves: Sequence[tuple[int, int]] = (), expected: Any = None, **options: Any
) -> None:
    """Against `expected`, by default the computation in float64; saves go to rows of their own."""
    exact = expected or exact_delta(case, saves)
    extra = torch.full((len(saves) + 1, *case.heads.state), float("nan"), dtype=case.pool.dtype)
    pool = torch.cat([case.pool, extra.to(case.pool.device)])
    to = range(len(case.pool), len(case.pool) + len(saves))
    kept = Saves.of(
        [(sequence, position, row) for (sequence, position), row in zip(saves, to, strict=True)],
        len(case.lengths),
        pool.device,
    )
    out = operation(case.qkv, case.gates, case.heads, pool, case.packed, kept if saves else None, **options)
    bound = BOUND[case.qkv.dtype]
    assert_close(out, exact[0], bound)
    bound = state_bound(operation, case)
    touched = set(to)
    for row, length, final in zip(case.rows, case.lengths, exact[1], strict=True):
        if length:
            touched.add(row)
            assert_close(pool[row], final, bound)
    for key, row in zip(saves, to, strict=True):
        assert_close(pool[row], exact[2][key], bound)
    others = [row for row in range(len(pool)) if row not in touched]
    assert torch.equal(pool[others].isnan(), torch.cat([case.pool, extra.to(pool.device)])[others].isnan())


def check_cuts(operation: Any, case: Case, cuts: Sequence[int], *, equal: bool) -> None:
    """One sequence in pieces that end at these positions, against one piece; with equal bits or nearly so."""
    [length], heads = case.lengths, case.heads
    whole, pieces = case.pool.clone(), case.pool.clone()
    expected = operation(case.qkv, case.gates, heads, whole, case.packed)
    found = []
    for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
        gates = Gates(case.gates.a[begin:end], case.gates.b[begin:end], *case.gates[2:])
        packed = packed_of([end - begin], [begin], case.rows, case.qkv.device)
        found.append(operation(case.qkv[begin:end], gates, heads, pieces, packed))
    if equal:
        assert torch.equal(torch.cat(found), expected)
        assert torch.equal(pieces[case.rows], whole[case.rows])
    else:
        assert_close(torch.cat(found), expected, BOUND[case.qkv.dtype])
        assert_close(pieces[case.rows], whole[case.rows], BOUND[case.qkv.dtype])


def check_step(operation: Any, case: Case, **options: Any) -> None:
    """One token of each sequence, with a row of padding in front; its result is 0."""
    out, finals, _ = exact_delta(case)
    rows = torch.tensor([PADDING, *case.rows], dtype=torch.int32, device=case.qkv.device)
    qkv, a, b = (torch.cat([each[:1], each]) for each in (case.qkv, case.gates.a, case.gates.b))
    pool = case.pool.clone()
    found = operation(qkv, Gates(a, b, *case.gates[2:]), case.heads, pool, rows, **options)
    assert not found[0].any()
    assert_close(found[1:], out, BOUND[case.qkv.dtype])
    assert_close(pool[case.rows], torch.stack(finals), state_bound(operation, case))
    others = [row for row in range(len(pool)) if row not in case.rows]
    assert pool[others].isnan().all()


def check_prefill_of_many(case: Case, saves: Sequence[tuple[int, int]] = (), **options: Any) -> None:
    """The kernel against the twin, where a computation step by step would take long."""
    pool, extra = case.pool.clone(), case.pool.new_full((len(saves), *case.heads.state), float("nan"))
    pool, to = torch.cat([pool, extra]), range(len(pool), len(pool) + len(saves))
    twin = pool.clone()
    wanted = [(*each, row) for each, row in zip(saves, to, strict=True)]
    kept = Saves.of(wanted, len(case.lengths), pool.device) if saves else None
    arguments = (case.qkv, case.gates, case.heads)
    out = delta_prefill_triton(*arguments, pool, case.packed, kept, **options)
    expected = delta_prefill_reference(*arguments, twin, case.packed, kept)
    assert_close(out, expected, BOUND[out.dtype])
    assert torch.equal(pool.isnan(), twin.isnan())
    assert_close(pool.nan_to_num(), twin.nan_to_num(), state_bound(delta_prefill_triton, case))


def check_step_of_many(case: Case, **options: Any) -> None:
    """The kernel against the twin; every seventh row is padding."""
    rows = torch.tensor(case.rows, dtype=torch.int32, device=case.qkv.device)
    rows[::7] = PADDING
    pool, twin = case.pool.clone(), case.pool.clone()
    out = delta_step_triton(case.qkv, case.gates, case.heads, pool, rows, **options)
    expected = delta_step_reference(case.qkv, case.gates, case.heads, twin, rows)
    assert not out[::7].any()
    assert_close(out, expected, BOUND[out.dtype])
    assert torch.equal(pool.isnan(), twin.isnan())
    assert_close(pool.nan_to_num(), twin.nan_to_num(), state_bound(delta_step_triton, case))


# ---- the convolution ----


class ConvCase(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    pool: torch.Tensor
    lengths: Sequence[int]
    positions: Sequence[int]
    rows: Sequence[int]
    gates: torch.Tensor | None = None


def make_conv_case(
    channels: int,
    k: int,
    lengths: Sequence[int],
    positions: Sequence[int],
    dtype: torch.dtype = F32,
    device: str = "cpu",
    bias: bool = False,
    gated: bool = False,
) -> ConvCase:
    rows = torch.randperm(len(lengths) + 3, generator=torch.Generator().manual_seed(1))[
        : len(lengths)
    ].tolist()
    pool = torch.full((len(lengths) + 3, k - 1, channels), float("nan"), dtype=dtype, device=device)
    for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
        if position:
            pool[row] = randn(k - 1, channels, dtype=dtype, device=device, seed=20 + index)
            pool[row, : max(0, k - 1 - position)] = 0
    return ConvCase(
        randn(sum(lengths), channels + 8, dtype=dtype, device=device)[:, 8:],
        randn(channels, k, dtype=dtype, device=device, seed=1),
        randn(channels, dtype=dtype, device=device, seed=2) if bias else None,
        pool,
        lengths,
        positions,
        rows,
        randn(sum(lengths), 3 * channels, dtype=dtype, device=device, seed=3)[:, : 2 * channels]
        if gated
        else None,
    )


def conv_inputs(case: ConvCase) -> torch.Tensor:
    """[T, C], what the convolution takes and a row of the pool keeps."""
    return case.x if case.gates is None else case.gates[:, : case.x.shape[1]] * case.x


def kept_bound(operation: Any, case: ConvCase) -> float:
    """What is kept is equal, but where Triton's interpreter truncates a product to bfloat16."""
    is_truncated = INTERPRET and operation in (causal_conv_triton, causal_conv_step_triton)
    return 2**-7 if is_truncated and case.gates is not None and case.x.dtype == torch.bfloat16 else 0.0


def exact_conv(inputs: torch.Tensor, case: ConvCase, at: int) -> torch.Tensor:
    """[K - 1 + L, C] to [L, C], the results of rows from `at` on, with torch's convolution, in float64."""
    bias = None if case.bias is None else case.bias.double()
    x = inputs.double().T[None]
    total = F.conv1d(x, case.weight.double()[:, None], bias, groups=x.shape[1])[0].T
    if case.gates is None:
        return F.silu(total)
    return total * case.gates[at : at + len(total), x.shape[1] :].double()


def check_conv(operation: Any, case: ConvCase, saves: Sequence[tuple[int, int]] = ()) -> None:
    k, device, at = case.weight.shape[1], case.x.device, 0
    spare = torch.full(
        (len(saves) + 1, *case.pool.shape[1:]), float("nan"), dtype=case.x.dtype, device=device
    )
    pool, before = torch.cat([case.pool, spare]), torch.cat([case.pool, spare])
    to = [len(case.pool) + index for index in range(len(saves))]
    kept = Saves.of([(*each, row) for each, row in zip(saves, to, strict=True)], len(case.lengths), device)
    packed = packed_of(case.lengths, case.positions, case.rows, device)
    gates = () if case.gates is None else (case.gates,)
    out = operation(case.x, case.weight, case.bias, pool, packed, kept if saves else None, *gates)
    mine = conv_inputs(case)
    for index, (length, position, row) in enumerate(
        zip(case.lengths, case.positions, case.rows, strict=True)
    ):
        old = before[row] if position else torch.zeros_like(before[row])
        inputs = torch.cat([old, mine[at : at + length]])
        if length:
            assert_close(out[at : at + length], exact_conv(inputs, case, at), BOUND[out.dtype])
            before[row] = inputs[length:]
        for (sequence, place), target in zip(saves, to, strict=True):
            if sequence == index:
                before[target] = inputs[place - position : place - position + k - 1]
        at += length
    torch.testing.assert_close(pool, before, rtol=kept_bound(operation, case), atol=0, equal_nan=True)


def check_conv_step(operation: Any, case: ConvCase) -> None:
    rows = torch.tensor([PADDING, *case.rows], dtype=torch.int32, device=case.x.device)
    x, pool = torch.cat([case.x[:1], case.x]), case.pool.clone()
    gates = () if case.gates is None else (torch.cat([case.gates[:1], case.gates]),)
    out = operation(x, case.weight, case.bias, pool, rows, *gates)
    assert not out[0].any()
    expected, mine = case.pool.clone(), conv_inputs(case)
    for index, row in enumerate(case.rows):
        inputs = torch.cat([case.pool[row], mine[index : index + 1]])
        assert_close(out[index + 1], exact_conv(inputs, case, index)[0], BOUND[out.dtype])
        expected[row] = inputs[1:]
    torch.testing.assert_close(pool, expected, rtol=kept_bound(operation, case), atol=0, equal_nan=True)


# ---- the gated norm ----


def check_gated_norm(operation: Any, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Rounded as transformers does: the normed value, its product with the weight, the result."""
    tokens, heads, n = shape
    x = randn(*shape, dtype=dtype, device=device)
    z = randn(tokens, heads * n + 8, dtype=dtype, device=device, seed=1)[:, 8:].view(shape)
    weight = 1 + 0.5 * randn(n, dtype=dtype, device=device, seed=2)
    wide = x.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(dtype)
    expected = (normed * weight).double() * F.silu(z.double())
    assert_close(operation(x, z, weight, 1e-6), expected, {F32: 3e-6}.get(dtype, BOUND[dtype] / 2))
