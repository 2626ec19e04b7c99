"""DeviceMemory: what a `Device` knows of its memory, and the share of it that the KV cache may take.

The engine asks when it starts, captures, sleeps and ends, never in a step. Owns no memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
from abc import ABC, abstractmethod

import torch

CPU_KV_CACHE_BYTES = 4 * 2**30  # maximum KV cache on a CPU; also at most half of the free memory
# Of a GPU, or a sixteenth of it: for CUDA graphs and kernels, which follow the KV cache.
SPARE_BYTES = 5 * 2**29
_TorchDevice = torch.device


class DeviceMemory(ABC):
    """The memory of a `Device`."""

    torch: _TorchDevice

    @property
    @abstractmethod
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""

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
