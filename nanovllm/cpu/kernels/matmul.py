"""Products with a packed weight on a CPU: x @ weight^T, with a bias and a residual, and rows of a weight.

A weight [N, K] is packed into blocks of 64 columns of the product: [blocks, K, 64], and in bfloat16
[blocks, K / 2, 64, 2], as instructions for dot products of pairs read it. The last block is filled with 0.
AMX reads these pairs as they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch
from nanovllm.cpu.kernels.native import jit
from nanovllm.cpu.kernels.team import team_size
from nanovllm.kernels.kinds import Kinds

COLUMNS = 64
_DEPTH = Kinds("dtype of packed weights", {"float32": 1, "bfloat16": 2, "float16": 1})  # neighbours along K
_MATRICES = "matrices"  # in place of a dtype of activations: bfloat16, by AMX
# Rows of a program: they stay in the cache while the blocks of the weight go by, which AMX needs less often.
_CHUNK = Kinds("activation", {"float32": 96, "bfloat16": 96, _MATRICES: 256})
_SUMS = Kinds("activation", {"float32": 6, "bfloat16": 6, _MATRICES: 32})  # rows of a product at most
_SUMMED = Kinds("activation", {"float32": "float32", "bfloat16": "bfloat16", _MATRICES: "bfloat16"})


def packed_shape(shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a packed weight [N, K]; in bfloat16 K must be even."""
    depth = _DEPTH[DTYPES[dtype]]
    whole = -(-shape[0] // COLUMNS), shape[1] // depth, COLUMNS
    return (*whole, depth) if depth > 1 else whole


def rows_of_packed(packed: torch.Tensor) -> torch.Tensor:
    """A view of a packed weight: [blocks, 64, K], or in bfloat16 [blocks, 64, K / 2, 2]."""
    return packed.transpose(1, 2)


def copy_rows(packed: torch.Tensor, source: torch.Tensor, row: int, column: int) -> None:
    """Copy source [n, k] to rows row .. row + n and columns column .. column + k of the weight [N, K]."""
    view = rows_of_packed(packed)
    pairs = view.dim() == 4
    if pairs and (column % 2 or source.shape[1] % 2):
        whole = unpacked(packed)  # pairs are cut: never in the shapes of models
        whole[row : row + len(source), column : column + source.shape[1]] = source.to(whole.dtype)
        copy_rows(packed, whole, 0, 0)
        return
    if pairs:
        source = source.unflatten(1, (-1, 2))
        view = view[:, :, column // 2 : column // 2 + source.shape[1]]
    else:
        view = view[:, :, column : column + source.shape[1]]
    done, end = 0, len(source)
    while done < end:
        block, first = divmod(row + done, COLUMNS)
        if first == 0 and end - done >= COLUMNS:
            blocks = (end - done) // COLUMNS
            part = source[done : done + blocks * COLUMNS]
            view[block : block + blocks].copy_(part.unflatten(0, (blocks, COLUMNS)))
            done += blocks * COLUMNS
        else:
            count = min(COLUMNS - first, end - done)
            view[block, first : first + count].copy_(source[done : done + count])
            done += count


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The weight [blocks * 64, K] of a packed one, as a new tensor."""
    view = rows_of_packed(packed)
    return view.flatten(2).flatten(0, 1) if view.dim() == 4 else view.flatten(0, 1)


class PackedWeight(NamedTuple):
    """A packed weight, and how many rows [N] it has."""

    data: torch.Tensor
    n: int


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The weights [N, K] of E experts, each packed by itself: data [E, ...]."""

    data: torch.Tensor
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.data), self.n, self.k

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, expert: int) -> PackedWeight:
        """The weight of an expert, in the same memory."""
        return PackedWeight(self.data[expert], self.n)

    def dense(self) -> torch.Tensor:
        """The weights [E, N, K], a new tensor."""
        return torch.stack([unpacked(each)[: self.n] for each in self.data])


class Form(NamedTuple):
    """What programs of products have, by the kind of activations and the dtype of the weight."""

    by_matrices: bool
    chunk: int  # rows of a program
    x_size: int  # bytes of an activation
    depth: int  # neighbours along K
    block_bytes: int  # of a block, for each K
    sums_bytes: int  # of the sums of a product


@lru_cache
def form_of(activation: str, weight: str) -> Form:
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    x_size, block_bytes = sizes[_SUMMED[activation]], COLUMNS * sizes[weight]
    sums_bytes = _SUMS[activation] * COLUMNS * 4
    by_matrices = activation == _MATRICES
    return Form(by_matrices, _CHUNK[activation], x_size, _DEPTH[weight], block_bytes, sums_bytes)


def most_rows(activation: str) -> int:
    """Rows of a product; for kernels."""
    from nanovllm.cpu.kernels.tiles import most_rows as in_registers

    return _SUMS[activation] if activation == _MATRICES else in_registers()


def make_product(activation: str, weight: str) -> Callable[..., None]:
    """(rows, sums, x, x_stride, w, ahead, steps): a few rows times a block, see `make_tile`."""
    from nanovllm.cpu.kernels import vectors as v
    from nanovllm.cpu.kernels.matrices import product
    from nanovllm.cpu.kernels.tiles import groups_of, make_tile

    if activation == _MATRICES:
        return product  # type: ignore[no-any-return]
    group_bytes = 16 * v.SIZES[weight] * _DEPTH[weight]
    lines = ["def tiles(rows, sums, x, x_stride, w, ahead, steps):"]
    scope: dict[str, Any] = {}
    for rows in range(1, most_rows(activation) + 1):
        groups = groups_of(rows)
        scope[f"tile{rows}"] = make_tile(rows, groups, activation, weight)
        lines.append(f"    {'if' if rows == 1 else 'elif'} rows == {rows}:")
        lines += [
            f"        tile{rows}(sums + {64 * group}, x, x_stride, w + {group_bytes * group}, ahead, steps)"
            for group in range(0, 4, groups)
        ]
    exec("\n".join(lines), scope)
    tiles: Callable[..., None] = jit(scope["tiles"])
    return tiles


def _make_finish(result: str) -> Callable[..., None]:
    """(rows, sums, out, stride, bias, residual, residual_stride): write all columns of a block."""
    from nanovllm.cpu.kernels import vectors as v

    load, store = v.WHOLE[result]
    size, add, load_f32, line = v.SIZES[result], v.add, v.load_f32, 4 * COLUMNS

    def finish(
        rows: int, sums: int, out: int, stride: int, bias: int, residual: int, residual_stride: int
    ) -> None:
        for _ in range(rows):
            a, b, c, d = load_f32(sums), load_f32(sums + 64), load_f32(sums + 128), load_f32(sums + 192)
            if bias:
                a, b = add(a, load(bias)), add(b, load(bias + 16 * size))
                c, d = add(c, load(bias + 32 * size)), add(d, load(bias + 48 * size))
            if residual:
                a, b = add(a, load(residual)), add(b, load(residual + 16 * size))
                c, d = add(c, load(residual + 32 * size)), add(d, load(residual + 48 * size))
                residual += residual_stride
            store(out, a)
            store(out + 16 * size, b)
            store(out + 32 * size, c)
            store(out + 48 * size, d)
            sums += line
            out += stride

    return jit(finish)


def _make(activation: str, weight: str, result: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v
    from nanovllm.cpu.kernels.matrices import configure, release

    load, store = v.WHOLE[result]
    load_part, store_part = v.PART[result]
    size, add, load_f32 = v.SIZES[result], v.add, v.load_f32
    product, finish = make_product(activation, weight), _make_finish(result)
    by_matrices, chunk, x_size, steps_of, block_bytes, sums_bytes = form_of(activation, weight)
    columns, most = COLUMNS, most_rows(activation)
    scratch_bytes = sums_bytes + isa.MATRIX_CONFIG

    def matmul(
        x: Address,
        packed: Address,
        bias: Address,
        residual: Address,
        out: Address,
        memory: Address,
        rows: int,
        n: int,
        k: int,
        x_stride: int,
        residual_stride: int,
        blocks: int,
        threads: int,
        program: int,
        thread: int,
    ) -> None:
        first, block = program // blocks * chunk, program % blocks
        last = min(first + chunk, rows)
        sums = memory + thread * scratch_bytes
        configured = 0
        start, steps = packed + block * block_bytes * k, k // steps_of
        column = block * columns
        width = min(columns, n - column)
        # While the first rows are multiplied, the block that this thread reads next comes into its cache, by
        # halves.
        ahead = start + threads * block_bytes * k if block + threads < blocks and last - first > most else 0
        half, idle = block_bytes * k // 2, 0 if by_matrices else start
        row = first
        while row < last:
            count = -(-(last - row) // -(-(last - row) // most))  # tiles as even as possible
            if by_matrices:
                count = min(most, last - row)  # whole tiles
                if count != configured:
                    configure(sums + sums_bytes, count)
                    configured = count
            x_row = x + row * x_stride * x_size
            product(count, sums, x_row, x_stride * x_size, start, ahead or idle, steps)
            ahead = ahead + half if ahead and row == first else 0
            if width == columns:
                own_bias = bias + column * size if bias else 0
                other = residual + (row * residual_stride + column) * size if residual else 0
                target = out + (row * n + column) * size
                finish(count, sums, target, n * size, own_bias, other, residual_stride * size)
                row += count
                continue
            for each in range(count):
                target = out + ((row + each) * n + column) * size
                other = residual + ((row + each) * residual_stride + column) * size
                own = sums + each * columns * 4
                for group in range((width + 15) // 16):
                    rest = width - 16 * group
                    value = load_f32(own + 64 * group)
                    place = 16 * group * size
                    if rest >= 16:
                        if bias:
                            value = add(value, load(bias + column * size + place))
                        if residual:
                            value = add(value, load(other + place))
                        store(target + place, value)
                    else:
                        if bias:
                            value = add(value, load_part(bias + column * size + place, rest))
                        if residual:
                            value = add(value, load_part(other + place, rest))
                        store_part(target + place, value, rest)
            row += count
        if by_matrices:
            release()

    return matmul


def _make_widen(dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    load, load_part, store, store_part = (
        v.WHOLE[dtype][0],
        v.PART[dtype][0],
        v.store_f32,
        v.store_f32_part,
    )
    size = v.SIZES[dtype]

    def widen(x: Address, out: Address, n: int, stride: int, program: int, thread: int) -> None:
        x += program * stride * size
        out += program * n * 4
        for i in range(n // 16):
            store(out + 64 * i, load(x + 16 * size * i))
        if n % 16:
            done = n // 16 * 16
            store_part(out + 4 * done, load_part(x + size * done, n % 16), n % 16)

    return widen


def _make_embed(weight: str, result: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    get_i64 = v.get_i64
    get = v.GET[weight]
    put = {"float32": v.set_f32, "bfloat16": v.set_bf16, "float16": v.set_f16}[result]
    size, out_size, columns, pairs = v.SIZES[weight], v.SIZES[result], COLUMNS, _DEPTH[weight] > 1

    def embed(ids: Address, packed: Address, out: Address, k: int, program: int, thread: int) -> None:
        token = get_i64(ids + 8 * program)
        place = packed + (token // columns * k * columns + token % columns * (2 if pairs else 1)) * size
        out += program * k * out_size
        if pairs:
            for pair in range(k // 2):
                put(out + 2 * out_size * pair, get(place + 2 * columns * size * pair))
                put(out + 2 * out_size * pair + out_size, get(place + 2 * columns * size * pair + size))
        else:
            for index in range(k):
                put(out + out_size * index, get(place + columns * size * index))

    return embed


_KERNEL, _WIDEN, _EMBED = Kernel(_make), Kernel(_make_widen), Kernel(_make_embed)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] in float32."""
    if x.dtype == torch.float32:
        return x
    out = empty(x.shape, torch.float32)
    _WIDEN.launch((DTYPES[x.dtype],), len(x), x, out, x.shape[1], x.stride(0))
    return out


def _activation(x: torch.Tensor, packed: torch.Tensor, k: int) -> str:
    """How x is multiplied. It depends on no number of rows, so that a row has the same bits in any batch."""
    if not x.dtype == packed.dtype == torch.bfloat16 or not isa.has_bf16():
        return "float32"
    return _MATRICES if isa.has_matrices() and k % isa.MATRIX_STEP == 0 else "bfloat16"


def operand(x: torch.Tensor, packed: torch.Tensor) -> tuple[str, torch.Tensor]:
    """How x is multiplied, and x as it is read then."""
    activation = _activation(x, packed, x.shape[1])
    return activation, x if DTYPES[x.dtype] == _SUMMED[activation] else widened(x)


def matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    n: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight^T + bias [N] + residual [T, N] -> [T, N] in x's dtype, rounded once.

    packed: a weight [n or more, K], see this module's text, in any dtype of DTYPES. x: contiguous rows. Sums
    are float32. On CPUs with AVX512_BF16 bfloat16 times bfloat16 is summed in pairs, with AMX in steps of 32.
    """
    rows, k = x.shape
    out = empty((rows, n), x.dtype)
    activation, y = operand(x, packed)
    variant = activation, DTYPES[packed.dtype], DTYPES[x.dtype]
    blocks = -(-n // COLUMNS)
    form = form_of(activation, DTYPES[packed.dtype])
    memory = scratch(form.sums_bytes + isa.MATRIX_CONFIG)
    other = 0 if residual is None else residual.stride(0)
    programs = blocks * -(-rows // form.chunk)
    _KERNEL.launch(
        variant,
        programs,
        *(y, packed, bias, residual, out, memory),
        *(rows, n, k, y.stride(0), other, blocks, team_size()),
    )
    return out


def expert_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`matmul` with the weight of an expert."""
    return matmul(x, weight.data, weight.n)


def embed(ids: torch.Tensor, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [T] int64 of a packed weight [N, K] -> [T, K] in `dtype`."""
    k = packed.shape[1] * (2 if packed.dim() == 4 else 1)
    out = empty((len(ids), k), dtype)
    _EMBED.launch((DTYPES[packed.dtype], DTYPES[dtype]), len(ids), ids, packed, out, k)
    return out
