"""Device: the one place that knows whether tensors live on a GPU. With its memory, `device_memory.py`, it
makes all torch.cuda calls outside kernels and graphs.

Decides nothing at import time. Keeps the device itself, and what the door of CPUs answers once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch

from nanovllm import doors
from nanovllm.device_memory import DeviceMemory


@cache
def cpu_door(name: str) -> Callable[..., Any]:
    """A function of the door of CPUs, imported on use:

    - has_kernels() -> bool: whether its kernels run on this CPU; else torch computes
    - has_bf16() -> bool: whether this CPU multiplies bfloat16 faster than float32
    - say_what_is_missing(): once, what would make this CPU faster
    - linear_method(shape, options, kind) -> the `LinearMethod` of a weight in floats; None: the core's
    - recorded_steps() -> `RecordedSteps` of `runner/batch_runner.py`; None if nothing can be recorded
    - compile_ahead(runner): compiles the kernels that a `ModelRunner` needs and that are not kept yet
    """
    found: Callable[..., Any] = doors.find(doors.CPU[name])
    return found


cpu_kernels: ContextVar[bool | None] = ContextVar("cpu_kernels", default=None)  # None: not asked yet


def has_cpu_kernels() -> bool:
    """Whether kernels for this CPU run here. The door is asked once."""
    answer = cpu_kernels.get()
    if answer is None:
        answer = bool(cpu_door("has_kernels")())
        cpu_kernels.set(answer)
    return answer


class Device(DeviceMemory):
    """A torch device, with the operations that the engine needs."""

    def __init__(self, spec: str = "auto") -> None:
        """Resolve "auto", "cpu", "cuda" or "cuda:N". Raises ValueError if there is no such device."""
        count = torch.cuda.device_count() if spec != "cpu" else 0
        if spec == "auto":
            spec = "cuda" if count else "cpu"
        if spec.startswith("cuda") and not count:
            raise ValueError(f"device={spec!r}, and torch sees no CUDA device; use device='cpu' or 'auto'")
        self.torch = torch.device(spec)
        if self.is_cuda:
            index = self.torch.index if self.torch.index is not None else torch.cuda.current_device()
            if index >= count:
                raise ValueError(f"device={spec!r}, and torch sees {count} CUDA device(s): 0 to {count - 1}")
            self.torch = torch.device("cuda", index)

    @classmethod
    def all(cls) -> list[Device]:
        """The CPU, and every CUDA device that torch sees."""
        return [cls("cpu"), *(cls(f"cuda:{index}") for index in range(torch.cuda.device_count()))]

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) on a CPU."""
        return torch.cuda.get_device_capability(self.torch) if self.is_cuda else (0, 0)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_cuda else "cpu"

    def resolve_dtype(self, asked: str, checkpoint: str) -> torch.dtype:
        """The dtype to compute in. "auto" is the checkpoint's dtype on a GPU that supports it. On a CPU it is
        bfloat16 for a checkpoint in bfloat16 if the CPU multiplies that faster, else float32."""
        lacks_bf16 = self.is_cuda and self.capability < (8, 0)
        if asked == "bfloat16" and lacks_bf16:
            raise ValueError(f"dtype='bfloat16' is not supported by {self.name}; use 'float16' or 'float32'")
        if asked == "auto":
            fast = self.is_cuda or (checkpoint == "bfloat16" and cpu_door("has_bf16")())
            asked = checkpoint if fast else "float32"
            if asked == "bfloat16" and lacks_bf16:
                asked = "float16"
        dtype: torch.dtype = getattr(torch, asked)
        return dtype

    def make_current(self) -> None:
        """Make this the current device of the thread, because Triton launches on the current device."""
        if self.is_cuda:
            torch.cuda.set_device(self.torch)

    def current(self) -> AbstractContextManager[object]:
        """Make it the current device of this thread for a block."""
        return torch.cuda.device(self.torch) if self.is_cuda else nullcontext()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def ranks(self, count: int, replicas: int = 1) -> list[str]:
        """The devices of `count` tensor-parallel ranks of each replica: consecutive GPUs from this one on, or
        the CPU for all.

        Raises ValueError if there are fewer GPUs.
        """
        if not self.is_cuda:
            return ["cpu"] * count * replicas
        there = torch.cuda.device_count()
        first = self.torch.index
        needed = count * replicas
        if first + needed > there:
            size = f"tensor_parallel_size={count} with data_parallel_size={replicas}"
            raise ValueError(
                f"{size} needs {needed} GPUs from {self.torch} on, and torch sees "
                f"{there} in all; use at most {there - first}, or check CUDA_VISIBLE_DEVICES"
            )
        return [f"cuda:{first + rank}" for rank in range(needed)]

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

    def side_stream(self) -> torch.cuda.Stream:
        """A new stream, for `run_on_stream` or `start_on_stream`."""
        return torch.cuda.Stream(self.torch)

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

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A host tensor of `size` zeros, pinned if the device is a GPU so that copies are asynchronous."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.is_cuda)

    def send(self, array: np.ndarray) -> torch.Tensor:
        """A copy of a host array on this device, queued after earlier work. Does not wait."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.torch, non_blocking=True) if self.is_cuda else tensor

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
