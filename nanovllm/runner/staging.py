"""Staging: how a step's host arrays reach the device, in one copy, and its tokens come back.

Knows shapes and offsets, nothing of what the arrays mean. The arrays are padded and summed up here too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.batch import StepOutput
from nanovllm.device import Device

ALIGN = 4  # in int32 words: every field starts at a multiple of 16 bytes
TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class StepHandle:
    """A launched step, whose tokens can be read once the device has got that far."""

    token_ids: torch.Tensor  # [S] int64, on the host
    draws: np.ndarray  # [S] int32, of the batch
    event: torch.cuda.Event | None

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens."""
        if self.event is not None:
            self.event.synchronize()
        return StepOutput(self.token_ids.numpy().copy()[:, None], self.draws)


class StagedFields:
    """Views of the device buffer, made when asked for, by name."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        # By name: the first word and the last + 1, shape, dtype.
        self._fields: dict[str, tuple[int, int, tuple[int, ...], str]] = {}
        self.num_words = 0

    def place(self, name: str, array: np.ndarray) -> tuple[int, int]:
        """Give `array` the next free place; return its first and last + 1 word."""
        start, end = self.num_words, self.num_words + array.nbytes // 4
        self._fields[name] = (start, end, array.shape, array.dtype.name)
        self.num_words = -(-end // ALIGN) * ALIGN
        return start, end

    def __getitem__(self, name: str) -> torch.Tensor:
        start, end, shape, dtype = self._fields[name]
        return self._buffer[start:end].view(TORCH_DTYPES[dtype]).view(shape)

    def get(self, name: str) -> torch.Tensor | None:
        return self[name] if name in self._fields else None


class Staging:
    """One input buffer on the device, and two sets of host buffers that take turns.

    The same fields in the same order and shapes always land at the same addresses, which is what lets a CUDA
    graph read them. A host set is written again only when the device is done with its last use.
    """

    def __init__(self, device: Device, num_words: int, max_num_seqs: int) -> None:
        self._device = device
        self._buffer = torch.zeros(num_words, dtype=torch.int32, device=device.torch)
        self._inputs = [device.host_buffer(num_words, torch.int32) for _ in range(2)]
        self._token_ids = [device.host_buffer(max_num_seqs, torch.int64) for _ in range(2)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, arrays: dict[str, np.ndarray]) -> StagedFields:
        """Queue one copy of all arrays (int32, int64 or float32) to the device and return where they land."""
        event, host = self._events[self._turn], self._inputs[self._turn]
        if event is not None:
            event.synchronize()
        staged = StagedFields(self._buffer)
        words = host.numpy()
        for name, array in arrays.items():
            start, end = staged.place(name, array)
            words[start:end].view(array.dtype)[:] = array.ravel()
        self._buffer[: staged.num_words].copy_(host[: staged.num_words], non_blocking=True)
        return staged

    def receive(self, token_ids: torch.Tensor, draws: np.ndarray) -> StepHandle:
        """Queue the copy of the step's tokens [S] to the host, and end the turn of this host set."""
        host = self._token_ids[self._turn][: len(token_ids)]
        host.copy_(token_ids, non_blocking=True)
        event = self._device.record_event()
        self._events[self._turn] = event
        self._turn = 1 - self._turn
        return StepHandle(host, draws, event)


def pad(array: np.ndarray | None, size: int, value: int, dtype: type[np.generic] = np.int32) -> np.ndarray:
    """Return `array` [n] as [size] of `dtype`, filled up with `value`; None is an array of none."""
    padded = np.full(size, value, dtype)
    if array is not None:
        padded[: len(array)] = array
    return padded
