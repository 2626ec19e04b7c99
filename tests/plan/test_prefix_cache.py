"""The prefix cache with the fake device: it shares every block that it can, and none with another content."""

from __future__ import annotations

from typing import Any

import pytest
from fake_device import Handle, Windows, make_loop, make_sequence, run_all, want_states
from invariants import check_scheduler

from nanovllm.batch import Batch, StepKind
from nanovllm.plan import prefix_tree
from nanovllm.plan.prefix_tree import ROOT
from nanovllm.sampling_params import SamplingParams


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_full_prefix_hit_still_computes_a_token(length: int) -> None:
    loop = make_loop()
    prompt, params = list(range(1, length + 1)), SamplingParams(max_tokens=3, ignore_eos=True)
    first = run_all(loop, [prompt], [params])
    assert run_all(loop, [prompt], [params]) == first
    hit = loop.finished[1].num_cached_tokens
    assert hit == length - 1


def test_identical_prompts_in_one_batch() -> None:
    loop = make_loop()
    run_all(loop, [[5, 6, 7, 8, 9]] * 5, [SamplingParams(max_tokens=9, ignore_eos=True)] * 5)


def test_what_prompts_of_one_step_share_is_computed_once() -> None:
    loop = make_loop(max_num_batched_tokens=20)
    shared, params = list(range(1, 13)), SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [[*shared, 20], [*shared, 21, 22], [30, 31, 32], [*shared, 23]]
    for seq_id, prompt in enumerate(prompts):
        loop.scheduler.add(make_sequence(seq_id, prompt, params))
    batch = loop.scheduler.schedule()
    assert batch.query_lens.tolist() == [13, 2, 3, 1] and batch.context_lens.tolist() == [13, 14, 3, 13]
    assert (batch.tables[0][[1, 3], :3] == batch.tables[0][0, :3]).all()
    check_scheduler(loop.scheduler)
    loop = make_loop(max_num_batched_tokens=20)
    run_all(loop, prompts, [params] * 4)
    assert [loop.finished[i].num_cached_tokens for i in range(4)] == [0, 12, 0, 12]


def test_a_scored_sequence_that_is_preempted_finds_its_output_in_the_cache() -> None:
    """Its prompt is scored before the preemption, and is not computed again to score it."""
    loop = make_loop(num_blocks=14, max_model_len=40)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for seq_id, prompt in enumerate(([1, 2, 3, 4], [5, 6, 7, 8, 9])):
        seq = make_sequence(seq_id, prompt, params)
        want_states(seq, 0)
        loop.scheduler.add(seq)
    cached, launch = [], loop.device.launch

    def recorded(batch: Batch) -> Handle:
        if batch.kind is StepKind.PREFILL and batch.seq_ids == (1,):
            cached.append(int(batch.context_lens[0] - batch.query_lens[0]))
        return launch(batch)

    loop.device.launch = recorded  # type: ignore[method-assign]
    while not loop.scheduler.is_finished():
        loop.step()
    assert len(cached) == loop.finished[1].num_preemptions > 0 and min(cached) > 5, cached


@pytest.mark.parametrize(
    "kind", [{}, {"windows": Windows(24)}, {"windows": Windows(24, 2)}, {"states": True}], ids=str
)
@pytest.mark.parametrize("at_once", [False, True])
def test_sequences_share_with_those_of_their_root(kind: dict[str, Any], at_once: bool) -> None:
    """As their K/V and states differ, though their tokens are equal."""
    loop = make_loop(400, 4, 8, 100, 100, **kind)
    prompt, params = list(range(1, 40)), SamplingParams(max_tokens=6, ignore_eos=True)
    roots = [ROOT, -2, -3, ROOT, -3, -2, -2, ROOT]
    for seq_id, root in enumerate(roots):
        loop.scheduler.add(make_sequence(seq_id, prompt, params, root))
        while not (at_once or loop.scheduler.is_finished()):
            loop.step()
    while not loop.scheduler.is_finished():
        loop.step()
    found = [loop.finished[seq_id].num_cached_tokens for seq_id in range(len(roots))]
    first = 2 if kind.get("states") and not at_once else 1  # a second prompt shows where a state is needed
    earlier = [roots[:place].count(root) for place, root in enumerate(roots)]
    assert found == [len(prompt) - 1 if count >= first else 0 for count in earlier]
    assert len({tuple(loop.finished[seq_id].completion_token_ids) for seq_id in range(len(roots))}) == 1


def test_the_cache_is_used_and_can_be_turned_off() -> None:
    prompt, params = list(range(1, 30)), SamplingParams(max_tokens=2, ignore_eos=True)
    for caching, cached in [(True, 28), (False, 0)]:
        loop = make_loop(caching=caching)
        run_all(loop, [prompt], [params])
        run_all(loop, [prompt], [params])
        assert loop.finished[1].num_cached_tokens == cached


def test_least_recently_used_blocks_are_reused_first() -> None:
    loop = make_loop(num_blocks=6, max_model_len=24)
    params = SamplingParams(max_tokens=1)
    old, new = [1] * 9, [2] * 9
    # Each leaves two cached blocks, six in total, and there are six blocks.
    for prompt in (old, new, [3] * 9):
        run_all(loop, [prompt], [params])
    run_all(loop, [new], [params])
    assert loop.finished[3].num_cached_tokens == 8
    run_all(loop, [old], [params])
    assert loop.finished[4].num_cached_tokens < 8


def test_hash_collisions_never_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "block_key", lambda parent, tokens: 7)
    loop = make_loop()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    run_all(loop, [[i] * 9 for i in range(1, 9)], [params] * 8)
    run_all(loop, [[i] * 9 for i in range(1, 9)], [params] * 8)


def test_nothing_is_shared_behind_a_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first blocks collide, the second ones do not. The loser's second block must not follow the winner's
    first.
    """
    original = prefix_tree.block_key
    monkeypatch.setattr(
        prefix_tree, "block_key", lambda parent, tokens: original(parent, tokens if parent else b"")
    )
    loop = make_loop()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    run_all(loop, [[1] * 4 + [8]], [params])
    run_all(loop, [[2] * 4 + [9] * 4 + [5]], [params])
    run_all(loop, [[1] * 4 + [9] * 4 + [5]], [params])
    assert loop.finished[2].num_cached_tokens == 4


def test_the_end_of_a_prompt_is_reused_before_its_beginning() -> None:
    loop = make_loop(num_blocks=8, max_model_len=32)
    params = SamplingParams(max_tokens=1)
    prompt = list(range(1, 26))
    run_all(loop, [prompt], [params])  # six full blocks stay cached, one block is free
    run_all(
        loop, [[40] * 14], [params]
    )  # takes four: the free one, the seventh, and the last two cached ones
    run_all(loop, [prompt], [params])
    assert loop.finished[2].num_cached_tokens == 16


def test_a_block_after_another_parent_is_no_hit() -> None:
    """Equal tokens after a different prefix, with a hash that ignores the parent: the chain id decides."""
    loop = make_loop()
    params = SamplingParams(max_tokens=1)
    original = prefix_tree.block_key
    prefix_tree.block_key = lambda parent, tokens: original(0, tokens)
    try:
        run_all(loop, [[1] * 4 + [9] * 4 + [5]], [params])
        run_all(loop, [[2] * 4 + [9] * 4 + [5]], [params])
        run_all(loop, [[9] * 4 + [5]], [params])
    finally:
        prefix_tree.block_key = original
    assert [loop.finished[i].num_cached_tokens for i in range(3)] == [0, 0, 0]


def test_abort_between_chunks_shares_only_what_was_computed() -> None:
    loop = make_loop(max_num_batched_tokens=6, run_ahead=False)
    prompt, params = list(range(1, 25)), SamplingParams(max_tokens=2)
    loop.scheduler.add(make_sequence(0, prompt, params))
    loop.step()
    assert loop.scheduler.prefilling is not None
    loop.scheduler.abort(0)
    check_scheduler(loop.scheduler)
    loop.finished[0] = None
    run_all(loop, [prompt], [params])
    assert loop.finished[1].num_cached_tokens == 6  # a full block, and two cells
