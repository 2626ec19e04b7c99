"""Blocks that leave every window, with the fake device: none is read after it was freed."""

from __future__ import annotations

import random

import pytest
from fake_device import VOCAB, Windows, make_loop, make_sequence, run_all
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import check_any_load

from nanovllm.batch import PADDING
from nanovllm.kv_group import ONE_GROUP
from nanovllm.plan.sequence import Room
from nanovllm.sampling_params import SamplingParams

KINDS = pytest.mark.parametrize("parts", [None, 1, 3])
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_load_gives_the_right_tokens(data: st.DataObject) -> None:
    """All layers with a window, or some, whose blocks share slabs with one to three blocks of the others."""
    reach = data.draw(st.integers(1, 20), "reach")
    parts = data.draw(st.sampled_from([None, 1, 2, 3]), "parts")
    check_any_load(data.draw, Windows(reach, parts))


@KINDS
@pytest.mark.parametrize(("prompt", "budget"), [(5, 64), (300, 16), (290, 64)])
def test_a_sequence_holds_a_window_a_chunk_and_two_blocks(
    parts: int | None, prompt: int, budget: int
) -> None:
    windows, size = Windows(24, parts), 8
    most = (24 + budget) // size + 2
    loop = make_loop(400, size, 2, budget, 800, windows=windows)
    seq = make_sequence(0, [random.Random(1).randrange(1, VOCAB) for _ in range(prompt)], LONG)
    loop.scheduler.add(seq)
    held = []
    while not loop.scheduler.is_finished():
        loop.step()
        held.append(sum(block != PADDING for table in seq.tables[-1:] for block in table))
        assert parts is None or PADDING not in [block for table in seq.tables[:1] for block in table]
    assert max(held) <= most and max(held[prompt // budget + 10 :]) <= 24 // size + 2
    assert windows.groups[-1].policy.most_blocks(prompt + 400, size, budget) <= most
    assert loop.scheduler.block_manager.pool.usage == 0


def test_a_sequence_may_be_longer_than_the_cache() -> None:
    loop = make_loop(10, 8, 1, 16, 4000, windows=Windows(24))
    assert loop.scheduler.room.max_model_len == 4000
    run_all(loop, [[3] * 200], [SamplingParams(max_tokens=200, ignore_eos=True)])
    assert loop.finished[0].num_preemptions == 0


@pytest.mark.parametrize(("parts", "more"), [(None, 3), (1, 1.4), (3, 2)])
def test_more_sequences_fit(parts: int | None, more: float) -> None:
    """With the memory of 64 slabs, of which a model without freed blocks needs 1 + 1 / parts for a block."""
    running = []
    for windows in (None, Windows(16, parts)):
        slabs = 64 if windows else int(64 / (1 + 1 / (parts or 1e9)))
        loop = make_loop(slabs, 8, 64, 16, 400, windows=windows, caching=False)
        for index in range(32):
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            loop.scheduler.add(make_sequence(index, [index % 40 + 1] * 100, params))
        while not loop.scheduler.is_finished():
            loop.step()
            running.append((windows is not None, len(loop.scheduler.running)))
    most = {kind: max(count for each, count in running if each == kind) for kind in (False, True)}
    assert most[True] >= more * most[False], most


@KINDS
def test_a_prefix_needs_only_its_last_window(parts: int | None) -> None:
    """Its blocks before that belong to nobody. Two samples of a prompt share what they read."""
    loop = make_loop(64, 4, 8, 16, 200, windows=Windows(6, parts))
    prompt, params = list(range(1, 42)), SamplingParams(max_tokens=4, ignore_eos=True)
    run_all(loop, [prompt, prompt], [params, params])
    assert loop.finished[1].num_cached_tokens == 40
    for length in (41, 33, 23):  # a shorter prefix, whose last window is cached too
        run_all(loop, [[*prompt[:length], 7, 7]], [params])
    assert [loop.finished[index].num_cached_tokens for index in (2, 3, 4)] == [41, 33, 23]


def test_blocks_of_both_kinds_are_hits_or_none() -> None:
    """While the blocks with a window of a prefix are overwritten, the others stay: no hit."""
    loop = make_loop(24, 4, 8, 64, 80, windows=Windows(6, 3))
    params, prompt = SamplingParams(max_tokens=1), list(range(1, 34))
    run_all(loop, [prompt], [params])
    run_all(loop, [[40 + index % 9] * 30 for index in range(6)], [params] * 6)
    run_all(loop, [prompt], [params])
    assert loop.finished[7].num_cached_tokens < 32  # and the tokens are right


@pytest.mark.parametrize(
    ("windows", "slabs", "longest"),
    [
        (None, 10, 80),
        (Windows(24), 10, 1000),  # 24 + 16 tokens lie in at most 6 blocks of 8
        (Windows(24), 5, 40),
        (Windows(24, 1), 10, 40),
        (Windows(24, 1), 8, 32),
        (Windows(24, 4), 10, 128),
        (Windows(2000, 4), 10, 64),
    ],
)
def test_the_longest_sequence(windows: Windows | None, slabs: int, longest: int) -> None:
    groups = ONE_GROUP if windows is None else windows.groups
    assert Room(slabs, 8, 1000, groups=groups, chunk=16).max_model_len == longest
