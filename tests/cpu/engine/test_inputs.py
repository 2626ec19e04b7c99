"""A step's inputs: how they follow from a batch, and how they are padded and staged, for any batch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import inside
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.batch import (
    LAST_SAMPLED,
    NO_SLOT,
    PADDING,
    Batch,
    Column,
    StepKind,
    StepOutput,
    StepSize,
    greedy,
    map_columns,
)
from nanovllm.cuda_graphs.capture import EMPTY_BATCH
from nanovllm.device import Device
from nanovllm.extras.columns import ExtraOutput, LogprobColumns
from nanovllm.kernels.decode_attention import SharedUnit
from nanovllm.parallel.halves import halves
from nanovllm.runner.inputs import (
    ALIGN,
    BatchInputs,
    Staging,
    last_rows,
    prepare_decode,
    prepare_prefill,
)
from nanovllm.shared_prefixes.finder import no_shared_prefixes

BLOCK = 4
UNIT = SharedUnit(3, 8)
LARGEST = StepSize(tokens=60, seqs=6, blocks=8, unit=UNIT.sequences, copies=6)


@st.composite
def batches(draw: st.DrawFn, kind: StepKind) -> Batch:
    """Batches of up to 6 sequences. In prefill each has 1 to 10 new tokens, and up to 32 with cached ones; of
    these the last, partial block may be copied."""
    count = draw(st.integers(1, LARGEST.seqs))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    query_lens = rng.integers(1, 11, count) if kind is StepKind.PREFILL else np.ones(count)
    context_lens = query_lens + rng.integers(0, 22, count)
    width = int(-(-context_lens.max() // BLOCK))
    tables = rng.permutation(1000)[: count * width].reshape(count, width)
    tables[np.arange(width) >= -(-context_lens[:, None] // BLOCK)] = PADDING
    one = np.full(count, 0.5, np.float32)
    sampling = greedy(count)
    if draw(st.booleans()):
        sampling = replace(sampling, temperature=one, seeds=rng.integers(0, 9, count), top_p=one)
    starts = context_lens - query_lens
    copies = [
        (2000 + row, tables[row, start // BLOCK], 0, start % BLOCK)
        for row, start in enumerate(starts.astype(int).tolist())
        if start % BLOCK and kind is StepKind.PREFILL and rng.random() < 0.7
    ]
    return Batch(
        kind=kind,
        seq_ids=tuple(range(count)),
        slots=rng.permutation(LARGEST.seqs)[:count].astype(np.int32),
        token_ids=rng.integers(LAST_SAMPLED, 100, int(query_lens.sum()), dtype=np.int32),
        query_lens=query_lens.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        tables=(tables.astype(np.int32),),
        draws=rng.integers(0, 2, count, dtype=np.int32),
        sampling=replace(sampling, positions=context_lens.astype(np.int32)),
        copies=(np.array(copies, np.int32),) if copies else (),
    )


def staging() -> Staging:
    return Staging(Device("cpu"), LARGEST)


def columns(inputs: BatchInputs[Any]) -> list[tuple[Column, Any]]:
    found: list[tuple[Column, Any]] = []
    map_columns(inputs, lambda column, value: found.append((column, value)))
    return found


def addresses(inputs: BatchInputs[torch.Tensor]) -> list[tuple[int, torch.Size]]:
    return [(tensor.data_ptr(), tensor.shape) for _, tensor in columns(inputs)]


@given(batches(StepKind.PREFILL))
def test_prefill_inputs_of_each_token(batch: Batch) -> None:
    inputs = prepare_prefill(batch, BLOCK)
    want, index = [], 0
    for row, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        for position in range(context - length, context):
            cell = batch.tables[0][row, position // BLOCK] * BLOCK + position % BLOCK
            want.append((batch.token_ids[index], batch.slots[row], position, cell))
            index += 1
        assert inputs.wanted_rows[row] == index - 1
        assert inputs.attention.cu_seqlens_q[row + 1] == index
    found = inputs.token_ids, inputs.token_slots, inputs.positions, inputs.attention.slot_mapping
    assert list(zip(*found, strict=True)) == want
    assert inputs.sample_slots.tolist() == [
        slot if drawn else NO_SLOT for slot, drawn in zip(batch.slots, batch.draws, strict=True)
    ]


@given(batches(StepKind.PREFILL), st.data())
def test_a_sequence_can_draw_several_tokens(batch: Batch, data: st.DataObject) -> None:
    """Each token is drawn after one of the sequence's last tokens, whose hidden states are needed."""
    draws = [data.draw(st.integers(0, length), "draws") for length in batch.query_lens.tolist()]
    ends = np.cumsum(batch.query_lens).tolist()
    want = [row for end, drawn in zip(ends, draws, strict=True) for row in range(end - max(drawn, 1), end)]
    batch = replace(batch, draws=np.array(draws, np.int32))
    assert last_rows(batch.draws, batch.query_lens).tolist() == want
    inputs = prepare_prefill(batch, BLOCK)
    assert inputs.wanted_rows.tolist() == want
    assert inputs.wanted_rows.dtype == np.int32


@given(batches(StepKind.PREFILL))
def test_halves_together_equal_the_batch(batch: Batch) -> None:
    """Cut the batch in the middle. If this splits a sequence, its second part attends to its first part."""
    if len(batch.token_ids) < 2:
        return
    more = tuple(each + np.array([100, 100, 0, 0], np.int32) for each in batch.copies)
    both = batch.tables[0], batch.tables[0] + 100
    batch = replace(batch, tables=both, copies=batch.copies + more)
    inputs = prepare_prefill(batch, BLOCK, halves)
    whole, parts = inputs.attention, inputs.halves
    assert whole.others[0].slot_mapping.tolist() == (whole.slot_mapping + 100 * BLOCK).tolist()
    for half in parts:
        windowed = half.of_group(1)
        assert half.of_group(0) is half
        copied = [None if each.copies is None else each.copies[:, :2].tolist() for each in (half, windowed)]
        assert copied[1] == (copied[0] and [[source + 100, to + 100] for source, to in copied[0]])
        assert half.longest_copy == windowed.longest_copy
        assert windowed.slot_mapping.tolist() == (half.slot_mapping + 100 * BLOCK).tolist()
        assert windowed.block_tables.tolist() == (half.block_tables + 100).tolist()
        assert windowed.context_lens is half.context_lens and windowed.cu_seqlens_q is half.cu_seqlens_q
    copied = [[] if half.copies is None else half.copies.tolist() for half in parts]
    assert [*copied[0], *copied[1]] == (batch.copies[0].tolist() if batch.copies else [])
    first_half = parts[0].block_tables[parts[0].block_tables != PADDING].tolist()
    assert all(target in first_half for _, target, *_ in copied[0]), "a row begins in the other half"
    assert not any(target in first_half for _, target, *_ in copied[1]), "a row has begun in the first half"
    longest = [half.longest_copy for half in parts]
    assert longest == [max((cells for *_, cells in each), default=0) for each in copied]
    assert np.array_equal(np.concatenate([half.slot_mapping for half in parts]), whole.slot_mapping)
    assert len(parts[0].slot_mapping) == len(batch.token_ids) // 2
    cells = []
    for half in parts:
        lens = np.diff(half.cu_seqlens_q)
        assert (lens > 0).all() and half.max_seqlen_q == lens.max()
        assert np.array_equal(np.diff(half.cu_seqlens_k), half.context_lens)
        assert half.max_seqlen_k == half.context_lens.max()
        for length, context, table in zip(lens, half.context_lens, half.block_tables, strict=True):
            positions = np.arange(context - length, context)
            cells.append(table[positions // BLOCK] * BLOCK + positions % BLOCK)
    assert np.array_equal(np.concatenate(cells), whole.slot_mapping)


@given(batches(StepKind.PREFILL))
def test_prefill_inputs_are_staged_unchanged(batch: Batch) -> None:
    inputs = prepare_prefill(batch, BLOCK, halves if len(batch.token_ids) > 1 else None)
    staged = staging().send(inputs)()
    assert (staged.halves is not None) == (len(batch.token_ids) > 1)
    for (column, array), (_, tensor) in zip(columns(inputs), columns(staged), strict=True):
        assert tensor.numpy().dtype == column.dtype and np.array_equal(tensor.numpy(), array)


@given(batches(StepKind.DECODE), st.integers(0, 2), st.booleans())
def test_decode_is_padded_with_rows_that_do_nothing(batch: Batch, more: int, share: bool) -> None:
    """Padding follows the batch's own rows, in all columns, whatever the buffer held before."""
    count = len(batch.slots)
    rows = min(count + more, LARGEST.seqs)
    size = replace(LARGEST, tokens=rows, seqs=rows)
    shared = no_shared_prefixes(count, UNIT) if share else None
    inputs = prepare_decode(batch, BLOCK, shared)
    buffers = staging()
    own, hosts = inside.input_buffers(buffers)
    for buffer in (own, *hosts):
        buffer.fill_(77)
    staged = buffers.send(inputs, size)()
    for (column, array), (_, tensor) in zip(columns(inputs), columns(staged), strict=True):
        assert tensor.shape == column.shape(size)
        padded = np.full(tensor.shape, column.neutral, column.dtype)
        padded[tuple(map(slice, array.shape))] = array
        assert np.array_equal(tensor.numpy(), padded)
    assert (staged.attention.context_lens[count:] == 0).all()
    assert (staged.attention.slot_mapping[count:] == NO_SLOT).all()
    assert (staged.sample_slots[count:] == NO_SLOT).all() and (staged.token_ids[count:] != LAST_SAMPLED).all()
    assert (staged.sampling.temperature[count:] == 0).all()


@given(batches(StepKind.DECODE), st.booleans())
def test_a_graph_finds_its_inputs_where_it_was_captured(batch: Batch, share: bool) -> None:
    """The addresses depend only on the size and the optional parts."""
    buffers, size = staging(), replace(LARGEST, tokens=LARGEST.seqs)
    nothing = no_shared_prefixes(0, UNIT) if share else None
    empty = prepare_decode(EMPTY_BATCH, BLOCK, nothing, max_seqlen_k=32)
    captured = addresses(buffers.send(empty, size)())
    shared = no_shared_prefixes(len(batch.slots), UNIT) if share else None
    assert addresses(buffers.send(prepare_decode(batch, BLOCK, shared), size)()) == captured


@given(
    st.builds(
        StepSize,
        tokens=st.integers(1, 300),
        seqs=st.integers(1, 300),
        blocks=st.integers(1, 40),
        unit=st.integers(0, 64),
        copies=st.integers(0, 50),
    )
)
def test_every_step_up_to_the_largest_fits(size: StepSize) -> None:
    """With all optional parts, each column has its own aligned part of the buffer."""
    size = replace(size, tokens=max(size.tokens, size.seqs))

    def full(column: Column, _: Any) -> np.ndarray:
        return np.ones(column.shape(size), column.dtype)

    count = 2
    batch = replace(
        EMPTY_BATCH,
        slots=np.arange(count),
        token_ids=np.ones(count, np.int32),
        query_lens=np.ones(count, np.int32),
        context_lens=np.ones(count, np.int32),
        tables=(np.ones((count, 1), np.int32),) * 3,
        draws=np.ones(count, np.int32),
        sampling=greedy(count),
        copies=(np.array([[2, 1, 0, 1]], np.int32),) * 3,
    )
    inputs = prepare_prefill(batch, BLOCK, halves)
    states = np.ones(1, np.int32)
    attention = replace(inputs.attention, shared=no_shared_prefixes(count, UNIT), states=states)
    inputs = replace(inputs, attention=attention)
    assert all(getattr(inputs.attention, field.name) is not None for field in fields(inputs.attention))
    assert all(getattr(inputs, field.name) is not None for field in fields(inputs))
    buffers = Staging(Device("cpu"), size, groups=3)
    staged = buffers.send(map_columns(inputs, full))()
    buffer, _ = inside.input_buffers(buffers)
    end = buffer.data_ptr()
    for column, tensor in columns(staged):
        assert tensor.shape == column.shape(size) and (tensor == 1).all()
        if tensor.numel():
            assert tensor.data_ptr() >= end and (tensor.data_ptr() - buffer.data_ptr()) % ALIGN == 0
            end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    assert end <= buffer.data_ptr() + buffer.nbytes


def test_outputs_have_their_own_memory() -> None:
    """Sequences keep outputs; if these were pinned, every step would allocate more pinned memory."""
    shown = LogprobColumns(torch.rand(3, 6), torch.arange(18).view(3, 6), torch.arange(3))
    given_tensors = StepOutput(torch.arange(3)[:, None], ExtraOutput(shown, shown), torch.rand(3, 8))
    handle = staging().receive(given_tensors)
    output, fetched = handle.result(), handle.tensors
    assert output.token_ids[:, 0].tolist() == [0, 1, 2]
    pairs = [(getattr(output.extras, each), getattr(fetched.extras, each)) for each in ("logprobs", "scores")]
    for found, tensors in pairs:
        for name in ("values", "token_ids", "ranks"):
            tensor = getattr(tensors, name)
            array = getattr(found, name)
            assert np.array_equal(array, getattr(shown, name)) and not np.shares_memory(array, tensor.numpy())
    assert np.array_equal(output.pooled, given_tensors.pooled)
    assert not np.shares_memory(output.pooled, fetched.pooled.numpy())
