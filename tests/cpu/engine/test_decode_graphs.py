"""Graphs of decode steps: a size is captured on its first use, and launched if there is no memory for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nanovllm.cuda_graphs.graphs import CUDAGraphs
from nanovllm.kernels.compat import in_graph

MIB = 2**20


class Steps:
    """Steps that double the first rows of `x`, and what was done with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
        """free: bytes of the device, each time that it is asked; the last one stays."""
        self.x = torch.arange(8.0)
        self.run: list[tuple[int, bool]] = []  # rows of each step that ran, and whether within a graph
        self.replays, self.emptied, running = 0, 0, self

        class Graph:
            """A replay counts, and computes what the captured step would."""

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                self.first = len(running.run)

            def capture_end(self) -> None:
                [(self.rows, _)] = running.run[self.first :]

            def replay(self) -> None:
                running.replays += 1
                running.out[: self.rows] = 2 * running.x[: self.rows]

        self.out = torch.zeros(8)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (free.pop(0) if len(free) > 1 else free[0], 2**33)
        )

    def _empty(self) -> None:
        self.emptied += 1

    def make(self, rows: int) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            self.run.append((rows, in_graph.get()))
            self.out[:rows] = 2 * self.x[:rows]
            return self.out[:rows]

        return step

    def graphs(self) -> CUDAGraphs:
        return CUDAGraphs([1, 2, 8], self.make, torch.device("cpu"), pool=0)


def test_a_size_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, [2**33])
    graphs = steps.graphs()
    for size in (8, 2, 8, 2):
        graphs.capture(size)
        steps.x += 1
        assert graphs.replay(size).tolist() == (2 * steps.x[:size]).tolist()
    assert steps.run == [(8, True), (8, True), (2, True), (2, True)], "once to compile, once to capture"
    assert steps.replays == 4 and not steps.emptied
    assert not in_graph.get()


def test_a_step_without_memory_for_its_graph_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As within a graph, so that it has the same kernels."""
    steps = Steps(monkeypatch, [3 * MIB])
    graphs = steps.graphs()
    graphs.capture(8)  # a start without memory for its first graph fails
    graphs.capture(2)
    assert steps.emptied == 1
    for _ in range(2):
        steps.x += 1
        assert graphs.replay(2).tolist() == (2 * steps.x[:2]).tolist()
    assert steps.replays == 0 and steps.run[-2:] == [(2, True)] * 2


def test_torch_gives_back_what_it_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, [3 * MIB, 300 * MIB])
    graphs = steps.graphs()
    graphs.capture(8)
    graphs.capture(1)
    graphs.replay(1)
    assert steps.emptied == 1 and steps.replays == 1
