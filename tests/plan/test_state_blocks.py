"""States of prefixes with the fake device: where they are kept, who reads them, and which are dropped."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_device import Loop, make_loop, make_sequence, run_all
from prefix_cases import branching_prompts

from nanovllm.batch import Batch, StepKind
from nanovllm.sampling_params import SamplingParams
from nanovllm.states.blocks import KeptStates, StateBlocks

ONE = SamplingParams(max_tokens=1)
SHARED = list(range(1, 22))


def cached(loop: Loop) -> list[int]:
    return [loop.finished[seq_id].num_cached_tokens or 0 for seq_id in sorted(loop.finished)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("budget", [5, 64, 1000])
def test_what_waiting_prompts_share_is_computed_once(block_size: int, budget: int) -> None:
    """The first prompt is compared with those that wait; they begin where texts part, whatever blocks and
    steps are."""
    loop = make_loop(600 // block_size, block_size, 6, budget, states=True)
    prompts = [[*SHARED, *range(30 + own, 36 + own)] for own in range(9)]
    run_all(loop, prompts, [ONE] * 9)
    assert cached(loop) == [0, *[len(SHARED)] * 8]


def test_prompts_that_come_one_by_one() -> None:
    """The second one shows where texts part."""
    loop = make_loop(states=True)
    for own in range(30, 35):
        run_all(loop, [[*SHARED, own, *range(9)]], [ONE])
    assert cached(loop) == [0, 0, *[len(SHARED)] * 3]


def test_partings_at_two_levels() -> None:
    """Both are kept by the first prompt; a state that spares little is not."""
    loop = make_loop(400, 4, 8, 64, 100, states=True)
    one, other, near = [*SHARED, *[8] * 20], [*SHARED, *[9] * 20], [*SHARED, *[8] * 19]
    run_all(loop, [[*one, 1, 1], [*one, 2, 2], [*near, 3, 3], [*other, 4, 4], [*other, 5, 5]], [ONE] * 5)
    assert cached(loop) == [0, 40, 40, 21, 41]


@pytest.mark.parametrize(("shared", "missed"), [(16, 3), (15, 6)])
def test_instructions_in_any_order(shared: int, missed: int) -> None:
    """Each is computed once; twice, if it is too short to be kept for prompts that wait."""
    loop = make_loop(400, 4, 8, 64, states=True)
    instructions = [[kind] * shared for kind in (40, 41, 42)]
    rng = random.Random(1)
    order = [rng.randrange(3) for _ in range(40)]
    own = [[1 + row % 30, row // 30 + 3, *[2] * 17] for row in range(40)]
    prompts = [[*instructions[kind], *more] for kind, more in zip(order, own, strict=True)]
    run_all(loop, prompts, [ONE] * 40)
    assert sum(count < shared for count in cached(loop)) == missed


def test_a_chat_goes_on_from_the_end_of_its_prompt() -> None:
    loop = make_loop(states=True)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    [answer] = run_all(loop, [SHARED], [params])
    run_all(loop, [[*SHARED, *answer, 7, 8]], [params])
    assert cached(loop) == [0, len(SHARED)]


def test_a_chat_whose_template_drops_the_beginning_of_an_answer() -> None:
    """Such as that of thinking: the third turn, and the second one of later chats, begin before it."""
    loop, params = make_loop(states=True, num_blocks=200, max_model_len=200), ONE
    begin = [45, 46]  # which only the last turn has
    turns = [[*SHARED], [*SHARED, 30, 31, 32], [*SHARED, 30, 31, 32, 33, 34]]
    for turn in turns:
        run_all(loop, [[*turn, *begin]], [params])
    assert cached(loop) == [0, 0, 24]
    others = [[7] * 15, [*[7] * 15, 8, 9]]
    for turn in others:
        run_all(loop, [[*turn, *begin]], [params])
    assert cached(loop)[3:] == [0, 15]


def test_equal_prompts_with_n_are_computed_once() -> None:
    params = replace_n(ONE, 3)
    loop = make_loop(states=True)
    run_all(loop, [SHARED] * 3, [params] * 3)
    assert cached(loop) == [0, len(SHARED) - 1, len(SHARED) - 1]


def replace_n(params: SamplingParams, n: int) -> SamplingParams:
    values = {"n": n, "temperature": 1.0, "max_tokens": params.max_tokens}
    return SamplingParams(**values)


def test_a_prompt_waits_for_the_step_that_computes_its_state() -> None:
    loop = make_loop(num_blocks=200, max_num_batched_tokens=1000, states=True)
    for seq_id, own in enumerate((30, 31, 32, 33)):
        loop.scheduler.add(make_sequence(seq_id, [*SHARED, own], ONE))
    batches: list[Batch] = []
    launch = loop.device.launch
    loop.device.launch = lambda batch: batches.append(batch) or launch(batch)  # type: ignore[method-assign]
    while not loop.scheduler.is_finished():
        loop.step()
    assert [batch.query_lens.tolist() for batch in batches] == [[22], [1, 1, 1]]


def test_no_state_is_kept_without_a_prefix_cache() -> None:
    loop = make_loop(caching=False, states=True)
    run_all(loop, [[*SHARED, own] for own in range(30, 40)], [ONE] * 10)
    manager = loop.scheduler.block_manager
    assert isinstance(manager, StateBlocks) and not len(manager.kept) and cached(loop) == [0] * 10


def test_a_reset_forgets_the_states() -> None:
    loop = make_loop(states=True)
    run_all(loop, [SHARED], [ONE])
    assert loop.scheduler.block_manager.reset()
    run_all(loop, [[*SHARED, 5]], [ONE])
    assert cached(loop) == [0, 0]


def test_states_at_ends_are_dropped_before_those_where_prompts_part() -> None:
    kept = KeptStates(8, 3)
    ends = [bytes([index] * 8) for index in range(6)]
    parting = b"part" * 3
    rows = [kept.add(ends[0], True, set()), kept.add(parting, False, set()), kept.add(ends[1], True, set())]
    assert sorted(map(int, map(str, rows))) == [8, 9, 10]
    assert kept.get(ends[0]) is not None  # used: the other end is older
    assert kept.add(ends[2], True, set()) == rows[2]
    assert kept.get(ends[1]) is None and kept.get(parting) is not None
    first = kept.get(ends[0])
    assert first is not None
    kept.part(ends[0])
    assert kept.add(ends[3], True, {first.row}) == rows[2], "of ends the oldest goes"
    pinned = {row for row in rows if row is not None}
    assert kept.add(ends[4], True, pinned) is None, "what a step reads is not replaced"
    found = kept.find(parting + ends[5])
    assert found is not None and found.tokens == parting
    kept.clear()
    assert kept.find(parting) is None and len({kept.add(each, True, set()) for each in ends[:3]}) == 3


@pytest.mark.parametrize("seed", range(6))
def test_trees_of_prompts(seed: int) -> None:
    """The fake device checks that each state is of the tokens before it."""
    rng = random.Random(seed)
    size = rng.choice([1, 3, 8, 32])
    loop = make_loop(500 // size + 40, size, rng.choice([1, 3, 12]), rng.choice([9, 40, 200]), states=True)
    prompts = branching_prompts(rng, 60, 50, 9)
    run_all(loop, prompts, [SamplingParams(max_tokens=rng.randint(1, 9)) for _ in prompts])
    assert sum(cached(loop)) > 0
    run_all(loop, prompts[-3:], [ONE] * 3)


def test_deterministic_states_are_those_of_whole_chunks() -> None:
    """Prompts are cut and begin at multiples of 64 only, and no sequence is preempted."""
    rng = random.Random(3)
    loop = make_loop(60, 8, 4, 150, 200, states=True, deterministic=True)
    shared = [rng.randrange(1, 50) for _ in range(140)]
    prompts = [[*shared[: rng.randint(50, 140)], *[each] * 30] for each in range(1, 20)]
    rows: list[tuple[int, int]] = []
    launch = loop.device.launch

    def launched(batch: Batch) -> Any:
        if batch.kind is StepKind.PREFILL:
            begins = batch.context_lens - batch.query_lens
            rows.extend(zip(begins.tolist(), batch.context_lens.tolist(), strict=True))
        return launch(batch)

    loop.device.launch = launched  # type: ignore[method-assign]
    run_all(loop, prompts, [SamplingParams(max_tokens=30, ignore_eos=True)] * len(prompts))
    lengths = set(map(len, prompts))
    assert all(begin % 64 == 0 and (end % 64 == 0 or end in lengths) for begin, end in rows)
    assert set(cached(loop)) == {0, 64, 128} and loop.scheduler.num_preemptions == 0
