"""The gated delta rule over packed sequences, in chunks on a fixed grid of positions. Owns no memory.

Within a chunk, with G the sum of g up to each token, d solves a triangular system (WY representation, as in
Gated Delta Networks and Parallelizing linear transformers with the delta rule, both by Yang et al., 2024):

    d = M (v - exp(G) k S),  M = (I + A)^-1 diag(beta),  A[i, j] = beta[i] k[i] k[j] exp(G[i] - G[j]), j < i
    o = exp(G) q S + P d,    P[i, j] = q[i] k[j] exp(G[i] - G[j]), j <= i
    S = exp(G[last]) S + sum over j of exp(G[last] - G[j]) k[j] d[j]^T

M keeps the influence of one token on another through all between: where keys repeat, its rows sum to almost
nothing, and an error of 16 bits adds up to a tenth of the result. So it is kept as a sum of two matrices.

A first kernel computes M and P of all chunks at once. A second one goes through the chunks of a sequence with
S in registers; it reads q, k and v as the convolution wrote them, because norms are factors of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compat import (
    await_inputs,
    by_device,
    jit,
    next_power_of_2,
    pdl_options,
    shared_memory,
    tl,
)
from nanovllm.kernels.kinds import Kinds
from nanovllm.states.kernels.delta_heads import (
    L2_EPS,
    PRECISIONS,
    DeltaHeads,
    Gates,
    check_delta,
    decay_and_beta,
)
from nanovllm.states.kernels.delta_prefill_reference import delta_prefill_reference
from nanovllm.states.kernels.packed import CHUNK, Packed, Saves
from nanovllm.states.kernels.triangular import inverse, product

_DIAGONAL = 16  # rows of the blocks of A that are inverted row by row
_BLOCK_K = 64  # elements of keys that the first kernel multiplies at once
_STATE = 8192  # elements of a program's state: with more its registers overflow
_VECTORS = 3  # of a chunk and head: the sums of g, the factors of k, those of q


class PrefillTiles(NamedTuple):
    """The launches of a prefill; not measured."""

    columns: int  # of a head's state in a program of the second kernel
    warps: int  # of the second kernel
    stages: int  # the same; limited by shared memory
    first_warps: int  # of the first kernel
    first_registers: int | None = None  # the maximum for a thread of it


PREFILL_TILES = PrefillTiles(64, 4, 2, 4, 168)  # so that three programs fit on a multiprocessor
_PLAIN = PrefillTiles(32, 8, 1, 8)
_TILES = Kinds("dtype", {torch.float32: _PLAIN, torch.bfloat16: PREFILL_TILES, torch.float16: PREFILL_TILES})


@jit()
def _chunk_kernel(
    qkv_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    m_ptr: tl.tensor,
    m_rest_ptr: tl.tensor,
    p_ptr: tl.tensor,
    vectors_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    qkv_stride: int,
    a_stride: int,
    b_stride: int,
    scale: float,
    eps: float,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOST_BETA: tl.constexpr,
    VECTORS: tl.constexpr,
    C: tl.constexpr,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program for a chunk and a value head: its M, P and vectors."""
    await_inputs(USE_PDL)
    head = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + chunk)
    if count > 0:
        i = tl.arange(0, C)
        live = i < count
        token = tl.load(tokens_ptr + chunk) + i.to(tl.int64)
        k_ptrs = qkv_ptr + token[:, None] * qkv_stride + (K_HEADS + head // (V_HEADS // K_HEADS)) * DK
        kk = tl.zeros((C, C), dtype=tl.float32)
        qk = tl.zeros((C, C), dtype=tl.float32)
        k_sum = tl.zeros((C,), dtype=tl.float32)
        q_sum = tl.zeros((C,), dtype=tl.float32)
        for start in range(0, DK, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            mask = live[:, None] & (columns < DK)[None, :]
            k = tl.load(k_ptrs + columns[None, :], mask=mask, other=0.0)
            q = tl.load(k_ptrs + columns[None, :] - K_HEADS * DK, mask=mask, other=0.0)
            kk = product(k, tl.trans(k), kk, PRECISION)
            qk = product(q, tl.trans(k), qk, PRECISION)
            k_wide = k.to(tl.float32)
            q_wide = q.to(tl.float32)
            k_sum += tl.sum(k_wide * k_wide, axis=1)
            q_sum += tl.sum(q_wide * q_wide, axis=1)
        k_factor = tl.rsqrt(k_sum + eps)
        q_factor = tl.rsqrt(q_sum + eps) * scale
        a = tl.load(a_ptr + token * a_stride + head, mask=live, other=0.0)
        b = tl.load(b_ptr + token * b_stride + head, mask=live, other=0.0)
        g, beta = decay_and_beta(a, b, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head), MOST_BETA)
        beta = tl.where(live, beta, 0.0)
        total = tl.cumsum(tl.where(live, g, 0.0), axis=0)
        is_earlier = i[:, None] >= i[None, :]
        decay = tl.exp(tl.where(is_earlier, total[:, None] - total[None, :], float("-inf")))
        decay *= k_factor[None, :]
        place = chunk * V_HEADS + head
        cells = place * (C * C) + i[:, None] * C + i[None, :]
        p = qk * decay * q_factor[:, None]  # first, so that its registers are free
        tl.store(p_ptr + cells, p.to(p_ptr.dtype.element_ty))
        vectors = vectors_ptr + place * (VECTORS * C) + i
        tl.store(vectors, total)
        tl.store(vectors + C, k_factor)
        tl.store(vectors + 2 * C, q_factor)
        is_before = i[:, None] > i[None, :]
        lower = tl.where(is_before, kk * decay * (k_factor * beta)[:, None], 0.0)
        m = inverse(lower, HALVES, C, DIAGONAL) * beta[None, :]
        rounded = m.to(m_ptr.dtype.element_ty)
        tl.store(m_ptr + cells, rounded)
        if m_rest_ptr is not None:
            tl.store(m_rest_ptr + cells, (m - rounded.to(tl.float32)).to(m_rest_ptr.dtype.element_ty))


@jit()
def _new_values(
    state: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    m_ptr: tl.tensor,
    m_rest_ptr: tl.tensor,
    place: tl.tensor,
    from_state: tl.tensor,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """d [C, COLUMNS] of a chunk; from_state: exp(G) and the norms of k."""
    i = tl.arange(0, C)
    cells = place * (C * C) + i[:, None] * C + i[None, :]
    zeros = tl.zeros((C, state.shape[1]), dtype=tl.float32)
    known = product(k, state.to(k.dtype), zeros, PRECISION)
    rest = (v.to(tl.float32) - known * from_state[:, None]).to(k.dtype)
    new = product(tl.load(m_ptr + cells), rest, zeros, PRECISION)
    if m_rest_ptr is not None:
        new = product(tl.load(m_rest_ptr + cells), rest, new, PRECISION)
    return new


@jit("starts_ptr", "positions_ptr", "rows_ptr", "sources_ptr")
def _scan_kernel(
    qkv_ptr: tl.tensor,
    m_ptr: tl.tensor,
    m_rest_ptr: tl.tensor,
    p_ptr: tl.tensor,
    vectors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    chunk_starts_ptr: tl.tensor,
    save_starts_ptr: tl.tensor,
    save_positions_ptr: tl.tensor,
    save_rows_ptr: tl.tensor,
    qkv_stride: int,
    pool_stride: int,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTORS: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program for COLUMNS columns of a head's state of a sequence: all its chunks, one after the other.

    They are in runs that end at the saves and at the sequence's end. A save within a chunk computes that
    chunk's d twice, and changes nothing else.
    """
    await_inputs(USE_PDL)
    parts: tl.constexpr = (DV + COLUMNS - 1) // COLUMNS
    head = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    sequence = tl.program_id(1)
    begin = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    if begin < end:
        position = tl.load(positions_ptr + sequence)
        source = tl.load(sources_ptr + sequence).to(tl.int64)
        row = tl.load(rows_ptr + sequence).to(tl.int64)
        first_chunk = tl.load(chunk_starts_ptr + sequence)
        chunks = tl.load(chunk_starts_ptr + sequence + 1) - first_chunk
        offset = position % C
        c = tl.arange(0, C)
        i = tl.arange(0, DK_PADDED)
        j = part * COLUMNS + tl.arange(0, COLUMNS)
        in_k = i < DK
        in_v = j < DV
        cells = pool_ptr + head * (DK * DV) + i[:, None] * DV + j[None, :]
        in_cells = in_k[:, None] & in_v[None, :]
        is_read = i < tl.where((position > 0) & (source >= 0), DK, 0)
        old_mask = is_read[:, None] & in_v[None, :]
        state = tl.load(cells + source * pool_stride, mask=old_mask, other=0.0).to(tl.float32)
        k_base = qkv_ptr + (K_HEADS + head // (V_HEADS // K_HEADS)) * DK + i[None, :]
        v_base = qkv_ptr + 2 * K_HEADS * DK + head * DV + j[None, :]
        save = 0
        last_save = 0
        if save_starts_ptr is not None:
            save = tl.load(save_starts_ptr + sequence)
            last_save = tl.load(save_starts_ptr + sequence + 1)
        done = 0
        for run in range(save, last_save + 1):
            until = chunks
            before = end - begin
            if save_starts_ptr is not None:
                before = tl.load(save_positions_ptr + run, mask=run < last_save, other=0) - position
                border = tl.maximum(offset + before, 0) // C  # at or before the save
                until = tl.where(run < last_save, tl.minimum(border, chunks), chunks)
            for chunk in range(done, until):
                token = begin + tl.maximum(chunk * C - offset, 0)
                live = token + c < tl.minimum(begin + (chunk + 1) * C - offset, end)
                tokens = (token + c).to(tl.int64)[:, None]
                k_mask = live[:, None] & in_k[None, :]
                k = tl.load(k_base + tokens * qkv_stride, mask=k_mask, other=0.0)
                q = tl.load(k_base - K_HEADS * DK + tokens * qkv_stride, mask=k_mask, other=0.0)
                v_mask = live[:, None] & in_v[None, :]
                v = tl.load(v_base + tokens * qkv_stride, mask=v_mask, other=0.0)
                place = (first_chunk + chunk).to(tl.int64) * V_HEADS + head
                p = tl.load(p_ptr + place * (C * C) + c[:, None] * C + c[None, :])
                vectors = vectors_ptr + place * (VECTORS * C)
                total = tl.load(vectors + c)
                k_factor = tl.load(vectors + C + c)
                q_factor = tl.load(vectors + 2 * C + c)
                last = tl.load(vectors + C - 1)
                carried = tl.exp(total)
                new = _new_values(state, k, v, m_ptr, m_rest_ptr, place, carried * k_factor, C, PRECISION)
                out = product(q, state.to(q.dtype), tl.zeros((C, COLUMNS), dtype=tl.float32), PRECISION)
                out = product(p, new.to(q.dtype), out * (carried * q_factor)[:, None], PRECISION)
                out_ptrs = out_ptr + tokens * (V_HEADS * DV) + head * DV + j[None, :]
                tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=v_mask)
                kept = new * (tl.exp(last - total) * k_factor)[:, None]
                state = product(tl.trans(k), kept.to(k.dtype), state * tl.exp(last), PRECISION)
            done = tl.maximum(done, until)
            if save_starts_ptr is not None:
                to = tl.load(save_rows_ptr + run, mask=run < last_save, other=-1).to(tl.int64)
                if (to >= 0) & (before >= 0) & (before <= end - begin):
                    count = before - tl.maximum(done * C - offset, 0)
                    saved = state
                    if count > 0:
                        live = c < count
                        at = (begin + before - count + c).to(tl.int64)[:, None] * qkv_stride
                        k = tl.load(k_base + at, mask=live[:, None] & in_k[None, :], other=0.0)
                        v = tl.load(v_base + at, mask=live[:, None] & in_v[None, :], other=0.0)
                        place = (first_chunk + done).to(tl.int64) * V_HEADS + head
                        vectors = vectors_ptr + place * (VECTORS * C)
                        total = tl.load(vectors + c)
                        k_factor = tl.load(vectors + C + c)
                        last = tl.load(vectors + count - 1)
                        from_state = tl.exp(total) * k_factor
                        new = _new_values(state, k, v, m_ptr, m_rest_ptr, place, from_state, C, PRECISION)
                        factor = tl.where(live, tl.exp(tl.minimum(last - total, 0.0)) * k_factor, 0.0)
                        kept = (new * factor[:, None]).to(k.dtype)
                        saved = product(tl.trans(k), kept, state * tl.exp(last), PRECISION)
                    target = cells + to * pool_stride
                    tl.store(target, saved.to(pool_ptr.dtype.element_ty), mask=in_cells)
        if row >= 0:
            tl.store(cells + row * pool_stride, state.to(pool_ptr.dtype.element_ty), mask=in_cells)


def choose_tiles(heads: DeltaHeads, dtype: torch.dtype) -> PrefillTiles:
    """The tiles for these heads; they never depend on the sequences, and so no bits do."""
    most = min(_STATE // next_power_of_2(heads.k_dim), next_power_of_2(heads.v_dim))
    return _TILES[dtype]._replace(columns=min(_TILES[dtype].columns, most))


def _stages(tiles: PrefillTiles, heads: DeltaHeads, qkv: torch.Tensor) -> int:
    """As many as fit: a stage holds a chunk's q, k, v, both parts of M, and P."""
    width = 2 * next_power_of_2(heads.k_dim) + tiles.columns + 3 * CHUNK
    rest = shared_memory(qkv.device) - qkv.itemsize * tiles.columns * (heads.k_dim + 2 * CHUNK)
    return max(1, min(tiles.stages, rest // (qkv.itemsize * CHUNK * width)))


def delta_prefill_triton(
    qkv: torch.Tensor,
    gates: Gates,
    heads: DeltaHeads,
    pool: torch.Tensor,
    packed: Packed,
    saves: Saves | None = None,
    tiles: PrefillTiles | None = None,
) -> torch.Tensor:
    """Return o [T, v_heads, dv] in qkv's dtype, of all tokens of packed sequences.

    A sequence begins with the state of its source row, or with zeros at position 0, and its last state goes
    to its row; the states at the positions of `saves` go to theirs, which are no sequence's source. Rows past
    the last sequence are not computed.

    qkv: [T, channels], all q, all k, all v, as the convolution returns them: q and k are normed here, and q
    is scaled by dk ** -0.5. pool: [rows, v_heads, dk, dv] float32 or bfloat16, each row contiguous. Products
    are of qkv's dtype, with sums in float32; the state is float32 within a call.

    With a pool in float32 the bits of a token do not depend on how its sequence was cut into calls at
    multiples of CHUNK. After a cut elsewhere results differ by the rounding of qkv's dtype. ValueError for
    sizes that do not fit.
    """
    check_delta(qkv, gates, heads, pool)
    out = qkv.new_empty(len(qkv), heads.v_heads, heads.v_dim)
    if not (chunks := len(packed.chunk_counts)):
        return out
    tiles = tiles or choose_tiles(heads, qkv.dtype)
    if qkv.itemsize < 4 and tiles.warps == 8 and tiles.columns < 64:
        raise ValueError(f"{tiles}: with 8 warps and fewer than 64 columns Triton 3.6 computes wrong states")
    m, p = qkv.new_empty(2, chunks, heads.v_heads, CHUNK, CHUNK)
    m_rest = torch.empty_like(m) if qkv.itemsize < 4 else None
    vectors = qkv.new_empty(chunks, heads.v_heads, _VECTORS, CHUNK, dtype=torch.float32)
    _chunk_kernel[(heads.v_heads, chunks)](
        qkv,
        *gates,
        m,
        m_rest,
        p,
        vectors,
        packed.chunk_tokens,
        packed.chunk_counts,
        qkv.stride(0),
        gates.a.stride(0),
        gates.b.stride(0),
        heads.k_dim**-0.5,
        L2_EPS,
        K_HEADS=heads.k_heads,
        V_HEADS=heads.v_heads,
        DK=heads.k_dim,
        VECTORS=_VECTORS,
        C=CHUNK,
        PRECISION=PRECISIONS[qkv.dtype],
        BLOCK_K=min(_BLOCK_K, next_power_of_2(heads.k_dim)),
        MOST_BETA=heads.most_beta,
        DIAGONAL=_DIAGONAL,
        HALVES=m_rest is not None,
        num_warps=tiles.first_warps,
        num_stages=1,  # with more, Triton 3.6 multiplies rows of q on an H200 before they have arrived
        maxnreg=tiles.first_registers,
        **pdl_options(qkv),
    )
    _scan_kernel[(heads.v_heads * -(-heads.v_dim // tiles.columns), len(packed.rows))](
        qkv,
        m,
        m_rest,
        p,
        vectors,
        out,
        pool,
        *packed[:5],
        *(saves or (None, None, None)),
        qkv.stride(0),
        pool.stride(0),
        K_HEADS=heads.k_heads,
        V_HEADS=heads.v_heads,
        DK=heads.k_dim,
        VECTORS=_VECTORS,
        C=CHUNK,
        PRECISION=PRECISIONS[qkv.dtype],
        DV=heads.v_dim,
        DK_PADDED=next_power_of_2(heads.k_dim),
        COLUMNS=tiles.columns,
        num_warps=tiles.warps,
        num_stages=_stages(tiles, heads, qkv),
        **pdl_options(qkv),
    )
    return out


delta_prefill = by_device(delta_prefill_triton, delta_prefill_reference, "delta_rule.delta_prefill")
