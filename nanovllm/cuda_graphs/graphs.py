"""CUDA graphs of the decode step: captured over fixed input buffers, replayed by batch size.

Knows no batch and no family, only sizes and functions that run a padded step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.compat import FEW_ROWS, in_graph

_ROOM = 64 << 20  # bytes of the device that a capture needs at most; the driver takes some megabytes


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: every 8 up to 64, then every 16; the last one is `max_num_seqs`.

    Below 8, only the sizes that use our own kernels instead of cuBLAS. On an H200 cuBLAS takes twice as long
    for some products of one to three rows as for eight (2048 x 1024 in bfloat16: 12.7 us and 5.9 us).
    """
    few = range(1, FEW_ROWS + 1)
    sizes = {*few, *range(8, 65, 8), *range(80, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


@lru_cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


class CUDAGraphs:
    """One graph for each size, over the fixed tensors of its step; all share one memory pool."""

    def __init__(
        self,
        sizes: list[int],
        make_step: Callable[[int], Callable[[], Any]],
        device: torch.device,
        pool: Any = None,
        rehearsing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`make_step(size)` returns a function that runs the step of that many rows. Captures nothing yet.

        rehearsing: a context in which a step launches all of its kernels, but runs only a few layers.
        """
        self.sizes = sizes
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._make_step = make_step
        self._device = device
        self._rehearsing = rehearsing
        self._graphs: dict[int, Callable[[], Any]] = {}  # what runs each size

    def capture(self, size: int) -> None:
        """Capture one size, unless it is captured. Runs its step, so it overwrites the input buffers.

        The first size should be the largest: smaller ones reuse its memory. Where the device has no memory
        for another graph, the step is launched in place of its replay, with the same kernels.
        """
        if size in self._graphs:
            return
        run_step = self._make_step(size)
        context = copy_context()
        context.run(in_graph.set, True)
        # This run compiles kernels and creates library handles, which a capture must not do. The first run is
        # of all layers.
        with self._rehearsing() if self._graphs else nullcontext():
            context.run(run_step)
        torch.cuda.synchronize(self._device)
        if self._graphs and not _has_room(self._device):
            self._graphs[size] = partial(context.run, run_step)
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(capture_stream(self._device)):
            # Thread-local, because other threads, such as NCCL's watchdog, may query the device meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = context.run(run_step)
            finally:
                graph.capture_end()
        torch.cuda.synchronize(self._device)
        self._graphs[size] = partial(_replay, graph, output)

    def size_for(self, num_seqs: int) -> int:
        """The smallest size that holds `num_seqs` rows."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, size: int) -> Any:
        """Run the captured step of `size` rows on the current content of its tensors; return its output,
        which is valid until the next replay."""
        return self._graphs[size]()


def _has_room(device: torch.device) -> bool:
    """Whether the device has memory for another graph, once torch has given back what it does not use."""
    if torch.cuda.mem_get_info(device)[0] >= _ROOM:
        return True
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] >= _ROOM


def _replay(graph: torch.cuda.CUDAGraph, output: Any) -> Any:
    graph.replay()
    return output


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """All of a layer that decides which kernels it launches."""
    modules = (
        (name, type(module), repr(getattr(module, "spec", None)), *map(type, vars(module).values()))
        for name, module in layer.named_modules()
    )
    return (*modules, *((name, each.shape, each.dtype) for name, each in layer.named_parameters()))


class Rehearsal:
    """A context in which `model` runs a few of its `layers`, whose results mean nothing, but which launch all
    the kernels of a step: for each kind of layer, one of them after one of each kind that precedes it."""

    def __init__(self, model: nn.Module) -> None:
        self._model, layers = model, model.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        self._layers = layers
        firsts: dict[Any, int] = {}  # by the kinds of a layer and of the one before it
        for place, kinds in enumerate(pairwise([None, *map(_kind, layers)])):
            firsts.setdefault(kinds, place)
        places = {near for place in firsts.values() for near in (max(place - 1, 0), place)}
        self._few = nn.ModuleList(layers[place] for place in sorted(places))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._model.layers = self._few
        try:
            yield
        finally:
            self._model.layers = self._layers
