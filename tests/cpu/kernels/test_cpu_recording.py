"""A recorded step runs again on new inputs, in the same memory, from any thread and with any team."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_kernel_cases import count, threads

from nanovllm.cpu.kernels.checking import CHECKED
from nanovllm.cpu.kernels.launch import recorder
from nanovllm.cpu.kernels.recording import Arena, Recording
from nanovllm.cpu.kernels.rms_norm import add_rms_norm, rms_norm

WIDTH = 50


class WatchedArena(Arena):
    """Notes where each result lies."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().empty(shape, dtype)
        self.places.append(tensor.data_ptr())
        return tensor


def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """A norm of each weight in turn, whose results are used once."""
    for weight in weights:
        x, _ = add_rms_norm(x, x, weight, 1e-5)
    return x


def some(seed: int, rows: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(WIDTH, generator=generator) for _ in range(6)]
    return torch.randn(rows, WIDTH, generator=generator), weights


@pytest.mark.parametrize("number", [1, 2, 3])
def test_replays_follow_the_inputs(number: int) -> None:
    x, weights = some(0)
    with threads(number):
        recording = Recording.record(lambda: chain(x, weights), Arena())
        place = recording.result.data_ptr()
        assert torch.equal(recording.result, chain(x, weights))
        for seed in range(1, 20):
            x.copy_(some(seed)[0])
            result = recording.replay()
            assert torch.equal(result, chain(x, weights))
            assert result is recording.result and result.data_ptr() == place


@pytest.mark.skipif(CHECKED, reason="checks keep all tensors")
def test_memory_is_used_again_within_a_recording_and_between_recordings() -> None:
    x, weights = some(0)
    arena = WatchedArena()
    recording = Recording.record(lambda: chain(x, weights), arena)
    used = set(arena.places)
    assert len(arena.places) == 12 and len(used) < 8
    own = recording.result.data_ptr()
    other = Recording.record(lambda: chain(x, weights), arena)
    assert other.result.data_ptr() != own, "the first result lives"
    assert len(set(arena.places)) <= len(used) + 2
    del recording, other
    before = len(arena.places)
    Recording.record(lambda: chain(x, weights), arena)
    assert set(arena.places[before:]) <= set(arena.places[:before])


def test_results_of_odd_shapes() -> None:
    arena = Arena()
    assert arena.empty((), torch.float32).shape == ()
    assert arena.empty((0, 3), torch.bfloat16).shape == (0, 3)
    assert arena.empty((2, 3), torch.int64).is_contiguous()


def test_tensors_are_kept_alive() -> None:
    x, weights = some(0)
    copies = [x.clone(), [each.clone() for each in weights]]
    expected = chain(x, weights)
    recording = Recording.record(lambda: chain(*copies), Arena())
    copies.clear()
    gc.collect()
    garbage = [torch.full((WIDTH,), 1e9) for _ in range(100)]
    assert torch.equal(recording.replay(), expected) and garbage


def test_a_result_of_another_recording_is_kept_alive() -> None:
    x, weights = some(0)
    arena = Arena()
    first = Recording.record(lambda: rms_norm(x, weights[0], 1e-5), arena)
    given = [first.result]
    second = Recording.record(lambda: rms_norm(given[0], weights[1], 1e-5), arena)
    expected = second.result.clone()
    given.clear()
    del first
    gc.collect()
    others = [arena.empty((3, WIDTH), torch.float32).fill_(1e9) for _ in range(5)]
    assert torch.equal(second.replay(), expected) and others


def test_two_threads_record_and_replay_at_once() -> None:
    def work(seed: int) -> bool:
        x, weights = some(seed)
        with threads(2):
            recording = Recording.record(lambda: chain(x, weights), Arena())
            for _ in range(200):
                x.add_(0.5)
                result = recording.replay().clone()
                if not torch.equal(result, chain(x, weights)):
                    return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (1, 2))) == [True, True]


def test_another_team_replays() -> None:
    """Teams number their runs on their own."""
    x, weights = some(0)
    recording = Recording.record(lambda: chain(x, weights), Arena())
    for number in (2, 4, 1, 3, 2, 2):
        for _ in range(10):
            x.add_(1.0)
            with threads(number):
                assert torch.equal(recording.replay(), chain(x, weights))


def test_a_forked_child_replays() -> None:
    counts = torch.zeros(5, dtype=torch.int64)
    with threads(2):
        recording = Recording.record(lambda: count(counts), Arena())
        for _ in range(100):
            recording.replay()
        child = os.fork()
        if not child:
            signal.alarm(60)
            recording.replay()
            os._exit(0 if counts.tolist() == [102] * 5 else 1)
        assert os.waitpid(child, 0)[1] == 0
        recording.replay()
    assert counts.tolist() == [102] * 5


def test_recordings_die_while_threads_may_look_at_them() -> None:
    """More threads than cores: some are late."""
    counts = torch.zeros(9, dtype=torch.int64)
    with threads(6):
        for _ in range(300):
            recording = Recording.record(lambda: count(counts), Arena())
            recording.replay()
            recording.replay()
    assert counts.tolist() == [900] * 9


def test_an_empty_step_and_a_step_that_fails() -> None:
    with threads(2):
        assert Recording.record(lambda: 5, Arena()).replay() == 5
    with pytest.raises(ZeroDivisionError):
        Recording.record(lambda: 1 // 0, Arena())
    assert recorder.get() is None
