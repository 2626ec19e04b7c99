"""The one-shot all-reduce kernel in Triton's interpreter, one rank at a time: the others have been there."""

from __future__ import annotations

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

pytestmark = pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs the compiled kernel")
SPARE_ROWS = 3


class Group:
    """All ranks' memory in one process."""

    def __init__(self, size: int, rows: int, n: int, dtype: torch.dtype) -> None:
        self.rows = [torch.full((rows + SPARE_ROWS, n), float("nan"), dtype=dtype) for _ in range(size)]
        self.flags = [torch.zeros(rows + SPARE_ROWS, size, dtype=torch.int32) for _ in range(size)]
        self.peers = [
            Peers(
                rank,
                size,
                torch.tensor([place.data_ptr() for place in self.rows]),
                torch.tensor([flags.data_ptr() for flags in self.flags]),
                torch.zeros(rows + SPARE_ROWS, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
            )
            for rank in range(size)
        ]

    def let_others_come(self, rank: int, xs: list[torch.Tensor], call: int) -> None:
        """Do what all ranks but `rank` do before they wait."""
        for other, x in enumerate(xs):
            if other != rank:
                self.rows[other][: len(x)] = x
                self.flags[rank][: len(x), other] = call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "rows", "n"), [(2, 3, 48), (4, 1, 100), (8, 5, 16), (2, 1, 1000)])
def test_every_rank_gets_the_sum(size: int, rows: int, n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size * n)
    group = Group(size, rows, n, dtype)
    weight, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((n,), (rows, n)))
    for call in (1, 3):
        xs = [torch.randn(rows, n, generator=generator).to(dtype) for _ in range(size)]
        results = []
        for rank, peers in enumerate(group.peers):
            group.let_others_come(rank, xs, call)
            total = all_reduce_triton(peers, xs[rank])
            torch.testing.assert_close(total, all_reduce_reference(xs))
            group.let_others_come(rank, xs, call + 1)
            both = all_reduce_add_rms_norm_triton(peers, xs[rank], residual, weight, 1e-6)
            torch.testing.assert_close(both, all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6))
            results.append((total, *both))
            assert peers.calls.tolist() == [call + 1] * rows + [0] * SPARE_ROWS
            for flags in group.flags:  # raised at every rank, in the rows that were summed
                assert flags[:, rank].tolist() == [call + 1] * rows + [0] * SPARE_ROWS
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_an_aborted_group_does_not_wait() -> None:
    group = Group(2, 2, 32, torch.float32)
    group.peers[0].aborted.fill_(1)
    assert all_reduce_triton(group.peers[0], torch.ones(2, 32)).shape == (2, 32)
    assert all_reduce_triton(group.peers[0], torch.ones(0, 32)).shape == (0, 32)
