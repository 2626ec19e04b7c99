"""A prompt is computed from the token on where it parts from all others: counted against a brute-force tree.

The fake device fills its cache with poison, copies cells as `Batch.copies` says, and runs steps as late as
possible; `Loop` checks the blocks after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import inside
import numpy as np
import pytest
from fake_device import VOCAB, Loop, Windows, make_loop, make_sequence, run_all, want_states
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cases import branching_prompts, common, must_compute, share_whole_blocks_only

from nanovllm.batch import Batch
from nanovllm.plan.prefix_tree import PrefixTree, num_common
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Brute:
    """What a loop's prefix cache holds at least and at most, as plain lists of tokens. It checks each
    admission of an engine with ample memory."""

    def __init__(self, loop: Loop, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.held: list[list[int]] = []
        self.computed, self.cached = 0, 0  # tokens of prompts
        self._scheduler = loop.scheduler
        manager = loop.scheduler.block_manager
        self._allocate, self._free = manager.allocate, manager.free
        manager.allocate, manager.free = self.allocate, self.free  # type: ignore[method-assign]

    def allocate(self, seq: Sequence, spare: int = 0) -> bool:
        prompt = list(seq.token_ids)
        most = len(prompt) - 1 if seq.extras is None else seq.extras.most_cached(len(prompt) - 1)
        running = [
            each.token_ids for each in (*self._scheduler.running.values(), *self._scheduler.ending.values())
        ]
        least, top = (
            min(most, max((common(prompt, each) for each in held), default=0))
            for held in (self.held, self.held + running)
        )
        if not self._allocate(seq, spare):
            return False
        assert least <= seq.num_computed_tokens <= top, f"{prompt}: {seq.num_computed_tokens} found"
        self.held.append(prompt)
        self.cached += seq.num_computed_tokens
        self.computed += len(prompt) - seq.num_computed_tokens
        return True

    def free(self, seq: Sequence) -> None:
        known = min(seq.num_computed_tokens, len(seq.token_ids))
        self.held.append(seq.token_ids[:known])
        self._free(seq)


def count_tokens(loop: Loop) -> list[Batch]:
    """The batches of a loop, as they are launched."""
    batches: list[Batch] = []
    launch: Callable[[Batch], Any] = loop.device.launch

    def launch_counted(batch: Batch) -> Any:
        batches.append(batch)
        return launch(batch)

    loop.device.launch = launch_counted  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("windows", [None, Windows(20), Windows(20, 3)], ids=["full", "near", "both"])
@pytest.mark.parametrize("budget", [7, 64, 4096])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64, 256])
def test_the_tree_of_all_prompts_is_computed_once(
    block_size: int, budget: int, windows: Windows | None
) -> None:
    """In one step or in several, with rows that copy what earlier rows of their step copied or computed."""
    prompts = branching_prompts(random.Random(block_size), 60, 300, VOCAB)
    blocks = sum(-(-len(prompt) // block_size) + 1 for prompt in prompts)
    loop = make_loop(2 * blocks, block_size, 60, budget, 320, windows=windows)
    batches, brute = count_tokens(loop), Brute(loop)
    run_all(loop, prompts, [ONE] * len(prompts))
    computed = sum(len(batch.token_ids) for batch in batches)
    assert computed == must_compute(prompts) == brute.computed
    assert sum(loop.finished[i].num_cached_tokens for i in loop.finished) == brute.cached
    assert loop.scheduler.block_manager.num_cached_tokens == brute.cached
    assert sum(map(len, prompts)) == computed + brute.cached
    copied = [batch.copies[0] for batch in batches if batch.copies]
    assert bool(copied) == (block_size > 1)
    if budget == 4096 and block_size > 16:
        targets = np.concatenate([copies[:, 1] for copies in copied])
        assert len(np.unique(targets)) < len(targets), "no row copies from two blocks"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_load_finds_all_that_is_held(data: st.DataObject) -> None:
    """Prompts that branch, samples of one prompt, chats that go on, scored prompts, late arrivals."""
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]), "block_size")
    loop = make_loop(
        num_blocks=400,
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6), "max_num_seqs"),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 7, 16, 64, 200]), "budget"),
        max_model_len=60,
        run_ahead=draw(st.booleans(), "run_ahead"),
        windows=draw(st.sampled_from([None, Windows(17), Windows(17, 1), Windows(30, 3)]), "windows"),
    )
    Brute(loop)
    rng = random.Random(draw(st.integers(0, 2**20), "seed"))
    todo = branching_prompts(
        rng, draw(st.integers(1, 12), "prompts"), draw(st.sampled_from([9, 40]), "longest"), VOCAB
    )
    added = 0
    while todo or not loop.scheduler.is_finished():
        if todo and (loop.scheduler.is_finished() or rng.random() < 0.5):
            prompt = todo.pop(0)
            if loop.finished and rng.random() < 0.3:
                prompt = [*rng.choice([*loop.finished.values()]).token_ids, *prompt][:50]
            params = SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=rng.random() < 0.7)
            for _ in range(rng.choice([1, 1, 3])):
                seq = make_sequence(added, prompt, params)
                want_states(seq, rng.randrange(len(prompt)) if rng.random() < 0.2 else None)
                loop.scheduler.add(seq)
                added += 1
        loop.step()
    assert len(loop.finished) == added
    assert all(seq.num_preemptions == 0 for seq in loop.finished.values())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_chat_that_goes_on_computes_what_is_new(deterministic: bool) -> None:
    """The last token drawn is never computed. With `deterministic` what decode computed is not found."""
    loop = make_loop(100, 16, max_model_len=200, deterministic=deterministic)
    history: list[int] = list(range(1, 30))
    for turn in range(5):
        [answer] = run_all(loop, [history], [SamplingParams(max_tokens=7, ignore_eos=True)])
        found = loop.finished[turn].num_cached_tokens
        assert found == (0 if turn == 0 else len(history) - (4 if not deterministic else 10))
        history = [*history, *answer, 41, 42, 43]


def test_samples_of_a_prompt_compute_its_last_token() -> None:
    loop = make_loop(100, 16, max_num_seqs=8)
    batches = count_tokens(loop)
    run_all(loop, [list(range(1, 40))] * 5, [SamplingParams(max_tokens=3, ignore_eos=True)] * 5)
    assert batches[0].query_lens.tolist() == [39, 1, 1, 1, 1][: len(batches[0].query_lens)]
    assert sum(batch.query_lens.sum() for batch in batches if len(batch.token_ids) > 5) <= 39 + 4


def test_tokens_whose_hidden_states_are_wanted_are_computed() -> None:
    loop = make_loop(100, 16, max_num_seqs=8)
    prompt = list(range(1, 40))
    for seq_id, wanted in enumerate([None, 0, 5, 21, 38, None]):
        seq = make_sequence(seq_id, prompt, ONE)
        want_states(seq, wanted)
        loop.scheduler.add(seq)
        while not loop.scheduler.is_finished():
            loop.step()
        expected = [0, 0, 5, 21, 38, 38][seq_id]
        assert loop.finished[seq_id].num_cached_tokens == expected


@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_end_of_sequence_one_step_late_offers_only_known_tokens(run_ahead: bool) -> None:
    """The surplus row writes cells after those that are known; nobody finds these."""
    loop = make_loop(400, 16, max_model_len=200, run_ahead=run_ahead)
    brute, rng = Brute(loop), random.Random(3)
    prompts = branching_prompts(rng, 40, 60, VOCAB)
    run_all(loop, prompts, [SamplingParams(max_tokens=60) for _ in prompts])
    assert any(seq.finish_reason == "stop" for seq in loop.finished.values())
    ended = [seq.token_ids for seq in loop.finished.values()]
    run_all(loop, [[*each, 7] for each in ended], [ONE] * len(ended))
    assert brute.cached > sum(map(len, prompts)) / 2


def test_an_abort_between_chunks_offers_what_was_computed() -> None:
    loop = make_loop(max_num_batched_tokens=6, run_ahead=False)
    Brute(loop)  # its list of held prompts has the whole one, so it is not asked again
    loop.scheduler.add(make_sequence(0, list(range(1, 25)), ONE))
    loop.step()
    loop.scheduler.abort(0)
    nearest, count = inside.block_state(loop.scheduler.block_manager).tree.nearest(
        0, np.arange(1, 5, dtype=np.int32).tobytes()
    )
    assert nearest is not None and count == 4


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_blocks", [8, 12, 20, 30])
def test_under_pressure_no_more_is_computed_than_with_whole_blocks(
    num_blocks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    prompts = branching_prompts(rng, 60, 40, VOCAB)
    params = [SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True) for _ in prompts]
    computed = []
    for whole in (True, False):
        with monkeypatch.context() as patch:
            if whole:
                share_whole_blocks_only(patch)
            loop = make_loop(num_blocks, 8, 8, 64, 62)
            batches = count_tokens(loop)
            run_all(loop, prompts, params)
            computed.append(sum(len(batch.token_ids) for batch in batches if (batch.token_ids >= 0).all()))
    assert computed[1] <= computed[0], computed


def test_parts_of_blocks_are_reused_before_whole_ones() -> None:
    """A full block may be the parent of others; the first cells of one are not."""
    loop = make_loop(num_blocks=8, max_model_len=32)
    first, second = list(range(1, 11)), list(range(20, 30))  # two full blocks and two cells each
    run_all(loop, [first], [ONE])
    run_all(loop, [second], [ONE])
    run_all(loop, [[40] * 14], [ONE])  # takes two empty blocks, and the two parts
    run_all(loop, [[*first, 3], [*second, 3]], [ONE] * 2)
    assert [loop.finished[i].num_cached_tokens for i in (3, 4)] == [8, 8]


def test_the_source_of_a_copy_is_not_handed_out_in_its_step() -> None:
    """It belongs to nobody, and the row that copies it takes all other blocks."""
    loop = make_loop(num_blocks=3, block_size=8, max_model_len=24)
    run_all(loop, [[1, 2, 3, 4, 5]], [ONE])
    loop.scheduler.add(make_sequence(1, [1, 2, 3, *[9] * 12], ONE))  # two blocks: the source is the third
    batch = loop.scheduler.schedule()
    assert batch is not None and batch.copies
    [[source, target, first, cells]] = batch.copies[0].tolist()
    assert (first, cells) == (0, 3) and source not in batch.tables[0] and target == batch.tables[0][0, 0]


def test_without_room_for_its_source_nothing_is_copied() -> None:
    loop = make_loop(num_blocks=3, block_size=8, max_model_len=24)
    run_all(loop, [[1, 2, 3, 4, 5]], [ONE])
    run_all(loop, [[1, 2, 3, *[9] * 19]], [ONE])  # three blocks: all
    assert loop.finished[1].num_cached_tokens == 0


def test_the_tree_forgets_blocks_that_are_reused() -> None:
    """Also after `reset`; at the end nothing is left of either."""
    loop = make_loop(num_blocks=12, block_size=8, max_model_len=48, max_num_seqs=4)
    rng = random.Random(0)
    run_all(loop, branching_prompts(rng, 80, 40, VOCAB), [ONE] * 80)
    tree = inside.block_state(loop.scheduler.block_manager).tree
    assert 0 < len(list(tree)) <= 12
    assert loop.scheduler.block_manager.reset()
    assert list(tree) == [] and tree.nearest(0, b"1234") == (None, 0)
    run_all(loop, branching_prompts(rng, 80, 40, VOCAB), [ONE] * 80)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 300), max_size=6), min_size=2, max_size=12)
)
def test_the_nearest_block_has_most_in_common(blocks: list[list[int]]) -> None:
    """Of any token ids, whose bytes are in another order than their values."""
    tree, added = PrefixTree(), []
    *blocks, asked = blocks
    for number, tokens in enumerate(filter(None, blocks)):
        if (found := tree.add_partial(number, 0, as_bytes(tokens))) is not None:
            added.append(found)
    most = max((common(tokens, asked) for tokens in blocks), default=0)
    nearest, count = tree.nearest(0, as_bytes(asked))
    assert count == most and (nearest is None) == (most == 0)
    assert all(num_common(as_bytes(one), as_bytes(asked)) == common(one, asked) for one in blocks)
    for each in added:
        tree.remove(each)
    assert list(tree) == []


def as_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()
