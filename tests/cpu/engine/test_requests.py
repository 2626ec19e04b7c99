"""Requests and outputs: lengths, parameters, prompts and completions."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import Bar, make_tiny, run
from tiny_models import VOCAB_SIZE, edit_json, write_tiny_model
from transformers import BatchEncoding

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.batch import NOT_FINITE, Batch
from nanovllm.engine.requests import sequence_seed
from nanovllm.jobs.params import make_params
from nanovllm.runner.inputs import PendingOutput
from nanovllm.sampling_params import Default
from nanovllm.text.prompts import parse_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=96)


# -- lengths -------------------------------------------------------------------------------------------------


def test_the_default_length_is_the_models_own(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for asked in (None, -1, "auto", 1000):
        with make_tiny(model, max_model_len=asked) as llm:
            assert inside.runner(llm).max_model_len == 96
    chunks = {"dual_chunk_attention_config": {"chunk_size": 48, "local_size": 8}}
    path = write_tiny_model(tmp_path, "qwen2", max_position_embeddings=96)
    edit_json(path / "config.json", **chunks)
    with caplog.at_level(logging.INFO, "nanovllm"), make_tiny(path, max_model_len=None) as llm:
        assert inside.runner(llm).max_model_len == 40
    assert "max_model_len is 40, not the model's 96: longer sequences need its dual chunk" in caplog.text
    with pytest.raises(ValueError, match="dual chunk attention"):
        make_tiny(path, max_model_len=41)


# -- parameters ----------------------------------------------------------------------------------------------


def test_options_of_torch(model: Path) -> None:
    with make_tiny(model, dtype=torch.bfloat16, device=torch.device("cpu")) as llm:
        assert inside.runner(llm).dtype == torch.bfloat16 and llm.config.device == "cpu"


def test_max_tokens_none_is_what_fits(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    huge = SamplingParams(temperature=0, max_tokens=10**400, ignore_eos=True)
    with make_tiny(model, max_model_len=32) as llm:
        for output in llm.generate([[5] * 10] * 2, [params, huge], use_tqdm=False):
            assert output["finish_reason"] == "length"
            assert len(output["token_ids"]) == 22


def test_a_request_keeps_its_own_parameters(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with make_tiny(model) as llm:
        llm.add_request([5, 6], params)
        params.max_tokens, params.temperature = 9, "hot"
        assert [len(output["token_ids"]) for output in run(llm)] == [4]
        with pytest.raises(TypeError, match="sampling_params: temperature must be a number"):
            llm.add_request([5, 6], params)
        with pytest.raises(TypeError, match=r"sampling_params\[1\]: temperature must be a number"):
            llm.generate([[5], [6]], [GREEDY, params], use_tqdm=False)
        params.temperature, params.stop_token_ids = 0, [VOCAB_SIZE]
        with pytest.raises(ValueError, match=rf"prompts\[1\]: stop_token_ids: token id {VOCAB_SIZE}"):
            llm.generate([[5], [6]], [GREEDY, params], use_tqdm=False)
        assert llm.is_finished()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_parameters_of_a_row_fail_alone(model: Path, run_ahead: bool) -> None:
    """A wrong object in a list, and a logits processor that raises or returns something else."""
    calls, six = 0, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def third(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return logits / (len(ids) < 2 or 1 // 0)

    def processed(*functions: Any, **values: Any) -> SamplingParams:
        return SamplingParams(
            **{"temperature": 0, "max_tokens": 6, "logits_processors": [*functions]} | values
        )

    def same(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + 0

    changed = SamplingParams()
    changed.temperature = -1
    twice = processed(third)
    rows: list[tuple[Any, str]] = [
        (six, ""),
        (changed, "sampling_params[1]: temperature must be 0 for greedy or a positive number, not -1"),
        (None, "sampling_params[2] must be SamplingParams, not None (NoneType)"),
        (twice, "logits_processors[0]: ZeroDivisionError: "),
        (processed(same, ignore_eos=True), ""),
        (twice, "logits_processors[0]: ZeroDivisionError: "),
        (processed(same, lambda ids, logits: None), "[1]: TypeError: the logits processor <function"),
        (processed(same, lambda prompt, ids, logits: logits[:2], same), "must return logits of shape (97,)"),
        (processed(third, temperature=1, n=3), "logits_processors[0]: ZeroDivisionError: "),
        (six, ""),
    ]
    prompts, params = [[5, 6, 7]] * len(rows), [each for each, _ in rows]
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        expected = llm.generate(prompts[0], six, use_tqdm=False)[0]["token_ids"]
        parts = list(llm.stream(prompts, iter(params), on_error="return", deltas=True))
        for call in (llm.generate, llm.stream):
            calls = 0
            outputs = sorted(call(prompts, params, on_error="return"), key=lambda output: output.index)
            assert [output.index for output in outputs] == list(range(len(rows)))
            for output, (_, error) in zip(outputs, rows, strict=True):
                last = [part for part in parts if part.index == output.index][-1]
                assert (last.error, last.finished) == (output.error, True)
                assert {each.finish_reason for each in output.outputs} == {"error" if error else "length"}
                assert error in (output.error or "")
                if not error:
                    assert output.error is None and output["token_ids"] == expected
            assert [len(each.token_ids) for each in outputs[8].outputs] == [2] * 3 and calls == 5 * 3
            assert llm.is_finished() and inside.block_manager(llm).pool.usage == 0
            for bad, error in ((changed, ValueError), (None, TypeError), (twice, ZeroDivisionError)):
                with pytest.raises(error):
                    list(call(prompts[:2], [six, bad]))
                assert llm.is_finished() and inside.block_manager(llm).pool.usage == 0
            with pytest.raises(ValueError, match="temperature must be"):
                list(call(prompts[:2], changed, on_error="return"))  # no row's own


def test_most_answers_that_end_at_the_default_length_are_said(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a call, and only for a length that nobody chose."""
    assert isinstance(SamplingParams().max_tokens, Default) and SamplingParams() == SamplingParams(
        max_tokens=64
    )
    prompts, default = [[5, 6, 7]] * 4, SamplingParams(max_tokens=Default(3), ignore_eos=True)
    chosen = SamplingParams(max_tokens=3, ignore_eos=True)
    changed = default.clone()
    changed.max_tokens = 3
    said = (
        "4 of 4 answers were cut off at the default of 64 tokens; set max_tokens of SamplingParams for longer"
    )
    half, longest = [default] * 2 + [chosen] * 2, [5] * (96 - 63)
    copies = [copy.deepcopy(default), pickle.loads(pickle.dumps(default)), make_params({"top_k": 1}, default)]
    with make_tiny(model, max_model_len=96) as llm:
        for params, count in ((default, 1), (chosen, 0), (changed, 0), (half, 0), ([*copies, default], 1)):
            for call in (
                lambda params: llm.generate(prompts, params, use_tqdm=False),
                lambda params: list(llm.stream(prompts, params)),
                lambda params: list(llm.stream(prompts, params, deltas=True)),
            ):
                caplog.clear()
                call(params)
                assert len(caplog.messages) == count, params
                assert not count or caplog.messages[0].startswith(said)
        caplog.clear()
        llm.generate([longest] * 4, default, use_tqdm=False)  # what fits ends them
        llm.generate([longest[:-1], *[[]] * 2], default, use_tqdm=False, on_error="return")
        next(iter(llm.stream(prompts, default)))
        llm.embed(prompts, use_tqdm=False)
        assert not caplog.messages
        llm.generate(prompts[0], SamplingParams(n=3, max_tokens=Default(3), ignore_eos=True), use_tqdm=False)
        assert "3 of 3 answers" in caplog.text


def test_which_calls_work_while_a_stream_is_open(model: Path, tmp_path: Path) -> None:
    """Every public call; `stream` and README say it."""
    with make_tiny(model) as llm:
        stream = llm.stream([[5]] * 30, GREEDY)
        next(stream)
        beams = BeamSearchParams(beam_width=2, max_tokens=2)
        refused = {
            "generate": lambda: llm.generate([5], GREEDY),
            "stream": lambda: next(iter(llm.stream([[5]], GREEDY))),
            "score": lambda: llm.score([5], [[6]]),
            "score_pairs": lambda: llm.score_pairs([([5], [6])]),
            "embed": lambda: llm.embed([5]),
            "encode": lambda: llm.encode([5], pooling_task="token_embed"),
            "beam_search": lambda: llm.beam_search([5], beams),
            "add_request": lambda: llm.add_request([5], GREEDY),
            "step": llm.step,
            "sleep": llm.sleep,
            "wake_up": llm.wake_up,
            "update_weights": lambda: llm.update_weights({}),
            "map": lambda: llm.map([{"a": [5]}], GREEDY, prompt="a"),
            "enqueue": lambda: llm.enqueue([5], GREEDY),
            "wait_for_completion": llm.wait_for_completion,
            "apply_model": lambda: llm.apply_model(len),
            "collective_rpc": lambda: llm.collective_rpc(len),
        }
        for call in refused.values():
            with pytest.raises(RuntimeError, match="a stream of this engine is open"):
                call()
        working = {
            "abort": lambda: llm.abort("5"),
            "reset_prefix_cache": llm.reset_prefix_cache,
            "start_profile": lambda: llm.start_profile(tmp_path),
            "stop_profile": llm.stop_profile,
            "stats": llm.stats,
            "get_metrics": llm.get_metrics,
            "is_finished": llm.is_finished,
            "has_unfinished_requests": llm.has_unfinished_requests,
            "get_num_unfinished_requests": llm.get_num_unfinished_requests,
            "get_world_size": llm.get_world_size,
            "is_sleeping": llm.is_sleeping,
            "get_default_sampling_params": llm.get_default_sampling_params,
        }
        for call in working.values():
            call()
        assert next(stream).finished
        public = {name for name in dir(LLM) if not name.startswith("_") and callable(getattr(LLM, name))}
        needs_a_tokenizer = {"chat", "enqueue_chat", "get_tokenizer"}
        needs_a_head = {"classify", "reward"}
        closing = {"close", "exit", "shutdown", "from_pretrained", "from_engine_args"}
        assert public == {*refused, *working} | needs_a_tokenizer | needs_a_head | closing
        llm.close()


# -- several completions ------------------------------------------------------------------------------------


# About every fourth token ends a completion.
ENDING = SamplingParams(n=3, temperature=1, seed=3, max_tokens=24, stop_token_ids=range(VOCAB_SIZE // 4))
LIKELIEST = SamplingParams(n=3, top_k=1, max_tokens=24, ignore_eos=True)  # in effect greedy


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_request_of_several_sequences_is_one_output(model: Path, run_ahead: bool) -> None:
    with make_tiny(model, async_scheduling=run_ahead, max_num_seqs=2) as llm:
        request_id = llm.add_request([5] * 20, ENDING)
        assert (request_id, llm.add_request([7, 8], GREEDY)) == ("0", "1")
        first, second = sorted(run(llm), key=lambda output: output.request_id)
        assert (first.request_id, second.request_id) == ("0", "1")
        assert [completion.index for completion in first.outputs] == [0, 1, 2]
        lens = [len(completion.token_ids) for completion in first.outputs]
        assert len(set(lens)) > 1, "all ended with the same step"
        assert {completion.finish_reason for completion in first.outputs} == {"stop"}
        assert first.prompt_token_ids == [5] * 20 and len(second.outputs) == 1
        assert first.num_cached_tokens == 0 and llm.sequences[-1].num_cached_tokens is not None
        # A request with its seed alone gives the same completion, so the first completion is that of n=1.
        [request] = inside.processor(llm).make_requests(parse_prompts([5] * 20), [ENDING], 0)
        seeds = [sequence_seed(request, index, engine_seed=0) for index in range(3)]
        assert seeds[0] == 3 and len(set(seeds)) == 3
        for completion, seed in zip(first.outputs, seeds, strict=True):
            alone = ENDING.clone()
            alone.seed, alone.n = seed, 1
            [output] = llm.generate([5] * 20, alone, use_tqdm=False)
            assert output["token_ids"] == completion.token_ids


def test_the_likeliest_completions_are_equal_and_share_their_prompt(model: Path) -> None:
    with make_tiny(model) as llm:
        [expected] = llm.generate([[9] * 20], GREEDY, use_tqdm=False)
        inside.renew_scheduler(llm)  # an empty prefix cache
        llm.batches.clear()
        [output] = llm.generate([[9] * 20], LIKELIEST, use_tqdm=False)
        assert [completion.token_ids for completion in output.outputs] == [expected["token_ids"]] * 3
        assert output.num_cached_tokens == 0  # for the first sequence
        assert llm.batches[0].query_lens.tolist() == [20, 1, 1]  # their last token alone


def test_abort_ends_every_sequence_of_a_request(model: Path) -> None:
    with make_tiny(model) as llm:
        free = llm.num_free_blocks
        request_id = llm.add_request([5] * 20, ENDING)
        while not llm.sequences:  # until the first sequence ends
            assert llm.step() == []
        output = llm.abort(request_id)
        reasons = sorted(completion.finish_reason for completion in output.outputs)
        assert reasons in (["abort", "abort", "stop"], ["abort", "stop", "stop"])
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert llm.is_finished() and llm.num_free_blocks == free and llm.abort(request_id) is None
        assert len(llm.generate([[5], [6]], GREEDY, use_tqdm=False)) == 2  # nothing is left of it


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False, "max_num_seqs": 3},
        {"num_kvcache_blocks": 9, "max_num_batched_tokens": 7},
        {"enable_prefix_caching": False, "num_kvcache_blocks": 9, "max_num_batched_tokens": 5},
    ],
    ids=["ample", "few_slots", "tight", "tight_and_uncached"],
)
def test_completions_are_the_same_each_time_and_beside_any_others(
    model: Path, options: dict[str, int]
) -> None:
    """Neither the number of completions nor other requests change them, nor do preemption, chunked prefill or
    the cache.
    """
    params = [
        SamplingParams(n=5, seed=7, max_tokens=24, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(n=4, seed=8, max_tokens=24, stop_token_ids=range(20)),
    ]
    prompts = [[9] * 20, [5, 6, 7], [9] * 19 + [3]]
    with make_tiny(model) as llm:
        alone = [llm.generate(*each, use_tqdm=False)[0] for each in zip(prompts, params, strict=True)]
        assert [len(output.outputs) for output in alone] == [5, 1, 4]
        for output in (alone[0], alone[2]):
            assert len({tuple(c.token_ids) for c in output.outputs}) > 1, "all completions are equal"
        fewer = params[0].clone()
        fewer.n = 2
        [first] = llm.generate(prompts[0], fewer, use_tqdm=False)
        assert first.outputs == alone[0].outputs[:2]
    with make_tiny(model, **options) as llm:
        for _ in range(2):
            together = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs for output in together] == [output.outputs for output in alone]
        assert inside.block_manager(llm).pool.usage == 0
        if "num_kvcache_blocks" in options:
            assert any(seq.num_preemptions for seq in llm.sequences)
            assert any(not batch.draws.all() for batch in llm.batches), "no prompt went in chunks"


def test_progress_counts_requests_of_many_completions(model: Path) -> None:
    bar = Bar()
    with make_tiny(model) as llm:
        llm.generate([[5], [6]], ENDING, use_tqdm=bar)
    assert (bar.total, bar.done) == (2, 2)


def test_progress_counts_prompts_that_cannot_run(model: Path) -> None:
    bar = Bar()
    with make_tiny(model) as llm:
        llm.generate([[5], [], [6]], ENDING, use_tqdm=bar, on_error="return")
    assert (bar.total, bar.done) == (3, 3)


def test_one_sequence_that_fails_is_named_in_the_output(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_tiny(model, async_scheduling=False) as llm:
        llm.add_request([5] * 20, LIKELIEST)
        launch = inside.runner(llm).launch

        def failing(batch: Batch) -> PendingOutput:
            handle = launch(batch)
            handle.tensors.token_ids.numpy()[1] = NOT_FINITE
            return handle

        monkeypatch.setattr(inside.runner(llm), "launch", failing)
        assert llm.step() == []
        monkeypatch.undo()
        [output] = run(llm)
        assert [c.finish_reason for c in output.outputs] == ["length", "error", "length"]
        assert output.error == "the model's logits were not finite" and output.outputs[1].token_ids == []


# -- prompts -------------------------------------------------------------------------------------------------


def test_prompts_of_torch_and_transformers(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    rows = [[5, 6, 7], [8, 9, 10]]
    with make_tiny(model) as llm:
        expected = [output["token_ids"] for output in llm.generate(rows, params, use_tqdm=False)]
        encoded = BatchEncoding({"input_ids": rows, "attention_mask": [[1] * 3] * 2})
        both = [torch.tensor(rows), encoded, encoded.convert_to_tensors("pt"), (row for row in rows)]
        for prompts in both:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
        (one,) = llm.generate(torch.tensor(rows[0]), params, use_tqdm=False)
        assert one["token_ids"] == expected[0] and one.prompt_token_ids == rows[0]
        llm.add_request(torch.tensor(rows[0]), params)
        with pytest.raises(
            TypeError, match=r"the prompt: token id at position 0 must be an integer, not 5\.0"
        ):
            llm.add_request(torch.tensor([5.0]), params)


def test_the_model_argument(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"model must be a folder or a Hugging Face hub id.* not None"):
        LLM(None)
    monkeypatch.setenv("NANOVLLM_CPU_ISA", "torch")  # no kernels are compiled into another home
    monkeypatch.setenv("HOME", str(model.parent))
    with LLM(f"~/{model.name}", device="cpu", skip_tokenizer_init=True) as llm:
        assert llm.model_config.vocab_size == VOCAB_SIZE
    with pytest.raises(ValueError, match=rf"model folder '{model.parent}/nowhere' does not exist"):
        LLM("~/nowhere")
    with pytest.raises(ValueError, match="model folder '~nobody-here/model' does not exist"):
        LLM("~nobody-here/model")
