"""Device: the one place that knows whether tensors live on a GPU. With `device_facts.py`, of the start, it
makes all torch.cuda calls outside kernels and graphs.

Decides nothing at import time. Keeps the device itself, and what the door of CPUs answers once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from nanovllm.device_facts import DeviceFacts
from nanovllm.doors import cpu_door

cpu_kernels: ContextVar[bool | None] = ContextVar("cpu_kernels", default=None)  # None: not asked yet


def has_cpu_kernels() -> bool:
    """Whether kernels for this CPU run here. The door is asked once."""
    answer = cpu_kernels.get()
    if answer is None:
        answer = bool(cpu_door("has_kernels")())
        cpu_kernels.set(answer)
    return answer


class Device(DeviceFacts):
    """A torch device, with the operations that the engine needs."""

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    def current(self) -> AbstractContextManager[object]:
        """Make it the current device of this thread for a block."""
        return torch.cuda.device(self.torch) if self.is_cuda else nullcontext()

    @contextmanager
    def share_of_threads(self, ranks: int, asked: int | None = None) -> Iterator[None]:
        """On a CPU that `ranks` processes share, use only this process's share of the threads that are asked
        for, or else of torch's. Our kernels use as many as torch."""
        before = torch.get_num_threads()
        threads = max(1, (asked or before) // ranks)
        if self.is_cuda or threads == before:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def start_on_stream(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
        """Queue `work` on `stream`, after all work queued on the current stream so far."""
        stream.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(stream):
            work()

    def run_on_stream(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
        """Run `work` on `stream`, in parallel with other streams, and wait for it."""
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the host, valid once an event that is recorded after this call has passed."""
        if not self.is_cuda:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def record_event(self) -> torch.cuda.Event | None:
        """An event after all work queued so far; None on a CPU, which runs work at once."""
        if not self.is_cuda:
            return None
        return torch.cuda.current_stream(self.torch).record_event()
