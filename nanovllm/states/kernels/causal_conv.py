"""The short causal convolution of each channel: over packed sequences, and one token of each.

SiLU follows it; or gates [T, 2 C] multiply its inputs and its results, and nothing follows. A row of the pool
keeps the last K - 1 inputs of a sequence, oldest first, as the convolution takes them. Owns no memory.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl
from nanovllm.states.kernels.causal_conv_reference import (
    causal_conv_reference,
    causal_conv_step_reference,
    check_conv,
)
from nanovllm.states.kernels.packed import Packed, Saves

_CHANNELS, _TOKENS = 128, 16  # of a program for a chunk, and of its turns; not measured
_STEP_CHANNELS = 512  # of a program for one token; not measured


@jit()
def silu(x: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-x))


@jit()
def rounded_product(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """In x's dtype, as torch multiplies."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@jit("starts_ptr", "positions_ptr", "sources_ptr")
def _conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    seqs_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    x_stride: int,
    gates_stride: int,
    pool_stride: int,
    C: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program for a chunk and CHANNELS channels, of which it computes TOKENS rows at a time."""
    await_inputs(USE_PDL)
    chunk = tl.program_id(1)
    count = tl.load(counts_ptr + chunk)
    if count > 0:
        sequence = tl.load(seqs_ptr + chunk)
        token = tl.load(tokens_ptr + chunk)
        start = tl.load(starts_ptr + sequence)
        position = tl.load(positions_ptr + sequence)
        source = tl.load(sources_ptr + sequence).to(tl.int64)
        channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channels < C
        inside_old = channels < tl.where((position > 0) & (source >= 0), C, 0)
        x_ptrs = x_ptr + channels[None, :]
        source_ptrs = pool_ptr + source * pool_stride + channels[None, :]
        for first in range(0, count, TOKENS):
            i = first + tl.arange(0, TOKENS)
            live = (i < count)[:, None] & inside[None, :]
            live_old = (i < count)[:, None] & inside_old[None, :]
            total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(K):
                local = token - start + i - (K - 1) + tap
                is_new = (local >= 0)[:, None]
                weight = tl.load(weight_ptr + channels * K + tap, mask=inside, other=0.0).to(tl.float32)
                new_ptrs = x_ptrs + (start + local).to(tl.int64)[:, None] * x_stride
                new = tl.load(new_ptrs, mask=live & is_new, other=0.0)
                if gates_ptr is not None:
                    before = gates_ptr + (start + local).to(tl.int64)[:, None] * gates_stride
                    gate = tl.load(before + channels[None, :], mask=live & is_new, other=0.0)
                    new = rounded_product(new, gate)
                value = new.to(tl.float32)
                if token + first < start + K - 1:
                    old_ptrs = source_ptrs + (local + K - 1)[:, None] * C
                    value += tl.load(old_ptrs, mask=live_old & ~is_new, other=0.0).to(tl.float32)
                total += weight[None, :] * value
            out_ptrs = out_ptr + (token + i).to(tl.int64)[:, None] * C + channels[None, :]
            if gates_ptr is None:
                tl.store(out_ptrs, silu(total).to(out_ptr.dtype.element_ty), mask=live)
            else:
                after = gates_ptr + (token + i).to(tl.int64)[:, None] * gates_stride + C
                gate = tl.load(after + channels[None, :], mask=live, other=0.0)
                tl.store(out_ptrs, rounded_product(total.to(out_ptr.dtype.element_ty), gate), mask=live)


@jit("starts_ptr", "positions_ptr", "rows_ptr", "sources_ptr")
def _keep_kernel(
    x_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    save_starts_ptr: tl.tensor,
    save_positions_ptr: tl.tensor,
    save_rows_ptr: tl.tensor,
    x_stride: int,
    gates_stride: int,
    pool_stride: int,
    C: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program for a sequence and CHANNELS channels: the K - 1 inputs before each save and before the end.

    A kernel of its own: all programs of the convolution have then read the row that is written here.
    """
    await_inputs(USE_PDL)
    sequence = tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    if length > 0:
        position = tl.load(positions_ptr + sequence)
        source = tl.load(sources_ptr + sequence).to(tl.int64)
        channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channels < C
        inside_old = channels < tl.where((position > 0) & (source >= 0), C, 0)
        place = tl.arange(0, K_PADDED)
        is_place = (place < K - 1)[:, None]
        save = 0
        last_save = 0
        if save_starts_ptr is not None:
            save = tl.load(save_starts_ptr + sequence)
            last_save = tl.load(save_starts_ptr + sequence + 1)
        for each in range(save, last_save + 1):
            before = length
            row = tl.load(rows_ptr + sequence)
            if save_starts_ptr is not None:
                is_save = each < last_save
                at = tl.load(save_positions_ptr + each, mask=is_save, other=0) - position
                before = tl.where(is_save, at, length)
                row = tl.where(is_save, tl.load(save_rows_ptr + each, mask=is_save, other=-1), row)
            if (row >= 0) & (before >= 0) & (before <= length):
                local = before - (K - 1) + place
                is_new = (local >= 0)[:, None]
                new_ptrs = x_ptr + (start + local).to(tl.int64)[:, None] * x_stride + channels[None, :]
                is_input = is_place & inside[None, :] & is_new
                new = tl.load(new_ptrs, mask=is_input, other=0.0)
                if gates_ptr is not None:
                    gates = gates_ptr + (start + local).to(tl.int64)[:, None] * gates_stride
                    new = rounded_product(new, tl.load(gates + channels[None, :], mask=is_input, other=0.0))
                old_ptrs = pool_ptr + source * pool_stride + (local + K - 1)[:, None] * C + channels[None, :]
                old = tl.load(old_ptrs, mask=is_place & inside_old[None, :] & ~is_new, other=0.0)
                tl.debug_barrier()  # this may be the row that is read
                target = pool_ptr + row.to(tl.int64) * pool_stride + place[:, None] * C + channels[None, :]
                dtype: tl.constexpr = pool_ptr.dtype.element_ty
                tl.store(target, tl.where(is_new, new.to(dtype), old), mask=is_place & inside[None, :])


@jit("rows_ptr")
def _conv_step_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    x_stride: int,
    gates_stride: int,
    pool_stride: int,
    C: tl.constexpr,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program for a row and CHANNELS channels."""
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    kept = channels < tl.where(row >= 0, C, 0)
    total = tl.zeros((CHANNELS,), dtype=tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    await_inputs(USE_PDL)
    x = tl.load(x_ptr + index * x_stride + channels, mask=kept, other=0.0)
    gate_ptrs = gates_ptr
    if gates_ptr is not None:
        gate_ptrs = gates_ptr + index * gates_stride + channels
        x = rounded_product(x, tl.load(gate_ptrs, mask=kept, other=0.0))
    pool_ptrs = pool_ptr + row * pool_stride + channels
    for tap in tl.static_range(K):
        weight = tl.load(weight_ptr + channels * K + tap, mask=inside, other=0.0).to(tl.float32)
        value = x
        if tap < K - 1:
            value = tl.load(pool_ptrs + tap * C, mask=kept, other=0.0).to(x.dtype)
        if tap > 0:  # each thread has read this place before
            tl.store(pool_ptrs + (tap - 1) * C, value, mask=kept)
        total += weight * value.to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if gates_ptr is None:
        out = silu(total).to(dtype)
    else:
        out = rounded_product(total.to(dtype), tl.load(gate_ptrs + C, mask=kept, other=0.0))
    tl.store(out_ptr + index * C + channels, tl.where(row >= 0, out, 0.0), mask=inside)


def causal_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    packed: Packed,
    saves: Saves | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y [T, C], y[t] = silu(bias + sum over i of weight[:, i] * x[t - (K - 1) + i]), in x's dtype.

    With gates y[t] = c[t] * (bias + sum over i of weight[:, i] * (b * x)[t - (K - 1) + i]): each product with
    a gate is rounded to x's dtype, and so is the sum; b * x are the inputs that are kept.

    Before a sequence's first token are the inputs that its source row keeps, or zeros at position 0; its last
    K - 1 inputs go to its row, and those before the positions of `saves` to theirs. Rows past the last
    sequence are not computed. All is in float32, rounded once.

    x: [T, C] with contiguous rows. weight: [C, K], the last column for the present token. bias: [C] or None.
    pool: [rows, K - 1, C], each row contiguous. gates: [T, 2 C] in x's dtype, b and then c of each channel,
    with contiguous rows. ValueError for other shapes.
    """
    check_conv(x, weight, bias, pool, gates)
    channels, k = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunks = len(packed.chunk_counts)
    if chunks:
        width = min(_CHANNELS, next_power_of_2(channels))
        parts = -(-channels // width)
        _conv_kernel[(parts, chunks)](
            x,
            weight,
            bias,
            gates,
            out,
            pool,
            packed.starts,
            packed.positions,
            packed.sources,
            packed.chunk_seqs,
            packed.chunk_tokens,
            packed.chunk_counts,
            x.stride(0),
            0 if gates is None else gates.stride(0),
            pool.stride(0),
            C=channels,
            K=k,
            TOKENS=_TOKENS,
            CHANNELS=width,
            num_warps=4,
            **pdl_options(x),
        )
        _keep_kernel[(parts, len(packed.rows))](
            x,
            gates,
            pool,
            *packed[:4],
            *(saves or (None, None, None)),
            x.stride(0),
            0 if gates is None else gates.stride(0),
            pool.stride(0),
            C=channels,
            K=k,
            K_PADDED=next_power_of_2(k),
            CHANNELS=width,
            num_warps=4,
            **pdl_options(x),
        )
    return out


def causal_conv_step_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each sequence: as `causal_conv`, and its row of the pool moves on by one input.

    x: [S, C]. rows: [S] int32 or int64, each row of the pool at most once; PADDING changes nothing, and its
    result is 0. `rows` must be an input of the step, not the result of a kernel.
    """
    check_conv(x, weight, bias, pool, gates)
    sequences, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if sequences:
        width = min(_STEP_CHANNELS, next_power_of_2(channels))
        _conv_step_kernel[(-(-channels // width), sequences)](
            x,
            weight,
            bias,
            gates,
            out,
            pool,
            rows,
            x.stride(0),
            0 if gates is None else gates.stride(0),
            pool.stride(0),
            C=channels,
            K=weight.shape[1],
            CHANNELS=width,
            num_warps=4,
            **pdl_options(x),
        )
    return out


causal_conv = by_device(causal_conv_triton, causal_conv_reference, "causal_conv.causal_conv")
causal_conv_step = by_device(
    causal_conv_step_triton, causal_conv_step_reference, "causal_conv.causal_conv_step"
)
