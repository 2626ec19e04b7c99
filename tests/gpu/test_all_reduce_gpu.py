"""The compiled all-reduce kernel: ranks on streams of one GPU really wait for each other."""

from __future__ import annotations

import inside
import pytest
import torch
from copying_ranks import make_copying_ranks

from nanovllm.device import Device
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
from nanovllm.parallel.kernels.copied_sum import CALLS

pytestmark = pytest.mark.gpu
MAX_ROWS = 24  # the programs of all ranks fit on the GPU at once


def make_group(size: int, n: int) -> tuple[list[Peers], list[torch.Tensor]]:
    """The Peers of each rank, and all buffers, which must stay alive."""

    def buffers(*shape: int) -> torch.Tensor:
        return torch.empty(size, TURNS, *shape, MAX_ROWS, (n + 7) // 8 * 8, dtype=torch.int16, device="cuda")

    slots, sums = buffers(size - 1), buffers()
    addresses = [
        torch.tensor([buffer.data_ptr() for buffer in part], device="cuda") for part in (slots, sums)
    ]
    views = []
    for rank in range(size):
        turns = torch.zeros(MAX_ROWS, dtype=torch.int32, device="cuda")
        aborted = torch.zeros(1, dtype=torch.int32, device="cuda")
        views.append(Peers(rank, size, *addresses, turns, aborted, (n + 7) // 8 * 16))
    return views, [slots, sums]


def load_kernels(views: list[Peers], buffers: list[torch.Tensor], x: torch.Tensor) -> None:
    """Run each rank's kernels once without waiting: loading a kernel may wait for kernels that wait for
    others.
    """
    for peers in views:
        peers.aborted.fill_(1)
        for two_shot in (False, True):
            all_reduce_triton(peers, x, two_shot)
            all_reduce_triton(peers, x[:, :100].float(), two_shot)
            all_reduce_add_rms_norm_triton(peers, x, x, x[0], 1e-6, two_shot)
        peers.aborted.zero_()
        peers.turns.zero_()
    for buffer in buffers:
        buffer.fill_(EMPTY)
    torch.cuda.synchronize()


@pytest.mark.parametrize("shots", [(1,), (2,), (1, 2, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("n", [1024, 4096, 5120, 1000])
def test_ranks_on_streams(size: int, n: int, shots: tuple[int, ...]) -> None:
    views, buffers = make_group(size, n)
    load_kernels(views, buffers, torch.ones(1, n, dtype=torch.bfloat16, device="cuda"))
    streams = [torch.cuda.Stream() for _ in range(size)]
    weight = torch.randn(n, device="cuda").bfloat16()
    for rows in (1, 3, MAX_ROWS, 2, MAX_ROWS):
        steps = []  # [step][rank]
        for step in range(8):
            shape, dtype = ((rows, n), torch.bfloat16) if step % 4 else ((rows, 100), torch.float32)
            steps.append([torch.randn(shape, device="cuda").to(dtype) for _ in range(size)])
            bits = steps[-1][0].view(torch.int16 if step % 4 else torch.int32)
            bits[:, ::5] = EMPTY_BY_SIZE[bits.element_size()]
        residual = torch.randn(rows, n, device="cuda").bfloat16()
        torch.cuda.synchronize()
        results: list[list] = [[] for _ in range(size)]
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for step, xs in enumerate(steps):
                    peers, two_shot = views[rank], shots[step % len(shots)] == 2
                    if step % 4 > 1:
                        result = all_reduce_add_rms_norm_triton(
                            peers, xs[rank], residual, weight, 1e-6, two_shot
                        )
                    else:
                        result = (all_reduce_triton(peers, xs[rank], two_shot),)
                    # Copy with a kernel without programmatic dependent launch. Otherwise the kernels of all
                    # steps would start and fill the GPU, which the ranks share, with waiting programs.
                    results[rank].append(tuple(part.clone() for part in result))
        torch.cuda.synchronize()
        for step, xs in enumerate(steps):
            if step % 4 > 1:
                expected = all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6)
            else:
                expected = (all_reduce_reference(xs),)
            for rank in range(size):
                torch.testing.assert_close(results[rank][step], expected, atol=0.05, rtol=0.02)
                for one, first in zip(results[rank][step], results[0][step], strict=True):
                    assert torch.equal(one.view(torch.int16), first.view(torch.int16)), "ranks differ"


def test_an_abort_ends_a_wait() -> None:
    views, buffers = make_group(2, 1024)
    x = torch.ones(3, 1024, dtype=torch.bfloat16, device="cuda")
    load_kernels(views, buffers, x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        all_reduce_triton(views[0], x)  # no other rank comes
    assert not stream.query()
    views[0].aborted.fill_(1)
    stream.synchronize()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("n", [1000, 5120])
def test_copied_rows_on_streams(size: int, n: int) -> None:
    """Each rank is queued as a whole, so earlier ranks wait for later ones. Two sums are in progress at any
    time.
    """
    ranks = make_copying_ranks(MAX_ROWS, n, [Device("cuda")] * size, torch.bfloat16)
    weight = torch.randn(n, device="cuda").bfloat16()
    for rank in ranks:  # loading a kernel may wait for kernels that wait
        inside.aborted(rank).fill_(1)
        x = weight[None].expand(MAX_ROWS, n).contiguous()
        rank.start(x, x, weight, 1e-6, whole=True).finish()
        torch.cuda.synchronize()
    for rank in ranks:
        inside.aborted(rank).zero_()
        inside.set_copied_sums(rank, None, CALLS - 5)
    streams = [torch.cuda.Stream() for _ in ranks]
    calls = []  # (a tensor of each rank, residual, whole rows or not)
    for rows in (MAX_ROWS, 1, 7, MAX_ROWS, 3, 4, 5, MAX_ROWS, 2, 6):
        xs = [torch.randn(rows, n, device="cuda").bfloat16() for _ in ranks]
        calls.append((xs, torch.randn(rows, n, device="cuda").bfloat16(), rows % 3 == 0))
    torch.cuda.synchronize()
    results: list[list] = [[] for _ in ranks]
    for rank, (copies, stream) in enumerate(zip(ranks, streams, strict=True)):
        with torch.cuda.stream(stream):
            last = None
            for call in [*calls, None]:
                pending = None
                if call is not None:
                    pending = copies.start(call[0][rank], call[1], weight, 1e-6, call[2])
                if last is not None:
                    last.advance()
                    results[rank].append([result.clone() for result in last.finish()])
                last = pending
    torch.cuda.synchronize()
    for call, (xs, residual, whole) in enumerate(calls):
        normed, total = all_reduce_add_rms_norm_reference(xs, residual, weight, 1e-6)
        for rank in range(size):
            rows = len(total)
            own = slice(None) if whole else slice(rows * rank // size, rows * (rank + 1) // size)
            assert torch.equal(results[rank][call][1], total[own]), (call, rank)
            torch.testing.assert_close(results[rank][call][0], normed, atol=0.02, rtol=0.02)
            assert torch.equal(results[rank][call][0], results[0][call][0])
