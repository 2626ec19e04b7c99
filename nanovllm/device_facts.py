"""DeviceFacts: which device a `Device` is, what it can compute in, its buffers and memory, and the share of
memory for the KV cache.

The engine asks when it starts, captures, sleeps and ends, never in a step. Owns no memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
from abc import ABC, abstractmethod
from typing import TypeVar

import torch

from nanovllm import doors

CPU_KV_CACHE_BYTES = 4 * 2**30  # maximum KV cache on a CPU; also at most half of the free memory
# Of a GPU, or a sixteenth of it: for CUDA graphs and kernels, which follow the KV cache.
SPARE_BYTES = 5 * 2**29
_TorchDevice = torch.device
_Device = TypeVar("_Device", bound="DeviceFacts")
_Dtype = torch.dtype
_Tensor = torch.Tensor
_Stream = torch.cuda.Stream


class DeviceFacts(ABC):
    """What a `Device` is and has."""

    torch: _TorchDevice

    @property
    @abstractmethod
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""

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
    def all(cls: type[_Device]) -> list[_Device]:
        """The CPU, and every CUDA device that torch sees."""
        return [cls("cpu"), *(cls(f"cuda:{index}") for index in range(torch.cuda.device_count()))]

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) on a CPU."""
        return torch.cuda.get_device_capability(self.torch) if self.is_cuda else (0, 0)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_cuda else "cpu"

    def resolve_dtype(self, asked: str, checkpoint: str) -> _Dtype:
        """The dtype to compute in. "auto" is the checkpoint's dtype on a GPU that supports it. On a CPU it is
        bfloat16 for a checkpoint in bfloat16 if the CPU multiplies that faster, else float32."""
        lacks_bf16 = self.is_cuda and self.capability < (8, 0)
        if asked == "bfloat16" and lacks_bf16:
            raise ValueError(f"dtype='bfloat16' is not supported by {self.name}; use 'float16' or 'float32'")
        if asked == "auto":
            fast = self.is_cuda or (checkpoint == "bfloat16" and doors.find(doors.CPU["has_bf16"])())
            asked = checkpoint if fast else "float32"
            if asked == "bfloat16" and lacks_bf16:
                asked = "float16"
        dtype: _Dtype = getattr(torch, asked)
        return dtype

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

    def make_current(self) -> None:
        """Make this the current device of the thread, because Triton launches on the current device."""
        if self.is_cuda:
            torch.cuda.set_device(self.torch)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def side_stream(self) -> _Stream:
        """A new stream, for `run_on_stream` or `start_on_stream`."""
        return torch.cuda.Stream(self.torch)

    def host_buffer(self, size: int, dtype: _Dtype) -> _Tensor:
        """A host tensor of `size` zeros, pinned if the device is a GPU so that copies are asynchronous."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.is_cuda)

    def release_memory(self) -> None:
        """Collect garbage, then return unused memory to the driver."""
        gc.collect()
        self.empty_cache()

    def empty_cache(self) -> None:
        """Return memory that no tensor uses to the driver, or on a CPU to the system."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)
            torch.cuda.empty_cache()
        elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # glibc keeps holes of the heap, where large tensors may have been

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device, or of the host's memory on a CPU; other processes count."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch)
        try:
            page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
            return page * os.sysconf("SC_AVPHYS_PAGES"), page * total
        except (AttributeError, ValueError):  # not Linux: assume room for the full KV cache budget
            return 2 * CPU_KV_CACHE_BYTES, 2 * CPU_KV_CACHE_BYTES

    def power(self) -> float:
        """The power draw of a GPU in watts, from NVML; ModuleNotFoundError without nvidia-ml-py."""
        return torch.cuda.power_draw(self.torch) / 1e3

    def memory_in_use(self) -> int:
        """Bytes of a GPU in use by all processes, from NVML like `power`."""
        return torch.cuda.device_memory_used(self.torch)

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def tensor_bytes(self) -> int:
        """Bytes of this process's tensors on a GPU; 0 on a CPU."""
        return torch.cuda.memory_allocated(self.torch) if self.is_cuda else 0

    def peak_above_current(self) -> int:
        """Peak bytes of tensors since `reset_peak` minus their current bytes; 0 on a CPU."""
        if not self.is_cuda:
            return 0
        return torch.cuda.max_memory_allocated(self.torch) - torch.cuda.memory_allocated(self.torch)

    def kv_cache_budget(self, utilization: float, held: int, reserve: int) -> tuple[int, int]:
        """Bytes that the KV cache may take, and bytes of the engine's share that are not free.

        On a GPU the share is `utilization` of the device, minus the `held` bytes of the engine's own tensors
        and `reserve` for activations. Other processes count only in what is free.
        """
        free, total = self.memory()
        if not self.is_cuda:
            return min(CPU_KV_CACHE_BYTES, free // 2), 0
        share = int(total * utilization) - held - reserve
        budget = min(share, free - reserve - min(SPARE_BYTES, total // 16))
        return budget, share - budget
