"""The gated delta rule on a CPU, of packed sequences and of one token of each, in place in a pool of states.

A program is some columns of a head's state of a sequence. No column depends on another one, so they stay in
the first-level cache while all tokens go by, one after the other. Chunks would save no products, and here a
token's bits depend on no cut of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch
from nanovllm.cpu.kernels.native import jit
from nanovllm.states.kernels.delta_heads import L2_EPS, DeltaHeads, Gates, check_delta
from nanovllm.states.kernels.packed import Packed, Saves

_LANES = 16
_INTEGERS = {torch.int32: "int32", torch.int64: "int64"}


def _make_parts(variant: tuple[Any, ...]) -> tuple[Any, ...]:
    """What both kernels call. variant: dtypes, and vectors of 16 columns in a program, 1 or 2."""
    dtype, gate, a_log_, bias, pool_, vectors = variant
    from numpy import float32

    from nanovllm.cpu.kernels import vectors as v

    load, load_state, store_state = v.WHOLE[dtype][0], *v.WHOLE[pool_]
    store_out, rounded = v.WHOLE[dtype][1], v.ROUND[gate]
    get_gate, get_a_log, get_bias = v.GET[gate], v.GET[a_log_], v.GET[bias]
    load_f32, store_f32, get_f32 = v.load_f32, v.store_f32, v.get_f32
    splat, add, sub, mul, div, fma, exp = v.splat, v.add, v.sub, v.mul, v.div, v.fma, v.exp
    absolute, maximum, total, square_root = v.absolute, v.maximum, v.total, v.sqrt
    size, state_size, two = v.SIZES[dtype], v.SIZES[pool_], vectors == 2
    line, eps = 64 * vectors, float32(L2_EPS)
    series = tuple(float32(1 / power) for power in (13, 11, 9, 7, 5, 3))
    c13, c11, c9, c7, c5, c3 = series
    zero, one, twice = float32(0.0), float32(1.0), float32(2.0)

    @jit
    def decay(a: Any, a_log: Any, dt_bias: Any) -> Any:
        """exp(-exp(a_log) * softplus(a + dt_bias)). log(1 + e) is 2 artanh(e / (2 + e)) for e from 0 to 1."""
        x = add(a, dt_bias)
        e = exp(sub(splat(zero), absolute(x)))
        z = div(e, add(splat(twice), e))
        y = mul(z, z)
        sum_ = fma(splat(c13), y, splat(c11))
        sum_ = fma(sum_, y, splat(c9))
        sum_ = fma(sum_, y, splat(c7))
        sum_ = fma(sum_, y, splat(c5))
        sum_ = fma(sum_, y, splat(c3))
        sum_ = fma(sum_, y, splat(one))
        softplus = add(maximum(x, splat(zero)), mul(mul(splat(twice), z), sum_))
        return exp(sub(splat(zero), mul(exp(a_log), softplus)))

    @jit
    def normed(x: int, out: int, dk: int, scale: float) -> None:
        """x [dk] / its norm * scale, to float32."""
        squares = splat(zero)
        for i in range(dk // 16):
            value = load(x + 16 * size * i)
            squares = fma(value, value, squares)
        factor = splat(scale / square_root(total(squares) + eps))
        for i in range(dk // 16):
            store_f32(out + 64 * i, mul(load(x + 16 * size * i), factor))

    @jit
    def keep(state: int, target: int, dk: int, row: int) -> None:
        """Copy the columns of a state to the pool. row: the bytes of one of its rows."""
        for i in range(dk):
            store_state(target + row * i, load_f32(state + line * i))
            if two:
                store_state(target + row * i + 16 * state_size, load_f32(state + line * i + 64))

    @jit
    def begin(source: int, state: int, keys: int, dk: int, row: int) -> None:
        """Copy the columns of a state from the pool, or zeros; and their products with a key behind it."""
        first = second = splat(zero)
        for i in range(dk):
            key = splat(get_f32(keys + 4 * i))
            value = load_state(source + row * i) if source else splat(zero)
            store_f32(state + line * i, value)
            first = fma(value, key, first)
            if two:
                value = load_state(source + row * i + 16 * state_size) if source else splat(zero)
                store_f32(state + line * i + 64, value)
                second = fma(value, key, second)
        store_f32(state + line * dk, first)
        if two:
            store_f32(state + line * dk + 64, second)

    @jit
    def move(
        state: int,
        keys: int,
        queries: int,
        new_keys: int,
        v_: int,
        out: int,
        target: int,
        dk: int,
        row: int,
        kept: Any,
        beta: Any,
    ) -> None:
        """One token: the state, its result, and the products of the new state with the next key. target:
        where the state goes in the pool, 0: it stays where it is."""
        known = state + line * dk
        d0 = mul(beta, sub(load(v_), mul(kept, load_f32(known))))
        d1 = d0
        if two:
            d1 = mul(beta, sub(load(v_ + 16 * size), mul(kept, load_f32(known + 64))))
        o0 = o1 = n0 = n1 = splat(zero)
        for i in range(dk):
            key, query, new = (
                splat(get_f32(keys + 4 * i)),
                splat(get_f32(queries + 4 * i)),
                splat(get_f32(new_keys + 4 * i)),
            )
            value = fma(key, d0, mul(kept, load_f32(state + line * i)))
            if target:
                store_state(target + row * i, value)
            else:
                store_f32(state + line * i, value)
            o0 = fma(value, query, o0)
            n0 = fma(value, new, n0)
            if two:
                value = fma(key, d1, mul(kept, load_f32(state + line * i + 64)))
                if target:
                    store_state(target + row * i + 16 * state_size, value)
                else:
                    store_f32(state + line * i + 64, value)
                o1 = fma(value, query, o1)
                n1 = fma(value, new, n1)
        store_out(out, o0)
        store_f32(known, n0)
        if two:
            store_out(out + 16 * size, o1)
            store_f32(known + 64, n1)

    @jit
    def gates_of(a: int, b: int, a_log: int, dt_bias: int, most: float) -> tuple[Any, Any]:
        beta = div(splat(one), add(splat(one), exp(sub(splat(zero), splat(get_gate(b))))))
        own = decay(splat(get_gate(a)), splat(get_a_log(a_log)), splat(get_bias(dt_bias)))
        return own, mul(rounded(beta), splat(most))

    return begin, move, keep, normed, gates_of


def _make_prefill(*variant: Any) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    dtype, gate, a_log_, bias, pool_, vectors = variant
    begin, move, keep, normed, gates_of = _make_parts(variant)
    get_i32, size, gate_size = v.get_i32, v.SIZES[dtype], v.SIZES[gate]
    a_log_size, bias_size, state_size = v.SIZES[a_log_], v.SIZES[bias], v.SIZES[pool_]
    width, line = _LANES * vectors, 64 * vectors

    def prefill(
        qkv: Address,
        a: Address,
        b: Address,
        a_log: Address,
        dt_bias: Address,
        out: Address,
        pool: Address,
        memory: Address,
        starts: Address,
        positions: Address,
        rows: Address,
        sources: Address,
        save_starts: Address,
        save_positions: Address,
        save_rows: Address,
        qkv_stride: int,
        a_stride: int,
        b_stride: int,
        pool_stride: int,
        k_heads: int,
        v_heads: int,
        dk: int,
        dv: int,
        most_beta: float,
        blocks: int,
        scale: float,
        program: int,
        thread: int,
    ) -> None:
        column, head = program % blocks * width, program // blocks % v_heads
        sequence = program // (blocks * v_heads)
        first, end = get_i32(starts + 4 * sequence), get_i32(starts + 4 * sequence + 4)
        position, row = get_i32(positions + 4 * sequence), get_i32(rows + 4 * sequence)
        source, count, state_row = get_i32(sources + 4 * sequence), end - first, dv * state_size
        save, last_save = 0, 0
        if save_starts:
            save, last_save = get_i32(save_starts + 4 * sequence), get_i32(save_starts + 4 * sequence + 4)
        state = memory + thread * (line * (dk + 1) + 12 * dk)
        keys = state + line * (dk + 1)
        new_keys, queries = keys + 4 * dk, keys + 8 * dk
        cells = pool + (head * dk * dv + column) * state_size
        q = qkv + (first * qkv_stride + head // (v_heads // k_heads) * dk) * size
        k, v_ = (
            q + k_heads * dk * size,
            qkv + (first * qkv_stride + 2 * k_heads * dk + head * dv + column) * size,
        )
        out += (first * v_heads * dv + head * dv + column) * size
        a += (first * a_stride + head) * gate_size
        b += (first * b_stride + head) * gate_size
        a_log += head * a_log_size
        dt_bias += head * bias_size
        if count > 0:
            normed(k, keys, dk, 1.0)
            there = source >= 0 and position > 0
            begin(cells + source * pool_stride * state_size if there else 0, state, keys, dk, state_row)
        for token in range(count):
            while save < last_save and get_i32(save_positions + 4 * save) - position <= token:
                to = get_i32(save_rows + 4 * save)
                if to >= 0 and get_i32(save_positions + 4 * save) - position == token:
                    keep(state, cells + to * pool_stride * state_size, dk, state_row)
                save += 1
            is_last = token == count - 1
            normed(q, queries, dk, scale)
            if not is_last:
                normed(k + qkv_stride * size, new_keys, dk, 1.0)
            kept, beta = gates_of(a, b, a_log, dt_bias, most_beta)
            target = 0
            if is_last and save >= last_save and row >= 0:
                target = cells + row * pool_stride * state_size
            move(
                state,
                keys,
                queries,
                new_keys if not is_last else keys,
                v_,
                out,
                target,
                dk,
                state_row,
                kept,
                beta,
            )
            keys, new_keys = new_keys, keys
            q += qkv_stride * size
            k += qkv_stride * size
            v_ += qkv_stride * size
            out += v_heads * dv * size
            a += a_stride * gate_size
            b += b_stride * gate_size
            if is_last and target == 0:
                while save < last_save:
                    to = get_i32(save_rows + 4 * save)
                    if to >= 0 and get_i32(save_positions + 4 * save) - position == count:
                        keep(state, cells + to * pool_stride * state_size, dk, state_row)
                    save += 1
                if row >= 0:
                    keep(state, cells + row * pool_stride * state_size, dk, state_row)

    return prefill


def _make_step(rows_dtype: str, *variant: Any) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    dtype, gate, a_log_, bias, pool_, vectors = variant
    begin, move, _, normed, gates_of = _make_parts(variant)
    get_row, row_size = {"int32": (v.get_i32, 4), "int64": (v.get_i64, 8)}[rows_dtype]
    size, gate_size, a_log_size, bias_size = v.SIZES[dtype], v.SIZES[gate], v.SIZES[a_log_], v.SIZES[bias]
    state_size, width, line = v.SIZES[pool_], _LANES * vectors, 64 * vectors
    store, splat = v.WHOLE[dtype][1], v.splat

    def step(
        qkv: Address,
        a: Address,
        b: Address,
        a_log: Address,
        dt_bias: Address,
        out: Address,
        pool: Address,
        memory: Address,
        rows: Address,
        qkv_stride: int,
        a_stride: int,
        b_stride: int,
        pool_stride: int,
        k_heads: int,
        v_heads: int,
        dk: int,
        dv: int,
        most_beta: float,
        blocks: int,
        scale: float,
        program: int,
        thread: int,
    ) -> None:
        column, head = program % blocks * width, program // blocks % v_heads
        sequence = program // (blocks * v_heads)
        row, state_row = get_row(rows + row_size * sequence), dv * state_size
        out += ((sequence * v_heads + head) * dv + column) * size
        if row < 0:
            for i in range(width // 16):
                store(out + 16 * size * i, splat(0.0))
            return
        state = memory + thread * (line * (dk + 1) + 12 * dk)
        keys = state + line * (dk + 1)
        queries = keys + 8 * dk
        cells = pool + (row * pool_stride + head * dk * dv + column) * state_size
        qkv += sequence * qkv_stride * size
        q = qkv + head // (v_heads // k_heads) * dk * size
        normed(q, queries, dk, scale)
        normed(q + k_heads * dk * size, keys, dk, 1.0)
        begin(cells, state, keys, dk, state_row)
        a += (sequence * a_stride + head) * gate_size
        b += (sequence * b_stride + head) * gate_size
        kept, beta = gates_of(a, b, a_log + head * a_log_size, dt_bias + head * bias_size, most_beta)
        v_ = qkv + (2 * k_heads * dk + head * dv + column) * size
        move(state, keys, queries, keys, v_, out, cells, dk, state_row, kept, beta)

    return step


_PREFILL, _STEP = Kernel(_make_prefill), Kernel(_make_step)


def _launch(
    kernel: Kernel,
    variant: tuple[object, ...],
    sequences: int,
    qkv: torch.Tensor,
    gates: Gates,
    heads: DeltaHeads,
    pool: torch.Tensor,
    places: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    check_delta(qkv, gates, heads, pool)
    out = empty((len(qkv), heads.v_heads, heads.v_dim), qkv.dtype)
    vectors = 1 if heads.v_dim % (2 * _LANES) else 2
    dtypes = (DTYPES[each.dtype] for each in (qkv, gates.b, gates.a_log, gates.dt_bias, pool))
    assert gates.a.dtype == gates.b.dtype
    blocks = heads.v_dim // (_LANES * vectors)
    memory = scratch(64 * vectors * (heads.k_dim + 1) + 12 * heads.k_dim)
    kernel.launch(
        (*variant, *dtypes, vectors),
        sequences * heads.v_heads * blocks,
        *(qkv, *gates, out, pool, memory, *places),
        *(qkv.stride(0), gates.a.stride(0), gates.b.stride(0), pool.stride(0)),
        *(*heads, blocks, heads.k_dim**-0.5),
    )
    return out


def delta_prefill(
    qkv: torch.Tensor,
    gates: Gates,
    heads: DeltaHeads,
    pool: torch.Tensor,
    packed: Packed,
    saves: Saves | None = None,
) -> torch.Tensor:
    """`delta_prefill` of states/kernels/delta_prefill.py."""
    places = (packed.starts, packed.positions, packed.rows, packed.sources, *(saves or (None, None, None)))
    return _launch(_PREFILL, (), len(packed.rows), qkv, gates, heads, pool, places)


def delta_step(
    qkv: torch.Tensor,
    gates: Gates,
    heads: DeltaHeads,
    pool: torch.Tensor,
    rows: torch.Tensor,
    invariant: bool = False,
) -> torch.Tensor:
    """`delta_step` of states/kernels/delta_step.py. invariant: no bit depends on other rows in any case."""
    assert rows.is_contiguous()
    return _launch(_STEP, (_INTEGERS[rows.dtype],), len(qkv), qkv, gates, heads, pool, (rows,))
