"""The two products of a gated MLP with its activation, on a CPU: act(x @ gate^T) * (x @ up^T).

gate and up are the halves of one packed weight (`matmul.py`), each of whole blocks. A program computes a
block of both, so that their product, which is larger than a cache, is never written. Bits are those of
`matmul` and `silu_and_mul`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu import isa
from nanovllm.cpu.kernels import matmul as plain
from nanovllm.cpu.kernels.activation import make_gated
from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch, wanted
from nanovllm.cpu.kernels.team import team_size

FEW_ROWS = 16  # one row takes 1.1 times as long as with two launches, 64 rows 0.97 times


def _make(activation: str, weight: str, result: str, kind: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v
    from nanovllm.cpu.kernels.matrices import configure, release

    store, load_f32, rounded = v.WHOLE[result][1], v.load_f32, v.ROUND[result]
    product, gated = plain.make_product(activation, weight), make_gated(kind)
    by_matrices, chunk, x_size, steps_of, block_bytes, sums_bytes = plain.form_of(activation, weight)
    size, columns, most = v.SIZES[result], plain.COLUMNS, plain.most_rows(activation)
    scratch_bytes = 2 * sums_bytes + isa.MATRIX_CONFIG

    def gated_matmul(
        x: Address,
        packed: Address,
        out: Address,
        memory: Address,
        rows: int,
        k: int,
        x_stride: int,
        blocks: int,
        threads: int,
        program: int,
        thread: int,
    ) -> None:
        first, block = program // blocks * chunk, program % blocks
        last = min(first + chunk, rows)
        sums = memory + thread * scratch_bytes
        steps, whole, configured = k // steps_of, block_bytes * k, 0
        gate, stride = packed + block * whole, blocks * columns * size
        # As in `matmul`: the blocks that this thread reads next come into its cache, by halves.
        ahead = threads * whole if block + threads < blocks and last - first > most else 0
        row = first
        while row < last:
            count = -(-(last - row) // -(-(last - row) // most))
            if by_matrices:
                count = min(most, last - row)
                if count != configured:
                    configure(sums + 2 * sums_bytes, count)
                    configured = count
            for half in range(2):
                start = gate + half * blocks * whole
                coming = 0 if by_matrices else start
                if ahead:
                    coming = start + ahead
                x_row, x_bytes = x + row * x_stride * x_size, x_stride * x_size
                product(count, sums + half * sums_bytes, x_row, x_bytes, start, coming, steps)
            ahead = ahead + whole // 2 if ahead and row == first else 0
            for each in range(count):
                own, target = sums + each * columns * 4, out + (row + each) * stride + block * columns * size
                for group in range(4):
                    left, right = load_f32(own + 64 * group), load_f32(own + sums_bytes + 64 * group)
                    store(target + 16 * size * group, gated(rounded(left), rounded(right)))
            row += count
        if by_matrices:
            release()

    return gated_matmul


_KERNEL = Kernel(_make)


def gated_matmul(x: torch.Tensor, packed: torch.Tensor, n: int, kind: str) -> torch.Tensor | None:
    """x [T, K] times a packed weight [n, K], then the activation of the two halves: [T, n / 2] in x's dtype.

    kind: as of `silu_and_mul`. None for few rows, whose product stays in the cache, and if a half has no
    whole blocks; then nothing is computed.
    """
    rows, k = x.shape
    few = rows <= FEW_ROWS
    if n % (2 * plain.COLUMNS) or (few and wanted.get() is None):  # a start compiles it in a step of one row
        return None
    out = empty((rows, n // 2), x.dtype)
    activation, y = plain.operand(x, packed)
    blocks = n // (2 * plain.COLUMNS)
    form = plain.form_of(activation, DTYPES[packed.dtype])
    memory = scratch(2 * form.sums_bytes + isa.MATRIX_CONFIG)
    _KERNEL.launch(
        (activation, DTYPES[packed.dtype], DTYPES[x.dtype], kind),
        blocks * -(-rows // form.chunk),
        *(y, packed, out, memory, rows, k, y.stride(0), blocks, team_size()),
    )
    return None if few else out
