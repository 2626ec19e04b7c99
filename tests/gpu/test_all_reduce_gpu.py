"""The all-reduce kernel compiled: ranks that share one GPU, on streams of their own, truly wait."""

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

pytestmark = pytest.mark.gpu
MAX_ROWS = 24  # all ranks' programs fit the GPU at once


def make_group(size: int, n: int) -> tuple[list[list[Peers]], list[list[torch.Tensor]]]:
    """Each rank's view of both sets of slots; and the ranks' slots, sums and flags, which must stay alive."""

    def filled(*shape: int) -> list[torch.Tensor]:
        return [torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(size)]

    def addresses(rooms: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([room.data_ptr() for room in rooms], device="cuda")

    slots, sums = filled(2, size - 1, MAX_ROWS, n), filled(MAX_ROWS, n)
    flags = [torch.zeros(MAX_ROWS, size, dtype=torch.int32, device="cuda") for _ in range(size)]
    views = []
    for rank in range(size):
        calls = torch.zeros(MAX_ROWS, dtype=torch.int32, device="cuda")
        aborted = torch.zeros(1, dtype=torch.int32, device="cuda")
        shared = addresses(sums), addresses(flags), calls, aborted
        views.append([Peers(rank, size, addresses([s[turn] for s in slots]), *shared) for turn in range(2)])
    return views, [slots, sums, flags]


def load_kernels(views: list[list[Peers]], alive: list[list[torch.Tensor]], x: torch.Tensor) -> None:
    """Run each rank's kernels once without waiting: loading one can wait for kernels that wait for others."""
    for peers, _ in views:
        peers.aborted.fill_(1)
        for two_shot in (False, True):
            all_reduce_triton(peers, x, two_shot)
            all_reduce_add_rms_norm_triton(peers, x, x, x[0], 1e-6, two_shot)
        peers.aborted.zero_()
        peers.calls.zero_()
    for flags in alive[2]:
        flags.zero_()
    torch.cuda.synchronize()


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("n", [1024, 4096, 5120, 1000])
def test_ranks_on_streams(size: int, n: int, two_shot: bool) -> None:
    views, alive = make_group(size, n)
    load_kernels(views, alive, torch.ones(1, n, dtype=torch.bfloat16, device="cuda"))
    streams = [torch.cuda.Stream() for _ in range(size)]
    weight = torch.randn(n, device="cuda").bfloat16()
    for rows in (1, 3, MAX_ROWS, 2):
        steps = [
            [torch.randn(rows, n, device="cuda").bfloat16() for _ in range(size)] for _ in range(7)
        ]  # [step][rank]
        residual = torch.randn(rows, n, device="cuda").bfloat16()
        torch.cuda.synchronize()
        results: list[list] = [[] for _ in range(size)]
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for step, xs in enumerate(steps):
                    peers = views[rank][step % 2]
                    if step % 3:
                        result = all_reduce_add_rms_norm_triton(
                            peers, xs[rank], residual, weight, 1e-6, two_shot
                        )
                    else:
                        result = (all_reduce_triton(peers, xs[rank], two_shot),)
                    results[rank].append(result)
                views[rank].reverse()  # seven steps: the next one takes the other place
        torch.cuda.synchronize()
        for step, xs in enumerate(steps):
            if step % 3:
                expected = all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6)
            else:
                expected = (all_reduce_reference(xs),)
            for rank in range(size):
                torch.testing.assert_close(results[rank][step], expected, atol=0.05, rtol=0.02)
                for one, first in zip(results[rank][step], results[0][step], strict=True):
                    assert torch.equal(one, first), "ranks differ"


def test_an_abort_ends_a_wait() -> None:
    views, alive = make_group(2, 1024)
    x = torch.ones(3, 1024, dtype=torch.bfloat16, device="cuda")
    load_kernels(views, alive, x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        all_reduce_triton(views[0][0], x)  # nobody comes
    assert not stream.query()
    views[0][0].aborted.fill_(1)
    stream.synchronize()
