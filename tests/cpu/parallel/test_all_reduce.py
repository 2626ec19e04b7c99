"""The all-reduce kernel in Triton's interpreter, one rank at a time; the test writes the others' rows."""

from __future__ import annotations

import random
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
from copying_ranks import (
    CopyingDevice,
    copied_sum_add_rms_norm_reference,
    make_copying_ranks,
    run_late_ranks,
)

from nanovllm.kernels.compat import INTERPRET
from nanovllm.parallel.kernels.all_reduce import (
    EMPTY,
    EMPTY_BY_SIZE,
    TURNS,
    Peers,
    all_reduce_add_rms_norm_reference,
    all_reduce_add_rms_norm_triton,
    all_reduce_reference,
    all_reduce_triton,
)
from nanovllm.parallel.kernels.copied_sum import (
    CALLS,
    Arrival,
    await_copies_triton,
    copied_sum_add_rms_norm_triton,
)
from nanovllm.parallel.peer_memory import PeerCopies, PendingSum

pytestmark = pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs the compiled kernel")
SPARE_ROWS = 3
_INTS = {torch.float16: torch.int16, torch.float32: torch.int32}


class Awaited(NamedTuple):
    """A row that rank `other` writes into a buffer of the waiting rank."""

    other: int
    buffer: torch.Tensor
    row: torch.Tensor


class Group:
    """The memory of all ranks in one process; its buffer rows are longer than the data."""

    def __init__(self, size: int, rows: int, n: int, dtype: torch.dtype, sums: bool = True) -> None:
        max_rows, row_bytes = rows + SPARE_ROWS, (n * dtype.itemsize + 31) // 16 * 16

        def buffers(*shape: int) -> list[torch.Tensor]:
            words = torch.full((size, *shape, max_rows, row_bytes // 2), EMPTY, dtype=torch.int16)
            return list(words.view(dtype))

        self.slots, self.sums = buffers(TURNS, size - 1), buffers(TURNS)  # by rank
        addresses = [
            torch.tensor([buffer.data_ptr() for buffer in buffers]) for buffers in (self.slots, self.sums)
        ]
        self.peers = [
            Peers(
                rank,
                size,
                addresses[0],
                addresses[1] if sums else None,
                torch.zeros(max_rows, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
                row_bytes,
            )
            for rank in range(size)
        ]

    def awaited(self, rank: int, xs: list[torch.Tensor], two_shot: bool) -> list[Awaited]:
        """The rows that the other ranks write into `rank`'s buffers in the next call."""
        found, n = [], xs[0].shape[1]
        for other, x in enumerate(xs):
            for row in range(len(x)):
                owner, turn = row % len(xs), int(self.peers[rank].turns[row])
                if other != rank and (not two_shot or owner == rank):
                    buffer = self.slots[rank][turn, (other - rank - 1) % len(xs), row]
                    found.append(Awaited(other, buffer.view(x.dtype)[:n], x[row]))
                elif other != rank and owner == other:
                    total = all_reduce_reference([x[row] for x in xs])
                    found.append(Awaited(other, self.sums[rank][turn, row].view(x.dtype)[:n], total))
        return found

    def let_others_come(self, rank: int, xs: list[torch.Tensor], two_shot: bool) -> None:
        """Check what the ranks before `rank` sent, and write the rows of the ranks after it."""
        empty = EMPTY_BY_SIZE[xs[0].element_size()]
        for other, buffer, row in self.awaited(rank, xs, two_shot):
            bits = buffer.view(_INTS[row.dtype])
            if other < rank:
                torch.testing.assert_close(buffer, row)
                assert not (bits == empty).any()
            else:
                buffer.copy_(row)
                bits.masked_fill_(bits == empty, 0)

    def check_emptied(self, rank: int, rows: int) -> None:
        """Check that the first `rows` rows hold nothing of the call before the last one."""
        for row in range(rows):
            turn = (int(self.peers[rank].turns[row]) - 2) % TURNS
            for buffer in (self.slots[rank][turn, :, row], self.sums[rank][turn, row]):
                assert (buffer.view(torch.int16) == EMPTY).all()


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("size", "rows", "n"), [(2, 3, 48), (4, 1, 100), (8, 5, 16), (2, 1, 1000), (4, 9, 64)]
)
def test_every_rank_gets_the_sum(size: int, rows: int, n: int, dtype: torch.dtype, two_shot: bool) -> None:
    generator = torch.Generator().manual_seed(size * n)
    group = Group(size, rows, n, dtype)
    weight, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((n,), (rows, n)))
    for call in range(2 * TURNS):
        xs = [torch.randn(rows, n, generator=generator).to(dtype) for _ in range(size)]
        for x in xs[call % 2 :]:  # the value that marks an empty buffer, also in some of the sums
            x.view(_INTS[dtype])[:, ::3] = EMPTY_BY_SIZE[dtype.itemsize]
        results = []
        for rank, peers in enumerate(group.peers):
            group.let_others_come(rank, xs, two_shot)
            if call % 2:
                result = (all_reduce_triton(peers, xs[rank], two_shot),)
                torch.testing.assert_close(result[0], all_reduce_reference(xs))
            else:
                result = all_reduce_add_rms_norm_triton(peers, xs[rank], residual, weight, 1e-6, two_shot)
                torch.testing.assert_close(
                    result, all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6)
                )
            results.append(result)
            assert peers.turns.tolist() == [(call + 1) % TURNS] * rows + [0] * SPARE_ROWS
            group.check_emptied(rank, rows)
        for result in results[1:]:
            for one, first in zip(result, results[0], strict=True):
                assert torch.equal(one.view(_INTS[dtype]), first.view(_INTS[dtype])), "ranks differ"


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_other_kinds_in_the_same_buffers(size: int) -> None:
    """Buffers alternate for all shapes: shorter rows of another dtype, fewer rows, one and two shots."""
    group = Group(size, 4, 64, torch.float16, sums=size > 2)
    kinds = [(4, 64, torch.float16), (2, 20, torch.float32), (3, 1, torch.float32), (4, 64, torch.float16)]
    for call in range(12):
        rows, n, dtype = kinds[call % 4]
        two_shot = size > 2 and call % 5 in (0, 3)
        xs = [torch.randn(rows, n).to(dtype) for _ in range(size)]
        for rank, peers in enumerate(group.peers):
            group.let_others_come(rank, xs, two_shot)
            torch.testing.assert_close(all_reduce_triton(peers, xs[rank], two_shot), all_reduce_reference(xs))
            group.check_emptied(rank, rows)


@pytest.mark.parametrize("abort", [False, True])
def test_rows_are_waited_for(abort: bool) -> None:
    """A rank waits until it has all rows, or until the group is aborted."""
    xs = [torch.full((2, 16), float(rank + 1)) for rank in range(4)]
    group = Group(4, 2, 16, torch.float32)
    awaited, results = group.awaited(1, xs, False), []

    def run() -> None:
        results.append(all_reduce_triton(group.peers[1], xs[1]))

    thread = threading.Thread(target=run)
    thread.start()
    for _, buffer, row in awaited[:-1]:
        buffer.copy_(row)
    _, buffer, row = awaited[-1]
    buffer[:15].copy_(row[:15])  # all but one element
    thread.join(0.3)
    assert thread.is_alive()
    if abort:
        group.peers[1].aborted.fill_(1)
    else:
        buffer.copy_(row)
    thread.join(60)
    assert not thread.is_alive()
    assert abort or torch.equal(results[0], torch.full((2, 16), 10.0))


@pytest.mark.parametrize(("size", "rows", "n"), [(2, 3, 48), (4, 1, 100), (4, 5, 16)])
@pytest.mark.parametrize("call", [0, 1, CALLS - 1])
def test_rows_that_the_others_copied(size: int, rows: int, n: int, call: int) -> None:
    """The flags of the other ranks equal this call or are ahead of it, also after they wrap around."""
    generator = torch.Generator().manual_seed(n)
    weight, residual = torch.randn(n, generator=generator), torch.randn(rows, n, generator=generator)
    xs = [torch.randn(rows, n, generator=generator) for _ in range(size)]
    expected = all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6)
    for rank in range(size):
        slots = torch.full((size - 1, rows + SPARE_ROWS, n), float("nan"))
        flags = torch.empty(size, dtype=torch.int32)
        for other in range(size):
            flags[other] = (call + other % 2) % CALLS
            if other != rank:
                slots[(other - rank - 1) % size, :rows] = xs[other]
        flags[rank] = (call - 1) % CALLS  # a rank does not wait for itself
        aborted = torch.zeros(1, dtype=torch.int32)
        arrival = Arrival(rank, flags, aborted, call)
        await_copies_triton(arrival)
        results = torch.empty(rows, n), torch.empty(rows, n)
        copied_sum_add_rms_norm_triton(xs[rank], residual, weight, 1e-6, slots, arrival, *results)
        torch.testing.assert_close(results, expected)
        references = torch.empty(rows, n), torch.empty(rows, n)
        copied_sum_add_rms_norm_reference(xs[rank], residual, weight, 1e-6, slots, arrival, *references)
        torch.testing.assert_close(references, expected)


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("adds", [True, False])
def test_copied_rows_are_waited_for(adds: bool, abort: bool) -> None:
    """A rank waits until all flags are set, or until the group is aborted; then the result is undefined."""
    xs = [torch.full((2, 16), float(rank + 1)) for rank in range(4)]
    weight, residual = torch.ones(16), torch.zeros(2, 16)
    slots, flags = torch.zeros(3, 2, 16), torch.full((4,), CALLS - 1, dtype=torch.int32)
    arrival = Arrival(1, flags, torch.zeros(1, dtype=torch.int32), 0)
    results = torch.empty(2, 16), torch.empty(2, 16)

    def run() -> None:
        if adds:
            copied_sum_add_rms_norm_triton(xs[1], residual, weight, 1e-6, slots, arrival, *results)
        else:
            await_copies_triton(arrival)

    thread = threading.Thread(target=run, daemon=True)  # daemon, so that a failing test ends
    thread.start()
    for rank in (2, 3):  # all but one
        slots[(rank - 2) % 4] = xs[rank]
        flags[rank] = 0
    thread.join(0.3)
    assert thread.is_alive()
    if abort:
        arrival.aborted.fill_(1)
    else:
        slots[2] = xs[0]
        flags[0] = 0
    thread.join(60)
    assert not thread.is_alive()
    if adds and abort:
        torch.testing.assert_close(results[1], xs[1] + xs[2] + xs[3])
    elif adds:
        torch.testing.assert_close(results, all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6))


def test_an_aborted_group_does_not_wait() -> None:
    group = Group(2, 2, 32, torch.float32)
    group.peers[0].aborted.fill_(1)
    assert all_reduce_triton(group.peers[0], torch.ones(2, 32)).shape == (2, 32)
    assert all_reduce_triton(group.peers[0], torch.ones(0, 32)).shape == (0, 32)


@pytest.mark.parametrize(("size", "rows"), [(2, 5), (4, 9), (4, 16), (4, 3), (8, 11)])
def test_sums_of_copied_rows(size: int, rows: int) -> None:
    """Two sums are in progress at any time, in all buffers and after a wrap-around; ranks come in any order.

    Three sums in turn add to one residual stream, of which each rank keeps its own rows. The last sum gives
    whole rows.
    """
    n, order = 16, random.Random(size)
    ranks = make_copying_ranks(16, n, [CopyingDevice()] * size, torch.float32)
    weight, generator = torch.ones(n), torch.Generator().manual_seed(rows)
    under_way: list[tuple[dict[int, PendingSum], Any, bool]] = []
    # The whole stream, and each rank's part of it.
    streams: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for call in range(12):
        xs = [torch.randn(rows, n, generator=generator) for _ in range(size)]
        if call % 6 < 2:
            residual = torch.randn(rows, n, generator=generator)
            streams.append((residual, [residual] * size))
        residual, residuals = streams.pop(0)
        whole = call % 6 > 3
        sums = {}
        for rank in order.sample(range(size), size):
            sums[rank] = ranks[rank].start(xs[rank], residuals[rank], weight, 1e-6, whole)
        under_way.append((sums, all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6), whole))
        for rank in order.sample(range(size), size):
            sums[rank].advance()
            sums[rank].advance()
        if call % 6 == 0:
            continue
        for _ in range(1 + (call % 6 == 5)):
            sums, expected, whole = under_way.pop(0)
            for rank in order.sample(range(size), size):
                sums[rank].finish()
            results = [sums[rank].finish() for rank in range(size)]
            for rank, result in enumerate(results):
                own = slice(None) if whole else slice(rows * rank // size, rows * (rank + 1) // size)
                torch.testing.assert_close(result, (expected[0], expected[1][own]))
            if not whole:
                streams.append((expected[1], [total for _, total in results]))


@pytest.mark.parametrize("size", [2, 4])
def test_no_row_comes_before_the_last_one_in_its_place_was_used(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reuses a buffer only after its last row was read: delayed copies and one slow rank. One set of
    buffers instead of two would fail.

    The input of a sum may be overwritten as soon as the sum is complete.
    """
    rows, n, calls = 16, 8, 40
    xs = [[torch.randint(-8, 8, (rows, n)).float() for _ in range(size)] for _ in range(calls)]
    weight = torch.ones(n)

    def run(rank: int, copies: PeerCopies) -> list[torch.Tensor]:
        """Like the two halves of a prefill step: each half uses its sum before it starts the next one."""
        rng = random.Random(100 + rank)
        slowness = 0.006 if rank == 1 else 0.001
        under_way: list[tuple[torch.Tensor, PendingSum]] = []
        found: list[torch.Tensor] = []
        residual = torch.zeros(rows, n)
        for x in xs:
            if len(under_way) == 2:
                summed, pending = under_way.pop(0)
                normed, residual = pending.finish()
                summed.fill_(float("nan"))
                time.sleep(rng.uniform(0.0, slowness))
                found.append(normed.clone())
                under_way[0][1].advance()
            time.sleep(rng.uniform(0.0, slowness))
            residual = residual if len(found) % 2 else torch.zeros(rows, n)
            own = x[rank].clone()
            under_way.append((own, copies.start(own, residual, weight, 1e-6, False)))
        return found

    results = run_late_ranks(monkeypatch, size, rows, n, run)
    totals: list[torch.Tensor] = []
    for call, parts in enumerate(xs):
        count = max(0, call - 1)  # results that were complete when it began
        before = totals[call - 2] if count % 2 else torch.zeros(rows, n)
        normed, total = all_reduce_add_rms_norm_reference(parts, before, weight, 1e-6)
        totals.append(total)
        for rank in range(size):
            assert len(results[rank]) == calls - 2
            assert call >= calls - 2 or torch.equal(results[rank][call], normed), (call, rank)
