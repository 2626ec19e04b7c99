"""The short causal convolution of each channel on a CPU: of packed sequences, or a token of each.

SiLU follows, or gates multiply inputs and results. A program is some channels: of a sequence, or of one token
of every sequence. It writes their last inputs to the pool when it has read those that were there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch
from nanovllm.cpu.kernels.native import jit
from nanovllm.states.kernels import causal_conv_reference as twins
from nanovllm.states.kernels.packed import Packed, Saves

_CHANNELS = 64  # of a program, in vectors of 16; the last one has fewer vectors
_INTEGERS = {torch.int32: "int32", torch.int64: "int64"}


def _make_parts(dtype: str, weight: str, bias_: str) -> tuple[Any, ...]:
    """What both kernels call. Taps are [K, 64] float32, then the bias."""
    from numpy import float32

    from nanovllm.cpu.kernels import vectors as v

    load, store = v.WHOLE[dtype]
    get_weight, get_bias, load_f32, set_f32 = v.GET[weight], v.GET[bias_], v.load_f32, v.set_f32
    splat, add, sub, mul, div, fma, exp = v.splat, v.add, v.sub, v.mul, v.div, v.fma, v.exp
    rounded = v.ROUND[dtype]
    size, weight_size, bias_size, row = v.SIZES[dtype], v.SIZES[weight], v.SIZES[bias_], 4 * _CHANNELS
    zero, one = float32(0.0), float32(1.0)

    @jit
    def read_taps(weight: int, bias: int, taps: int, kernel: int, width: int) -> None:
        for channel in range(width):
            for tap in range(kernel):
                set_f32(
                    taps + row * tap + 4 * channel,
                    get_weight(weight + (channel * kernel + tap) * weight_size),
                )
            set_f32(taps + row * kernel + 4 * channel, get_bias(bias + channel * bias_size) if bias else zero)

    @jit
    def read(new: int, new_row: int, gate: int, gate_row: int, token: int) -> Any:
        """The input of 16 channels: times its gate, if there is one."""
        value = load(new + token * new_row)
        if gate:
            value = rounded(mul(value, load(gate + token * gate_row)))
        return value

    @jit
    def convolved(
        new: int,
        new_row: int,
        gate: int,
        gate_row: int,
        old: int,
        old_row: int,
        token: int,
        taps: int,
        kernel: int,
    ) -> Any:
        """A token's 16 channels. Inputs before token 0 of `new` are the last ones of `old`, or 0 without. A
        row of the pool, `old_row`, has the bytes of one gate of all channels; the other one follows it."""
        sum_ = load_f32(taps + row * kernel)
        for tap in range(kernel):
            at = token - (kernel - 1) + tap
            if at >= 0:
                sum_ = fma(load_f32(taps + row * tap), read(new, new_row, gate, gate_row, at), sum_)
            elif old:
                sum_ = fma(load_f32(taps + row * tap), load(old + (at + kernel - 1) * old_row), sum_)
        if gate:
            return mul(rounded(sum_), load(gate + token * gate_row + old_row))
        return div(sum_, add(splat(one), exp(sub(splat(zero), sum_))))

    return read_taps, read, convolved, load, store, size


def _make_prefill(dtype: str, weight: str, bias_: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    read_taps, read, convolved, load, store, size = _make_parts(dtype, weight, bias_)
    get_i32, splat, channels = v.get_i32, v.splat, _CHANNELS
    weight_size, bias_size = v.SIZES[weight], v.SIZES[bias_]

    @jit
    def keep(
        new: int,
        new_row: int,
        gate: int,
        gate_row: int,
        old: int,
        old_row: int,
        count: int,
        target: int,
        kernel: int,
    ) -> None:
        """The last K - 1 of the first `count` inputs, 16 channels; `target` may be the row of `old`."""
        for place in range(kernel - 1):  # in ascending order: reads lie before writes
            at = count - (kernel - 1) + place
            value = splat(0.0)
            if at >= 0:
                value = read(new, new_row, gate, gate_row, at)
            elif old:
                value = load(old + (at + kernel - 1) * old_row)
            store(target + place * old_row, value)

    def prefill(
        x: Address,
        weight_: Address,
        bias: Address,
        gates: Address,
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
        n: int,
        kernel: int,
        x_stride: int,
        gates_stride: int,
        pool_stride: int,
        blocks: int,
        program: int,
        thread: int,
    ) -> None:
        sequence, channel = program // blocks, program % blocks * channels
        first, end = get_i32(starts + 4 * sequence), get_i32(starts + 4 * sequence + 4)
        position, row, count = get_i32(positions + 4 * sequence), get_i32(rows + 4 * sequence), end - first
        source = get_i32(sources + 4 * sequence)
        width = min(channels, n - channel)
        if count <= 0:
            return
        taps = memory + thread * (kernel + 1) * 4 * channels
        own_bias = bias + channel * bias_size if bias else 0
        read_taps(weight_ + channel * kernel * weight_size, own_bias, taps, kernel, width)
        new, new_row = x + (first * x_stride + channel) * size, x_stride * size
        cells, old_row, to = pool + channel * size, n * size, out + (first * n + channel) * size
        old = cells + source * pool_stride * size if source >= 0 and position > 0 else 0
        gate = gates + (first * gates_stride + channel) * size if gates else 0
        gate_row = gates_stride * size
        for token in range(count):
            for lane in range(0, width, 16):
                old_lane = old + lane * size if old else 0
                own, own_gate = new + lane * size, gate + lane * size if gate else 0
                value = convolved(
                    own, new_row, own_gate, gate_row, old_lane, old_row, token, taps + 4 * lane, kernel
                )
                store(to + token * old_row + lane * size, value)
        for lane in range(0, width, 16):
            place, old_lane = new + lane * size, old + lane * size if old else 0
            own_gate = gate + lane * size if gate else 0
            if save_starts:
                for save in range(
                    get_i32(save_starts + 4 * sequence), get_i32(save_starts + 4 * sequence + 4)
                ):
                    at, target = get_i32(save_positions + 4 * save) - position, get_i32(save_rows + 4 * save)
                    if target >= 0 and at >= 0 and at <= count:
                        own = cells + target * pool_stride * size + lane * size
                        keep(place, new_row, own_gate, gate_row, old_lane, old_row, at, own, kernel)
            if row >= 0:
                own = cells + row * pool_stride * size + lane * size
                keep(place, new_row, own_gate, gate_row, old_lane, old_row, count, own, kernel)

    return prefill


def _make_step(rows_dtype: str, dtype: str, weight: str, bias_: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    read_taps, read, convolved, load, store, size = _make_parts(dtype, weight, bias_)
    splat, channels, weight_size, bias_size = v.splat, _CHANNELS, v.SIZES[weight], v.SIZES[bias_]
    get_row, row_size = {"int32": (v.get_i32, 4), "int64": (v.get_i64, 8)}[rows_dtype]

    def step(
        x: Address,
        weight_: Address,
        bias: Address,
        gates: Address,
        out: Address,
        pool: Address,
        memory: Address,
        rows: Address,
        n: int,
        kernel: int,
        x_stride: int,
        gates_stride: int,
        pool_stride: int,
        sequences: int,
        program: int,
        thread: int,
    ) -> None:
        channel = program * channels
        width = min(channels, n - channel)
        taps = memory + thread * (kernel + 1) * 4 * channels
        own_bias = bias + channel * bias_size if bias else 0
        read_taps(weight_ + channel * kernel * weight_size, own_bias, taps, kernel, width)
        old_row = n * size
        for sequence in range(sequences):
            row = get_row(rows + row_size * sequence)
            to = out + (sequence * n + channel) * size
            for lane in range(0, width, 16):
                if row < 0:
                    store(to + lane * size, splat(0.0))
                    continue
                new = x + (sequence * x_stride + channel + lane) * size
                old = pool + (row * pool_stride + channel + lane) * size
                gate = gates + (sequence * gates_stride + channel + lane) * size if gates else 0
                store(to + lane * size, convolved(new, 0, gate, 0, old, old_row, 0, taps + 4 * lane, kernel))
                for place in range(kernel - 2):
                    store(old + place * old_row, load(old + (place + 1) * old_row))
                store(old + (kernel - 2) * old_row, read(new, 0, gate, 0, 0))

    return step


_PREFILL, _STEP = Kernel(_make_prefill), Kernel(_make_step)


def _prepared(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    gates: torch.Tensor | None,
) -> tuple[tuple[str, ...], list[torch.Tensor | None], torch.Tensor]:
    """The dtypes of a variant, the first arguments of a launch, and of these the result."""
    twins.check_conv(x, weight, bias, pool, gates)
    kernel = weight.shape[1]
    assert x.dtype == pool.dtype
    out, memory = empty(x.shape, x.dtype), scratch((kernel + 1) * 4 * _CHANNELS)
    dtypes = DTYPES[x.dtype], DTYPES[weight.dtype], DTYPES[(weight if bias is None else bias).dtype]
    return dtypes, [x, weight, bias, gates, out, pool, memory], out


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    packed: Packed,
    saves: Saves | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """`causal_conv` of states/kernels/causal_conv.py. Channels that 16 does not divide take the twin."""
    if len(weight) % 16:
        return twins.causal_conv_reference(x, weight, bias, pool, packed, saves, gates)
    dtypes, first, out = _prepared(x, weight, bias, pool, gates)
    places = (packed.starts, packed.positions, packed.rows, packed.sources, *(saves or (None, None, None)))
    (channels, kernel), blocks = weight.shape, -(-weight.shape[0] // _CHANNELS)
    numbers = channels, kernel, x.stride(0), _stride(gates), pool.stride(0), blocks
    _PREFILL.launch(dtypes, len(packed.rows) * blocks, *(*first, *places, *numbers))
    return out


def _stride(gates: torch.Tensor | None) -> int:
    return 0 if gates is None else gates.stride(0)


def causal_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """`causal_conv_step` of states/kernels/causal_conv.py; as `causal_conv`."""
    if len(weight) % 16:
        return twins.causal_conv_step_reference(x, weight, bias, pool, rows, gates)
    dtypes, first, out = _prepared(x, weight, bias, pool, gates)
    assert rows.is_contiguous()
    channels, kernel = weight.shape
    numbers = channels, kernel, x.stride(0), _stride(gates), pool.stride(0), len(x)
    variant = (_INTEGERS[rows.dtype], *dtypes)
    _STEP.launch(variant, -(-channels // _CHANNELS), *(*first, rows, *numbers))
    return out
