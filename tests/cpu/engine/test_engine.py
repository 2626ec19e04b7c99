"""The engine on a CPU: every schedule gives the tokens of transformers. Also sampling and requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import BLOCK, CheckedLLM, make_tiny, run
from engine_cases import GREEDY, make_prompts, tokens
from tiny_models import VOCAB_SIZE, transformers_greedy, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.attention import backends
from nanovllm.batch import StepKind
from nanovllm.cuda_graphs import capture
from nanovllm.cuda_graphs.graphs import CUDAGraphs
from nanovllm.device import Device
from nanovllm.kernels.compat import INTERPRET
from nanovllm.quantization.unquantized import UnquantizedLinearMethod
from nanovllm.runner.protocols import GraphOutput
from nanovllm.shared_prefixes import finder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]


# Prompts of up to 24 tokens with up to 24 output tokens: one sequence needs at most 6 blocks of 8.
KV = {"ample": 200, "tight": 14, "minimal": 6}


@pytest.mark.parametrize("run_ahead", [True, False], ids=["ahead", "in_step"])
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("budget", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 512])
def test_every_schedule_gives_transformers_tokens(
    model: Path, prompts: list, expected: list, budget: int, kv: str, run_ahead: bool
) -> None:
    """Two passes with the prefix cache, so that the second one hits it, and one pass without."""
    options = {"max_num_batched_tokens": budget, "num_kvcache_blocks": KV[kv], "async_scheduling": run_ahead}
    with make_tiny(model, **options) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
            assert llm.num_free_blocks == KV[kv]
        if kv == "ample":
            assert max(seq.num_cached_tokens for seq in llm.sequences) >= 2 * BLOCK
        assert max((len(b.token_ids) for b in llm.batches if b.kind is StepKind.PREFILL), default=0) <= budget
    with make_tiny(model, enable_prefix_caching=False, **options) as llm:
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        assert {seq.num_cached_tokens for seq in llm.sequences} == {0}


@pytest.mark.parametrize("run_ahead", [True, False], ids=["ahead", "in_step"])
def test_many_preemptions(model: Path, run_ahead: bool) -> None:
    prompts = [[i + 2, 9] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=44, ignore_eos=True)
    with make_tiny(model, num_kvcache_blocks=6, async_scheduling=run_ahead) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = sorted(seq.num_preemptions for seq in llm.sequences)
        assert preemptions[1] >= 1 and preemptions[-1] >= 2, preemptions
    assert tokens(outputs) == [transformers_greedy(model, prompt, 44) for prompt in prompts]


def test_an_fp8_cache_is_near_and_the_same_for_every_schedule(
    model: Path, prompts: list, expected: list
) -> None:
    results = []
    for options in ({}, {"max_num_batched_tokens": 7, "num_kvcache_blocks": 14}, {"tensor_parallel_size": 2}):
        with make_tiny(model, kv_cache_dtype="fp8", **options) as llm:
            assert inside.runner(llm).kv_cache.dtype == torch.float8_e4m3fn
            for layer in inside.model(llm).attention_layers:
                assert (layer.cache.k_scale > 1e-4).all() and (layer.cache.v_scale > 1e-4).all()
            for _ in range(2):
                results.append(tokens(llm.generate(prompts, GREEDY, use_tqdm=False)))
    assert all(result == results[0] for result in results)
    same = sum(a[0] == b[0] for a, b in zip(results[0], expected, strict=True))
    assert same >= len(expected) - 2  # of the first tokens: with random weights small errors change tokens
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of 'auto', 'fp8', not 'int4'"):
        make_tiny(model, kv_cache_dtype="int4")


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_block_sizes(model: Path, prompts: list, expected: list, block_size: int) -> None:
    with make_tiny(model, kvcache_block_size=block_size, max_num_batched_tokens=40) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases")
def test_deterministic(model: Path, prompts: list, expected: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes every product, and the prefix cache offers no blocks that decode steps wrote."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 11)]
    with make_tiny(model, deterministic=True, kvcache_block_size=16, max_num_batched_tokens=23) as llm:
        assert inside.runner(llm).backend.name == "triton"
        monkeypatch.setattr(UnquantizedLinearMethod, "by_torch", None)
        outputs = llm.generate(prompts[3:5], params, use_tqdm=False)
        assert tokens(outputs) == [expected[3][:2], expected[4][:11]]
        [longer] = llm.generate([prompts[4] + expected[4][:9]], params[:1], use_tqdm=False)
        assert longer["token_ids"] == expected[4][9:11]
        assert llm.sequences[-1].num_cached_tokens == len(prompts[4]) == 24


def test_deterministic_is_refused_where_it_cannot_hold(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRET", False)
    with pytest.raises(ValueError, match=r"deterministic=True needs .*'triton', .* the device is cpu"):
        make_tiny(model, deterministic=True)


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 17, "num_kvcache_blocks": 4}], ids=["", "tight"]
)
@pytest.mark.parametrize("block_size", [16, 32])
def test_triton_backend(model: Path, prompts: list, expected: list, block_size: int, options: dict) -> None:
    """The engine with our kernels in Triton's interpreter."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    few = prompts[3:7]
    with make_tiny(model, attention_backend="triton", kvcache_block_size=block_size, **options) as llm:
        for _ in range(2):
            assert tokens(llm.generate(few, params, use_tqdm=False)) == [ids[:5] for ids in expected[3:7]]


class Replayed(CUDAGraphs):
    """Steps with fixed input addresses, like CUDA graphs: a replay computes from what was sent last."""

    def __init__(self, sizes: list[int], make_step: Callable, *_: object) -> None:
        self.sizes, self.pool, self._make_step, self.steps = sizes, None, make_step, {}

    def capture(self, size: int) -> None:
        if size not in self.steps:
            self.steps[size] = self._make_step(size)

    def replay(self, size: int) -> GraphOutput:
        return self.steps[size]()


def replay_steps(llm: CheckedLLM) -> None:
    """Pad and replay decode steps on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "is_cuda", True)
        patch.setattr(type(inside.runner(llm).backend), "supports_cuda_graph", True)
        patch.setattr(capture, "CUDAGraphs", Replayed)
        inside.runner(llm).capture_cudagraph()


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
def test_padded_decode_steps(model: Path, prompts: list, expected: list) -> None:
    """The number of rows changes, and one row has filters."""
    few, lens = [prompts[index] for index in (1, 3, 4, 5)], [9, 3, 8, 5]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens]
    params[2] = SamplingParams(temperature=1.0, top_k=3, seed=4, max_tokens=lens[2], ignore_eos=True)
    with make_tiny(model, attention_backend="triton", kvcache_block_size=16, max_num_seqs=7) as llm:
        want = tokens(llm.generate(few, params, use_tqdm=False))
        assert want[0] == expected[1][: lens[0]]
        replay_steps(llm)
        assert sorted(inside.runner(llm).graphs[0, True].steps) == [7], "others wait for their first use"
        assert tokens(llm.generate(few, params, use_tqdm=False)) == want
        assert sorted(inside.runner(llm).graphs[0, True].steps) == [1, 2, 7]


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
@pytest.mark.parametrize(
    ("family", "replayed"),
    [
        ("qwen3", True),
        ("gemma3", False),
        pytest.param("qwen3", False, marks=pytest.mark.full),
        pytest.param("gemma3", True, marks=pytest.mark.full),
    ],
)
def test_shared_prefixes_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, replayed: bool
) -> None:
    """Three prompts share 256 tokens, one shares nothing; the batch changes when a sequence ends. Gemma 3 has
    a layer with a window before the one that shares.
    """
    monkeypatch.setattr(finder, "MIN_SHARED_TOKENS", 256)
    settings: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        settings = {"num_hidden_layers": 2, "layer_types": kinds, "head_dim": 16}
    path = write_tiny_model(tmp_path, family, max_position_embeddings=1024, **settings)
    rng = random.Random(2)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(256)]
    prompts = [[*shared, 5, 6], [7, 8, 9], [*shared, 7], [*shared, 9, 9, 9]]
    lens = [5, 5, 2, 5]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens]
    options = {
        "attention_backend": "triton",
        "kvcache_block_size": 64,
        "max_model_len": 320,
        "max_num_seqs": 5,
    }
    with make_tiny(path, **options) as llm:
        llm.generate([shared], SamplingParams(max_tokens=1), use_tqdm=False)  # fills the prefix cache
        if replayed:
            replay_steps(llm)
        found = []
        find = inside.runner(llm).prefixes.find

        def spy(batch: object) -> object:
            found.append(find(batch))
            return found[-1]

        inside.runner(llm).prefixes.find = spy
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert tokens(outputs) == [
            transformers_greedy(path, p, n) for p, n in zip(prompts, lens, strict=True)
        ]
    shapes = [sorted(each.skips.tolist()) for each in filter(None, found)]
    assert [0, 256, 256, 256] in shapes and [0, 256, 256] in shapes


def test_max_num_seqs_one_and_odd(model: Path, prompts: list, expected: list) -> None:
    for max_num_seqs in (1, 3):
        with make_tiny(model, max_num_seqs=max_num_seqs) as llm:
            assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
            assert max(len(batch.slots) for batch in llm.batches) == max_num_seqs


def test_prompt_and_output_are_at_most_max_model_len(model: Path) -> None:
    with make_tiny(model, max_model_len=16) as llm:
        (full, short) = llm.generate([[5] * 15, [5] * 13], GREEDY, use_tqdm=False)
        assert (len(full["token_ids"]), len(short["token_ids"])) == (1, 3)
        assert full.outputs[0].finish_reason == "length"
        with pytest.raises(
            ValueError, match=r"prompts\[1\].*16 tokens, .* raise max_model_len \(up to 512\)"
        ):
            llm.generate([[5], [5] * 16], GREEDY, use_tqdm=False)


def test_eos_and_stop_ids_end_the_output(model: Path, prompts: list, expected: list) -> None:
    eos, stop = 1, expected[5][4]
    with make_tiny(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop])
        for output, full in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
            ends = [i for i, token in enumerate(full) if token in (eos, stop)]
            want = full[: ends[0] + 1] if ends else full
            assert output["token_ids"] == want
            assert output["finish_reason"] == ("stop" if ends else "length")
            assert output.outputs[0].stop_reason == (stop if want[-1] == stop else None)


# -- sampling ------------------------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "params",
    [
        SEEDED,
        SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.3, top_p=0.8, seed=2, max_tokens=12, ignore_eos=True),
        SamplingParams(
            temperature=1.0, min_p=0.1, top_k=20, top_p=0.9, seed=-3, max_tokens=12, ignore_eos=True
        ),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    ],
    ids=["plain", "top_k", "top_p", "all", "greedy"],
)
def test_a_seeded_request_does_not_depend_on_its_batch(
    model: Path, prompts: list, params: SamplingParams
) -> None:
    mates = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=2.0, max_tokens=17),
        SamplingParams(temperature=1.0, top_k=3, max_tokens=5),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.2, seed=5, max_tokens=20),
    ]
    with make_tiny(model) as llm:
        alone = llm.generate(prompts[4], params, use_tqdm=False)[0]["token_ids"]
    rng = random.Random(0)
    for options in ({}, {"num_kvcache_blocks": 9, "max_num_batched_tokens": 9}):
        with make_tiny(model, seed=rng.randrange(100), **options) as llm:
            batch = [(prompts[4], params)] + [(prompt, mates[i % 4]) for i, prompt in enumerate(prompts)]
            rng.shuffle(batch)
            outputs = llm.generate([p for p, _ in batch], [s for _, s in batch], use_tqdm=False)
            found = next(o for o, (_, s) in zip(outputs, batch, strict=True) if s is params)
            assert found["token_ids"] == alone


def test_seeds(model: Path, prompts: list) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        with make_tiny(model, seed=seed) as llm:
            runs.append(tokens(llm.generate([prompts[0]] * 3, params, use_tqdm=False)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]  # requests without a seed differ from each other


def test_a_row_that_is_not_finite_ends_alone(model: Path, prompts: list, expected: list) -> None:
    with make_tiny(model) as llm:
        compute_logits = inside.model(llm).compute_logits
        calls = itertools.count()
        longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))  # in decode steps

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(hidden).clone()
            if next(calls) == 4:
                logits[longest_first.index(2)] = float("nan")
            return logits

        inside.model(llm).compute_logits = broken
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert outputs[2]["finish_reason"] == "error" and "finite" in outputs[2].error
        assert outputs[2]["token_ids"] == expected[2][:4]
        for i in set(range(len(prompts))) - {2}:
            assert outputs[i]["token_ids"] == expected[i] and outputs[i].error is None


# -- the calls -----------------------------------------------------------------------------------------------


def test_add_request_and_step(model: Path, prompts: list, expected: list) -> None:
    with make_tiny(model) as llm:
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts[:4]]
        done = {}
        while not llm.is_finished():
            for output in llm.step():
                done[output.request_id] = output["token_ids"]
            if len(ids) == 4:  # one more while the others run
                ids.append(llm.add_request({"prompt_token_ids": prompts[4]}, GREEDY))
        assert [done[i] for i in ids] == expected[:5]


def test_generate_refuses_to_mix_with_unfinished_requests(model: Path) -> None:
    with make_tiny(model) as llm:
        request = llm.add_request([5, 6], GREEDY)
        with pytest.raises(RuntimeError, match=r"1 request\(s\) of add_request"):
            llm.generate([[7]], GREEDY, use_tqdm=False)
        assert llm.abort(request)["finish_reason"] == "abort"
        assert len(llm.generate([[7]], GREEDY, use_tqdm=False)) == 1


def test_abort_at_every_step(model: Path, prompts: list, expected: list) -> None:
    for steps in range(0, 12):
        with make_tiny(model, num_kvcache_blocks=30, max_num_batched_tokens=20) as llm:
            ids = [llm.add_request(prompt, GREEDY) for prompt in prompts[:5]]
            done = [output for _ in range(steps) for output in llm.step()]
            aborted = llm.abort(ids[4])
            assert aborted["token_ids"] == expected[4][: len(aborted["token_ids"])]
            assert llm.abort(ids[4]) is None and llm.abort(10**9) is None
            done += run(llm)
            assert {o.request_id: o["token_ids"] for o in done} == dict(
                zip(ids[:4], expected[:4], strict=True)
            )
            assert llm.num_free_blocks == 30


def test_outputs_have_the_fields_of_vllm_and_nano_vllm(model: Path) -> None:
    with make_tiny(model) as llm:
        (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert output["token_ids"] == output.outputs[0].token_ids and len(output["token_ids"]) == 3
        assert output["text"] == output.outputs[0].text == ""
        assert output.prompt_token_ids == [5, 6, 7] and output.finished
        assert dict(output)["finish_reason"] == output.outputs[0].finish_reason == "length"
        with pytest.raises(KeyError, match="'logprobs'"):
            output["logprobs"]
        assert llm.generate([], use_tqdm=False) == []
