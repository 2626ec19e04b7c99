"""Ranks in one process that copy rows to each other: at once or delayed on a CPU, or on streams of a GPU."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import inside
import pytest
import torch
from threads import in_threads

from nanovllm.parallel import peer_memory
from nanovllm.parallel.kernels.all_reduce import all_reduce_add_rms_norm_reference
from nanovllm.parallel.kernels.copied_sum import CALLS, Arrival
from nanovllm.parallel.peer_memory import PeerCopies


class RankBuffers:
    """A stand-in for torch's symmetric memory handle, for ranks on one device."""

    def __init__(self, size: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffers = [torch.full((numel,), math.nan, dtype=dtype, device=device) for _ in range(size)]
        self.buffer_ptrs = [buffer.data_ptr() for buffer in self.buffers]

    def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
        return self.buffers[peer].view(dtype)[start : start + math.prod(shape)].view(shape)


def make_copying_ranks(max_rows: int, n: int, devices: Sequence[Any], dtype: torch.dtype) -> list[PeerCopies]:
    """One PeerCopies for each device (the same one may repeat). Their call numbers soon wrap around."""
    size, place = len(devices), devices[0].torch
    handle = RankBuffers(size, PeerCopies.numel(max_rows, n, size, dtype.itemsize), dtype, place)
    ranks = []
    for rank, device in enumerate(devices):
        aborted = torch.zeros(1, dtype=torch.int32, device=place)
        copies = PeerCopies(rank, device, handle.buffers[rank], handle, aborted, max_rows, n)
        inside.set_copied_sums(copies, 2 * CALLS - 5, CALLS - 6)
        ranks.append(copies)
    return ranks


class CopyingDevice:
    """A CPU device that copies at once."""

    torch = torch.device("cpu")

    def side_stream(self) -> None:
        return None

    def start_on_stream(self, stream: None, work: Callable[[], object]) -> None:
        work()


class SlowDevice(CopyingDevice):
    """A CPU device that copies later, in order, in a thread."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.jobs: queue.Queue = queue.Queue()
        self.thread = threading.Thread(target=self.run, daemon=True)  # daemon, so that a failing test ends
        self.thread.start()

    def run(self) -> None:
        for work in iter(self.jobs.get, None):
            time.sleep(self.rng.choice([0.0, self.rng.uniform(0.0, 0.004)]))
            work()

    def start_on_stream(self, stream: None, work: Callable[[], object]) -> None:
        self.jobs.put(work)

    def close(self) -> None:
        self.jobs.put(None)
        self.thread.join(60)


def copied_sum_add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    arrival: Arrival,
    out: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """`copied_sum_add_rms_norm_triton` in plain torch, after all copies have arrived."""
    assert x.shape == residual.shape == out.shape == total.shape
    size, rank = len(arrival.flags), arrival.rank
    parts = [x if other == rank else slots[(other - rank - 1) % size, : len(x)] for other in range(size)]
    normed, summed = all_reduce_add_rms_norm_reference(parts, residual, weight, eps)
    out.copy_(normed)
    total.copy_(summed)


def copy_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels of copied sums by plain torch; Triton cannot interpret in several threads."""

    def when_all_have_come(arrival: Arrival) -> None:
        deadline = time.monotonic() + 60
        others = torch.arange(len(arrival.flags)) != arrival.rank
        while ((arrival.flags - arrival.call + CALLS) % CALLS >= CALLS // 2)[others].any():
            assert time.monotonic() < deadline
            time.sleep(0.0002)

    def add_norm(*args: Any) -> None:
        (arrival,) = (arg for arg in args if isinstance(arg, Arrival))
        when_all_have_come(arrival)
        copied_sum_add_rms_norm_reference(*args)

    monkeypatch.setattr(peer_memory, "await_copies_triton", when_all_have_come)
    monkeypatch.setattr(peer_memory, "copied_sum_add_rms_norm_triton", add_norm)


def run_late_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, max_rows: int, n: int, run: Callable[[int, PeerCopies], Any]
) -> list[Any]:
    """Run `run(rank, copies)` for each rank in its own thread, with plain torch and delayed copies; return
    the results.
    """
    copy_without_kernels(monkeypatch)
    devices = [SlowDevice(rank) for rank in range(size)]
    ranks = make_copying_ranks(max_rows, n, devices, torch.float32)
    results = in_threads(size, lambda rank: run(rank, ranks[rank]))
    for device in devices:
        device.close()
    return results
