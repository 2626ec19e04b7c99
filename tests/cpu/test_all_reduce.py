"""The all-reduce kernel in Triton's interpreter, one rank at a time: the others have been there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nanovllm.kernels.all_reduce import (
    Peers,
    all_reduce_add_rms_norm_reference,
    all_reduce_add_rms_norm_triton,
    all_reduce_reference,
    all_reduce_triton,
)
from nanovllm.kernels.compat import INTERPRET
from nanovllm.kernels.copied_sum import CALLS, copied_sum_add_rms_norm_triton

pytestmark = pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs the compiled kernel")
SPARE_ROWS = 3


class Group:
    """All ranks' memory in one process."""

    def __init__(self, size: int, rows: int, n: int, dtype: torch.dtype) -> None:
        max_rows = rows + SPARE_ROWS
        self.slots = [torch.full((size - 1, max_rows, n), float("nan"), dtype=dtype) for _ in range(size)]
        self.sums = [torch.full((max_rows, n), float("nan"), dtype=dtype) for _ in range(size)]
        self.flags = [torch.zeros(max_rows, size, dtype=torch.int32) for _ in range(size)]
        addresses = [
            torch.tensor([room.data_ptr() for room in rooms]) for rooms in (self.slots, self.sums, self.flags)
        ]
        self.peers = [
            Peers(
                rank,
                size,
                *addresses,
                torch.zeros(max_rows, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
            )
            for rank in range(size)
        ]

    def let_others_come(self, rank: int, xs: list[torch.Tensor], call: int, two_shot: bool) -> None:
        """Do what the other ranks do before `rank` needs it."""
        for other, x in enumerate(xs):
            if other == rank:
                continue
            for row in range(len(x)):
                owner = row % len(xs)
                if not two_shot or owner == rank:
                    self.slots[rank][(other - rank - 1) % len(xs), row] = x[row]
                    self.flags[rank][row, other] = call
                elif owner == other:
                    self.sums[rank][row] = all_reduce_reference([x[row] for x in xs])
                    self.flags[rank][row, other] = call


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("size", "rows", "n"), [(2, 3, 48), (4, 1, 100), (8, 5, 16), (2, 1, 1000), (4, 9, 64)]
)
def test_every_rank_gets_the_sum(size: int, rows: int, n: int, dtype: torch.dtype, two_shot: bool) -> None:
    generator = torch.Generator().manual_seed(size * n)
    group = Group(size, rows, n, dtype)
    weight, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((n,), (rows, n)))
    for call in (1, 3):
        xs = [torch.randn(rows, n, generator=generator).to(dtype) for _ in range(size)]
        results = []
        for rank, peers in enumerate(group.peers):
            group.let_others_come(rank, xs, call, two_shot)
            total = all_reduce_triton(peers, xs[rank], two_shot)
            torch.testing.assert_close(total, all_reduce_reference(xs))
            group.let_others_come(rank, xs, call + 1, two_shot)
            both = all_reduce_add_rms_norm_triton(peers, xs[rank], residual, weight, 1e-6, two_shot)
            torch.testing.assert_close(both, all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6))
            results.append((total, *both))
            assert peers.calls.tolist() == [call + 1] * rows + [0] * SPARE_ROWS
            for other, flags in enumerate(group.flags):  # raised where this rank's rows or sums are awaited
                raised = [
                    call + 1 if other != rank and (not two_shot or row % size in (rank, other)) else 0
                    for row in range(rows)
                ]
                assert flags[:, rank].tolist() == raised + [0] * SPARE_ROWS
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("size", "rows", "n"), [(2, 3, 48), (4, 1, 100), (4, 5, 16)])
@pytest.mark.parametrize("call", [0, 1, CALLS - 1])
def test_rows_that_the_others_copied(size: int, rows: int, n: int, call: int) -> None:
    """Whether their flags stand at this call or are ahead, also past the last number."""
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
        flags[rank] = (call - 1) % CALLS  # nobody waits for itself
        aborted = torch.zeros(1, dtype=torch.int32)
        inputs = (xs[rank], residual, weight, 1e-6, slots, flags, aborted, rank, call)
        torch.testing.assert_close(copied_sum_add_rms_norm_triton(*inputs), expected)


def test_copied_rows_are_waited_for() -> None:
    """Until all flags have come, or the group is aborted, which gives garbage."""
    xs = [torch.full((2, 16), float(rank + 1)) for rank in range(4)]
    weight, residual = torch.ones(16), torch.zeros(2, 16)
    expected = all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6)
    for abort in (False, True):
        slots, flags = torch.zeros(3, 2, 16), torch.full((4,), CALLS - 1, dtype=torch.int32)
        aborted, results = torch.zeros(1, dtype=torch.int32), []

        def run(slots: Any = slots, flags: Any = flags, aborted: Any = aborted, out: list = results) -> None:
            inputs = (xs[1], residual, weight, 1e-6, slots, flags, aborted, 1, 0)
            out.append(copied_sum_add_rms_norm_triton(*inputs))

        thread = threading.Thread(target=run)
        thread.start()
        for rank in (2, 3):  # all but one
            slots[(rank - 2) % 4] = xs[rank]
            flags[rank] = 0
        thread.join(0.3)
        assert thread.is_alive()
        if abort:
            aborted.fill_(1)
        else:
            slots[2] = xs[0]
            flags[0] = 0
        thread.join(60)
        assert not thread.is_alive()
        if abort:
            torch.testing.assert_close(results[0][1], xs[1] + xs[2] + xs[3])
        else:
            torch.testing.assert_close(results[0], expected)


def test_an_aborted_group_does_not_wait() -> None:
    group = Group(2, 2, 32, torch.float32)
    group.peers[0].aborted.fill_(1)
    assert all_reduce_triton(group.peers[0], torch.ones(2, 32)).shape == (2, 32)
    assert all_reduce_triton(group.peers[0], torch.ones(0, 32)).shape == (0, 32)
