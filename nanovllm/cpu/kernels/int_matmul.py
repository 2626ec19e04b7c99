"""Products with weights of 8 and 4 bits on a CPU: each 16 values of a row of x become int8
with a scale, their sums are integers, and these are added in their order in float32. A row depends on no
other row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu.kernels.int_layout import LANES, IntWeight
from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty
from nanovllm.cpu.kernels.native import jit
from nanovllm.cpu.kernels.team import team_size

_RECORD = 80  # bytes of a group of x, at most
_ROWS = 64  # of a program
_VECTORS = 8  # blocks of 16 outputs of a program, at most
_CLAIMS = 4  # programs for each thread, at least


def make_quantise(format: str, dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import int_vectors
    from nanovllm.cpu.kernels import vectors as v

    load, load_part, size = v.WHOLE[dtype][0], v.PART[dtype][0], v.SIZES[dtype]
    quantise = int_vectors.quantise(format)
    splat = v.splat

    def quantise_row(
        x: Address, records: Address, k: int, x_stride: int, row_bytes: int, program: int, thread: int
    ) -> None:
        x += program * x_stride * size
        records += program * row_bytes
        whole, rest = k // 32, k % 32
        for group in range(whole):
            place = x + 32 * size * group
            quantise(records, group, load(place), load(place + 16 * size))
        if rest:
            place = x + 32 * size * whole
            first = load_part(place, min(rest, 16))
            second = load_part(place + 16 * size, rest - 16) if rest > 16 else splat(0.0)
            quantise(records, whole, first, second)

    return quantise_row


def make_product(format: str, dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import int_vectors
    from nanovllm.cpu.kernels import vectors as v

    (load, store), (load_part, store_part), size = v.WHOLE[dtype], v.PART[dtype], v.SIZES[dtype]
    one, two, four, eight = (int_vectors.tile(format, rows) for rows in (1, 2, 4, 8))
    sum_of, add, ahead_of_group = int_vectors.sum_of, v.add, int_vectors.AHEAD_OF_GROUP

    @jit
    def finish(
        sums: int,
        rows: int,
        bias: int,
        residual: int,
        residual_bytes: int,
        out: int,
        out_bytes: int,
        count: int,
    ) -> None:
        for row in range(rows):
            value = sum_of(sums + 64 * row)
            if count < 16:
                if bias:
                    value = add(value, load_part(bias, count))
                if residual:
                    value = add(value, load_part(residual + residual_bytes * row, count))
                store_part(out + out_bytes * row, value, count)
            else:
                if bias:
                    value = add(value, load(bias))
                if residual:
                    value = add(value, load(residual + residual_bytes * row))
                store(out + out_bytes * row, value)

    def product(
        x: Address,
        weight: Address,
        bias: Address,
        residual: Address,
        out: Address,
        rows: int,
        n: int,
        groups: int,
        row_bytes: int,
        block_bytes: int,
        residual_stride: int,
        out_stride: int,
        vectors: int,
        columns: int,
        ahead: int,
        program: int,
        thread: int,
    ) -> None:
        first_row = program // columns * 64
        end = min(rows, first_row + 64)
        first = program % columns * vectors
        residual_bytes, out_bytes = residual_stride * size, out_stride * size
        last = min(first + vectors, (n + 15) // 16)
        part = groups * ahead_of_group
        for index in range(first, last):
            block = weight + index * block_bytes
            # While rows are multiplied, the block that this thread reads next comes into its cache.
            coming = block + (1 if index + 1 < last else ahead) * block_bytes
            asked = 0
            count = min(16, n - 16 * index)
            own_bias = bias + 16 * size * index if bias else 0
            row = first_row
            while row < end:
                place = x + row * row_bytes
                wanted = coming + asked if asked < block_bytes else 0
                asked += part
                if row + 8 <= end and end - first_row > 8:  # two tiles ask for a whole block
                    done, sums = 8, eight(place, row_bytes, block, wanted, groups)
                elif row + 4 <= end:
                    done, sums = 4, four(place, row_bytes, block, wanted, groups)
                elif row + 2 <= end:
                    done, sums = 2, two(place, row_bytes, block, wanted, groups)
                else:
                    done, sums = 1, one(place, row_bytes, block, wanted, groups)
                added = residual + row * residual_bytes + 16 * size * index if residual else 0
                target = out + row * out_bytes + 16 * size * index
                finish(sums, done, own_bias, added, residual_bytes, target, out_bytes, count)
                row += done

    return product


def make_embed(format: str, dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import int_vectors
    from nanovllm.cpu.kernels import vectors as v

    store, store_part, size = v.WHOLE[dtype][1], v.PART[dtype][1], v.SIZES[dtype]
    first_half, second_half = (int_vectors.looked_up(format, half) for half in (0, 1))
    get_i64 = v.get_i64

    def embed(
        ids: Address,
        weight: Address,
        out: Address,
        k: int,
        groups: int,
        block_bytes: int,
        program: int,
        thread: int,
    ) -> None:
        row = get_i64(ids + 8 * program)
        block, lane = weight + row // 16 * block_bytes, row % 16
        out += program * k * size
        for group in range(groups):
            place, left = out + 32 * size * group, k - 32 * group
            first = first_half(block, groups, group, lane)
            second = second_half(block, groups, group, lane)
            if left >= 16:
                store(place, first)
            else:
                store_part(place, first, left)
            if left >= 32:
                store(place + 16 * size, second)
            elif left > 16:
                store_part(place + 16 * size, second, left - 16)

    return embed


_QUANTISE, _PRODUCT, _EMBED = Kernel(make_quantise), Kernel(make_product), Kernel(make_embed)


def int_linear(
    x: torch.Tensor,
    weight: IntWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight^T + bias + residual, [T, N] in `dtype`, by default that of x, which the bias and the
    residual have too; rounded once. Float32 accumulation. out: where to write it, perhaps columns of a
    tensor."""
    rows, k = x.shape
    n, groups = weight.n, weight.groups
    out = empty((rows, n), dtype or x.dtype) if out is None else out
    if rows == 0:
        return out
    if x.stride(1) != 1:
        raise ValueError("rows of x must be contiguous")
    name, row_bytes = weight.format.name, groups * _RECORD
    records = empty((rows, row_bytes), torch.uint8)
    _QUANTISE.launch((name, DTYPES[x.dtype]), rows, x, records, k, x.stride(0), row_bytes)
    vectors = _vectors(n, rows)
    ahead = vectors * (team_size() - 1) + 1  # blocks to the next program of a thread
    columns, chunks = -(-n // (LANES * vectors)), -(-rows // _ROWS)
    block_bytes, stride = weight.data.stride(0), 0 if residual is None else residual.stride(0)
    _PRODUCT.launch(
        (name, DTYPES[out.dtype]),
        columns * chunks,
        *(records, weight.data, bias, residual, out),
        *(rows, n, groups, row_bytes, block_bytes, stride, out.stride(0), vectors, columns, ahead),
    )
    return out


def _vectors(n: int, rows: int) -> int:
    """Blocks of 16 outputs of a program. No bit of the result depends on it."""
    wanted = _CLAIMS * team_size()
    vectors = _VECTORS
    while vectors > 1 and -(-n // (LANES * vectors)) * -(-rows // _ROWS) < wanted:
        vectors //= 2
    return vectors


def int_embed(ids: torch.Tensor, weight: IntWeight, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [T] int64 of the weight, [T, K] in `dtype`."""
    out = empty((len(ids), weight.k), dtype)
    variant, stride = (weight.format.name, DTYPES[dtype]), weight.data.stride(0)
    _EMBED.launch(variant, len(ids), ids, weight.data, out, weight.k, weight.groups, stride)
    return out
