"""Scheduler and BlockManager with the fake device: every output is the one that its prompt determines."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from dataclasses import replace
from typing import Any

import inside
import numpy as np
import pytest
from fake_device import EOS, VOCAB, Windows, expected_output, make_loop, make_sequence, next_token, run_all
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_scheduler

from nanovllm.batch import NOT_DRAWN, NOT_FINITE, StepKind, StepOutput
from nanovllm.extras.planned import SequenceExtras, extras_of
from nanovllm.plan.sequence import Room, SamplingTable, Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Request

PROMPTS = st.lists(
    st.builds(
        lambda shared, own: [7] * shared + own,  # many prompts share a prefix, so blocks are shared
        st.integers(0, 20),
        st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_load_gives_the_right_tokens(data: st.DataObject) -> None:
    check_any_load(data.draw)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_load_of_a_model_with_states(data: st.DataObject) -> None:
    check_any_load(data.draw, states=True)


def check_any_load(draw: Any, windows: Windows | None = None, states: bool = False) -> None:
    """Random sizes, requests, aborts and arrival times: tokens are right, invariants hold, no request is
    lost.
    """
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]), "block_size")
    deterministic = not states and draw(st.booleans(), "deterministic")
    loop = make_loop(
        deterministic=deterministic,
        num_blocks=draw(st.integers(-(-8 // block_size) + (windows is not None), 24), "num_blocks"),
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6), "max_num_seqs"),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 7, block_size, block_size + 1, 64]), "budget"),
        max_model_len=draw(st.integers(4, 48), "max_model_len"),
        caching=draw(st.booleans(), "caching"),
        run_ahead=draw(st.booleans(), "run_ahead"),
        lazy=draw(st.booleans(), "lazy"),
        windows=windows,
        states=states,
    )
    limit = loop.scheduler.room.max_model_len
    todo = [prompt[: limit - 1] for prompt in draw(PROMPTS, "prompts")]
    added, aborted = {}, {}
    while todo or not loop.scheduler.is_finished():
        if todo and (loop.scheduler.is_finished() or draw(st.booleans())):
            prompt = todo.pop()
            params = SamplingParams(max_tokens=draw(st.integers(1, 20)), ignore_eos=draw(st.booleans()))
            added[len(added)] = (prompt, params)
            loop.scheduler.add(make_sequence(len(added) - 1, prompt, params))
        loop.step()
        if added and draw(st.integers(0, 9)) == 0:
            victim = draw(st.sampled_from(sorted(added)))
            unfinished = inside.scheduler_state(loop.scheduler).unfinished
            assert (victim in unfinished) != (victim in loop.finished or victim in aborted)
            loop.scheduler.abort(victim)
            if victim in unfinished:
                aborted[victim] = unfinished[victim]
            check_scheduler(loop.scheduler)
    assert sorted([*loop.finished, *aborted]) == sorted(added)
    for seq_id, (prompt, params) in added.items():
        tokens, reason = expected_output(prompt, params, limit, windows)
        if seq_id in aborted:
            got = aborted[seq_id].completion_token_ids
            assert got == tokens[: len(got)] and aborted[seq_id].finish_reason == "abort"
        else:
            seq = loop.finished[seq_id]
            assert (seq.completion_token_ids, seq.finish_reason) == (tokens, reason)
    assert loop.scheduler.block_manager.pool.usage == 0
    assert not (deterministic and loop.scheduler.num_preemptions)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 12, 8], ids=["ample", "tight", "minimal"])
def test_preemption_keeps_every_token(num_blocks: int, run_ahead: bool) -> None:
    loop = make_loop(num_blocks=num_blocks, max_model_len=32, run_ahead=run_ahead)
    prompts = [[i + 1] * 2 for i in range(8)]
    run_all(loop, prompts, [SamplingParams(max_tokens=28, ignore_eos=True)] * 8)
    preemptions = [loop.finished[i].num_preemptions for i in range(8)]
    if num_blocks == 64:
        assert preemptions == [0] * 8
    elif num_blocks == 8:
        assert min(preemptions[2:]) >= 2, preemptions  # the oldest two can always take blocks from others


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 12, 8], ids=["ample", "tight", "minimal"])
def test_deterministic_preempts_no_sequence(num_blocks: int, run_ahead: bool) -> None:
    """As many run as have room for all their tokens."""
    loop = make_loop(num_blocks=num_blocks, max_model_len=32, run_ahead=run_ahead, deterministic=True)
    sizes: list[int] = []
    launch = loop.device.launch
    loop.device.launch = lambda batch: sizes.append(len(batch.seq_ids)) or launch(batch)  # type: ignore
    prompts = [[i + 1] * 2 for i in range(8)]
    run_all(loop, prompts, [SamplingParams(max_tokens=22, ignore_eos=True)] * 8)
    assert loop.scheduler.num_preemptions == 0
    assert max(sizes) == min(8, num_blocks // 6)


def test_admissions_leave_room_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many slots as the blocks suffice for: few tokens are computed twice, and a prefill step admits
    several sequences.
    """
    rng = random.Random(0)
    shapes = [(rng.randint(4, 40), rng.randint(4, 40)) for _ in range(150)]
    loop = make_loop(160, 16, max_num_seqs=128, max_num_batched_tokens=640, max_model_len=96, caching=False)
    batches, launch = [], loop.device.launch
    monkeypatch.setattr(loop.device, "launch", lambda batch: batches.append(batch) or launch(batch))
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length, _ in shapes]
    run_all(loop, prompts, [SamplingParams(max_tokens=out, ignore_eos=True) for _, out in shapes])
    prefills = [batch for batch in batches if batch.kind is StepKind.PREFILL]
    computed, asked = sum(len(batch.token_ids) for batch in prefills), sum(map(len, prompts))
    assert computed < 1.05 * asked
    assert len(prefills) < 20


def test_a_failed_row_ends_alone() -> None:
    loop = make_loop(run_ahead=False)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for i in range(3):
        loop.scheduler.add(make_sequence(i, [i + 1] * 5, params))
    batch = loop.scheduler.schedule()
    output = loop.device.launch(batch).result()
    output.token_ids[1] = NOT_FINITE
    loop.take(batch, output)
    (failed,) = loop.finished.values()
    assert (failed.seq_id, failed.finish_reason, failed.completion_token_ids) == (1, "error", [])
    check_scheduler(loop.scheduler)
    while not loop.scheduler.is_finished():
        loop.step()
    for i in (0, 2):
        assert loop.finished[i].completion_token_ids == expected_output([i + 1] * 5, params, 60)[0]


def test_prompts_of_one_token_are_prefill() -> None:
    loop = make_loop(run_ahead=False)
    for i in range(2):
        loop.scheduler.add(make_sequence(i, [i + 1], SamplingParams(max_tokens=2, ignore_eos=True)))
    for kind in (StepKind.PREFILL, StepKind.DECODE):
        batch = loop.scheduler.schedule()
        assert (batch.kind, len(batch.token_ids), batch.draws.tolist()) == (kind, 2, [1, 1])
        loop.scheduler.postprocess(batch, loop.device.launch(batch).result())
    assert loop.scheduler.is_finished()


def test_several_tokens_of_a_row() -> None:
    """All valid tokens are taken, up to the one that ends the output."""
    loop = make_loop(run_ahead=False)
    for i, max_tokens in enumerate([9, 9, 2]):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        loop.scheduler.add(make_sequence(i, [i + 1] * 5, params))
    batch = replace(loop.scheduler.schedule(), draws=np.full(3, 3, np.int32))
    running = list(loop.scheduler.running.values())
    for seq in running:
        seq.num_pending_tokens = 3
    output = StepOutput(np.array([[10, 11, 12], [13, NOT_DRAWN, NOT_DRAWN], [16, 17, 18]]))
    events = loop.scheduler.postprocess(batch, output)
    assert [seq.completion_token_ids for seq in running] == [[10, 11, 12], [13], [16, 17]]
    assert (events.seq_ids, events.token_ids) == ([0, 1, 2, 0, 2, 0], [10, 13, 16, 11, 17, 12])
    assert events.finish_reasons == {2: "length"} and running[2].finish_reason == "length"
    assert [seq.num_pending_tokens for seq in running[:2]] == [0, 0]


def test_what_can_never_fit_is_refused() -> None:
    loop = make_loop(num_blocks=2, block_size=4, max_model_len=60)
    with pytest.raises(ValueError, match="8 tokens, and at most 7 leave room for one more"):
        loop.scheduler.add(make_sequence(0, [1] * 8, SamplingParams()))
    run_all(
        loop, [[1] * 7], [SamplingParams(max_tokens=9, ignore_eos=True)]
    )  # one more token fits, and no other
    assert len(loop.finished[0].completion_token_ids) == 1


@pytest.mark.parametrize("length", [15, 16, 17])
def test_prompt_and_output_are_at_most_max_model_len(length: int) -> None:
    loop = make_loop(max_model_len=18)
    for max_tokens in (1, 2, 50, None):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        seq = make_sequence(len(loop.finished), [5] * length, params)
        loop.scheduler.add(seq)
        while not loop.scheduler.is_finished():
            loop.step()
        assert seq.finish_reason == "length"
        assert len(seq.token_ids) == min(18, length + (18 if max_tokens is None else max_tokens))
    with pytest.raises(ValueError, match="18 tokens, and at most 17 leave room"):
        loop.scheduler.add(make_sequence(99, [5] * 18, SamplingParams(max_tokens=1)))


@pytest.mark.parametrize(
    ("num_blocks", "asked", "longest", "length", "advice"),
    [
        (99, 16, 64, 20, r"\(max_model_len=16\); shorten it, or raise max_model_len \(up to 64\)$"),
        (99, 16, 64, 64, r"\(max_model_len=16, and the model's own limit is 64\); shorten it$"),
        (99, 64, 64, 64, r"\(max_model_len=64, and the model's own limit is 64\); shorten it$"),
        (99, 64, None, 70, r"\(max_model_len=64, and the model's own limit is 64\); shorten it$"),
        (
            3,
            64,
            64,
            20,
            r"\(the KV cache has 3 blocks of 4 tokens\); shorten it, or raise num_kvcache_blocks or "
            r"gpu_memory_utilization$",
        ),
        (
            3,
            32,
            64,
            40,
            r"or raise num_kvcache_blocks or gpu_memory_utilization and max_model_len \(up to 64\)$",
        ),
        (3, 32, 64, 70, r"of 4 tokens, and the model's own limit is 64\); shorten it$"),
    ],
)
def test_errors_of_long_prompts_name_the_fix(
    num_blocks: int, asked: int, longest: int | None, length: int, advice: str
) -> None:
    with pytest.raises(ValueError, match=advice):
        Room(num_blocks, 4, asked, longest).check_fits(length)
    on_cpu = Room(num_blocks, 4, asked, longest, "kv_cache_memory_bytes")
    own = advice.replace("num_kvcache_blocks or gpu_memory_utilization", "kv_cache_memory_bytes")
    with pytest.raises(ValueError, match=own):
        on_cpu.check_fits(length)


def test_running_never_exceeds_max_num_seqs_and_order_is_kept() -> None:
    loop = make_loop(max_num_seqs=3)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for i in range(10):
        loop.scheduler.add(make_sequence(i, [i + 1] * 3, params))
    while not loop.scheduler.is_finished():
        loop.step()
        assert len(loop.scheduler.running) <= 3
    assert list(loop.finished) == list(range(10))


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_full_batch_of_last_steps_does_not_keep_the_next_one_waiting(max_tokens: int) -> None:
    """All sequences complete in one step. The next step is planned before that one is read."""
    loop = make_loop(max_num_seqs=4)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i in range(12):
        loop.scheduler.add(make_sequence(i, [i + 1] * 3, params))
    read = 0
    while not loop.scheduler.is_finished():
        queued = len(loop.scheduler.waiting)
        batch = loop.scheduler.schedule()
        assert batch is not None or not queued, "the device would wait"
        launched = None if batch is None else (batch, loop.device.launch(batch))
        launched, loop.in_flight = loop.in_flight, launched
        if launched is not None:
            loop.take(launched[0], launched[1].result())
            check_scheduler(loop.scheduler)
            read += 1
    assert read == 3 * max_tokens
    assert [len(loop.finished[i].completion_token_ids) for i in range(12)] == [max_tokens] * 12


def test_admission_waits_for_several_free_slots_while_many_decode() -> None:
    loop = make_loop(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=1024, run_ahead=False)
    for i in range(64):  # they end one by one
        loop.scheduler.add(
            make_sequence(i, [i % 40 + 1] * 3, SamplingParams(max_tokens=4 + i, ignore_eos=True))
        )
    admitted = []
    while not loop.scheduler.is_finished():
        waiting = len(loop.scheduler.waiting)
        loop.step()
        if len(loop.scheduler.waiting) < waiting:
            admitted.append(waiting - len(loop.scheduler.waiting))
    assert admitted[0] == 32 and min(admitted[1:-1]) >= 2, admitted


def test_stop_token_ids_and_eos() -> None:
    loop = make_loop(run_ahead=True)
    prompt = [3, 1, 4]
    tokens, _ = expected_output(prompt, SamplingParams(max_tokens=20, ignore_eos=True), 60)
    stop = tokens[5]
    seq = make_sequence(0, prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    seq.stop_ids = frozenset({stop})
    loop.scheduler.add(seq)
    while not loop.scheduler.is_finished():
        loop.step()
    end = tokens.index(stop) + 1
    assert seq.completion_token_ids == tokens[:end]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", stop)


def test_the_fake_model_can_end() -> None:
    """Otherwise no test above would see EOS."""
    rng = np.random.default_rng(0)
    assert any(next_token(rng.integers(1, VOCAB, 5).tolist()) == EOS for _ in range(500))


def test_plan_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import nanovllm, nanovllm.config, nanovllm.plan.scheduler, nanovllm.text.prompts"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_slot_has_the_parameters_of_its_last_sequence() -> None:
    plain = SamplingParams(temperature=0.5)
    biased = SamplingParams(logit_bias={3: 2.0}, logprob_token_ids=[4, 5], presence_penalty=1.0)
    table, found, one = SamplingTable(2), [], np.array([1])
    for seed, params in enumerate((plain, plain, biased, biased, plain, biased, plain, plain)):
        seq = Sequence(seed, array("i", [5, 6]), params, seed)
        if params is biased:
            request = Request(seed, None, seq.prompt_ids, params, frozenset(), (), None)
            seq.extras = SequenceExtras.of(request, 0, Processor(None, 8, []))
        seq.slot = seed % 2
        table.set(seq)
        columns, extras = table.take(np.array([seq.slot]), np.array([2])), extras_of([seq], one, one)
        assert columns.seeds.tolist() == [seed] and columns.temperature.tolist() == [params.temperature]
        assert (extras is None) == (params is plain)
        found.append(extras)
    for extras in (found[2], found[3], found[5]):
        assert extras.bias.token_ids.tolist() == [3] and extras.bias.values.tolist() == [2.0]
        assert extras.asked_ids.tolist() == [[4, 5]] and extras.num_logprobs == 0
        assert extras.penalties.presence.tolist() == [1.0] and extras.penalties.history_ids.tolist() == [5, 6]
