"""Staging: copies a step's inputs to the device, in one copy, and its outputs to the host.

Knows the declared dtype, shape and neutral value of each column, but not its meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from nanovllm.batch import Column, StepOutput, StepSize, TokenLogprobs, all_columns, map_columns
from nanovllm.device import Device
from nanovllm.runner.ending import StepTensors
from nanovllm.runner.inputs import StepInputs

ALIGN = 16  # bytes; every column starts at a multiple of this
_TORCH_DTYPES: dict[type[np.generic], torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
}


@dataclass(frozen=True, slots=True, eq=False)
class StepHandle:
    """A launched step, whose outputs can be read once the device has computed it."""

    tensors: StepTensors  # on the host
    event: torch.cuda.Event | None

    def result(self) -> StepOutput:
        """Wait for the step and return a copy of its outputs. Sequences keep them until they end, while later
        steps reuse the pinned memory."""
        if self.event is not None:
            self.event.synchronize()
        token_ids, logprobs, scores, pooled, routed = self.tensors
        return StepOutput(
            token_ids.numpy().copy(),
            None if logprobs is None else TokenLogprobs(*(column.numpy().copy() for column in logprobs)),
            None if scores is None else TokenLogprobs(*(column.numpy().copy() for column in scores)),
            None if pooled is None else pooled.numpy().copy(),
            None if routed is None else routed.numpy().copy(),
        )


class Staging:
    """One input buffer on the device, and two alternating buffers on the host.

    Inputs with the same parts and sizes always have the same addresses, so a CUDA graph can read them. A host
    buffer is written again only after the device has finished its last use.
    """

    def __init__(self, device: Device, size: StepSize) -> None:
        """size: of the largest step. The buffer has room for it with all optional parts."""
        words = sum(_end_of(column, 0, column.shape(size)) for column in all_columns(StepInputs)) // 4
        self._device = device
        self._buffer = torch.zeros(words, dtype=torch.int32, device=device.torch)
        self._columns = {dtype: self._buffer.view(other) for dtype, other in _TORCH_DTYPES.items()}
        self._inputs = [device.host_buffer(words, torch.int32) for _ in range(2)]
        self._views = [{each: host.numpy().view(each) for each in _TORCH_DTYPES} for host in self._inputs]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(
        self, inputs: StepInputs[np.ndarray], size: StepSize | None = None
    ) -> Callable[[], StepInputs[torch.Tensor]]:
        """Queue one copy of all inputs to the device, padded to `size` if given.

        Return a function that creates the device tensors, which are valid until the next `send`. A CUDA graph
        already has the tensors of its capture and need not call it.
        """
        event, host, views = self._events[self._turn], self._inputs[self._turn], self._views[self._turn]
        if event is not None:
            event.synchronize()
        end = 0

        def put(column: Column, array: np.ndarray) -> None:
            nonlocal end
            shape = array.shape if size is None else column.shape(size)
            first, end = end // views[column.dtype].itemsize, _end_of(column, end, shape)
            cells = views[column.dtype][first : first + prod(shape)].reshape(shape)
            if shape == array.shape:
                cells[...] = array
            else:
                cells[...] = column.neutral
                cells[tuple([slice(length) for length in array.shape])] = array
            places.append((first, shape))

        def view(column: Column, _: np.ndarray) -> torch.Tensor:
            start, shape = next(rest)
            return self._columns[column.dtype][start : start + prod(shape)].view(shape)

        places: list[tuple[int, tuple[int, ...]]] = []
        map_columns(inputs, put)
        rest = iter(places)
        self._buffer[: end // 4].copy_(host[: end // 4], non_blocking=True)
        return lambda: map_columns(inputs, view)

    def receive(self, tensors: StepTensors) -> StepHandle:
        """Queue the copy of a step's outputs to the host, and switch to the other host buffer."""
        fetched = tensors.map(self._device.fetch)
        event = self._device.record_event()
        self._events[self._turn] = event
        self._turn = 1 - self._turn
        return StepHandle(fetched, event)


def _end_of(column: Column, start: int, shape: tuple[int, ...]) -> int:
    """The offset of the next column, in bytes."""
    end = start + prod(shape) * _TORCH_DTYPES[column.dtype].itemsize
    return -(-end // ALIGN) * ALIGN
