"""Tensor parallelism on GPUs: the same answers within rounding, and faults that leak no memory.

Skipped where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

import inside
import pytest
import soak_tp
import torch
from checked_llm import CheckedLLM
from demo_tasks import heldout, score
from needs import needs_backend
from test_engine_gpu import (
    GREEDY,
    MAX_GAP,
    MAX_MISS,
    largest_gap,
    largest_miss,
    mixed_prompts,
    write_peaked_model,
)
from tiny_models import write_tiny_model

from nanovllm import LLM, EngineClosedError, SamplingParams, WorkerError, demo_model_path
from nanovllm.parallel.halves import OVERLAP_RANKS
from tools.write_fp8 import write_fp8
from tools.write_int4 import write_int4
from tools.write_mxfp4 import write_mxfp4

pytestmark = pytest.mark.gpu

SIZES = [2, 4]


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} ranks need as many GPUs; tests/cpu runs as many processes")
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No number of ranks divides the vocabulary, and there are fewer KV heads than four ranks."""
    return write_peaked_model(tmp_path_factory.mktemp("model"), vocab_size=1001)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(1, [1, 15, 16, 17, 255, 257, 700])


MATRIX = {
    "default": {},
    "eager": {"enforce_eager": True},
    "in_step": {"async_scheduling": False, "enable_prefix_caching": False},
    "chunks_tight": {"max_num_batched_tokens": 100, "num_kvcache_blocks": 8},
    "flash_attn": {"attention_backend": "flash_attn"},
    "float32": {"dtype": "float32"},
}


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in MATRIX), ("default", 4), ("chunks_tight", 4), ("float32", 4)],
    indirect=["size"],
)
def test_greedy_tokens_are_likely(model: Path, prompts: list, name: str, size: int) -> None:
    needs_backend(MATRIX[name].get("attention_backend", "auto"), MATRIX[name].get("dtype", "auto"))
    options = {"max_num_seqs": 97, "skip_tokenizer_init": True, "max_model_len": 1024}
    with CheckedLLM(model, tensor_parallel_size=size, **options | MATRIX[name]) as llm:
        peers = inside.peer_memory(inside.runner(llm).tp)
        for _ in range(2):
            outputs = llm.generate(prompts * 3, GREEDY, use_tqdm=False)
            assert largest_gap(model, prompts * 3, outputs) < (1e-3 if name == "float32" else MAX_GAP)
    assert peers is not None, "these GPUs can read each other's memory"
    if name == "default" and size in OVERLAP_RANKS:
        assert peers.copies is not None
        assert inside.num_copied_sums(peers.copies) > 0, "some step was large enough to be cut"


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_ranks_draw_together_from_a_large_vocabulary(
    tmp_path: Path, prompts: list, size: int, options: dict
) -> None:
    """In a graph, also beside requests with filters. The tokens are those of one rank."""
    path = write_peaked_model(tmp_path, vocab_size=30_001)
    options = options | {"max_num_seqs": 97, "skip_tokenizer_init": True, "max_model_len": 1024}
    options["enable_prefix_caching"] = False  # the same steps in each run
    drawn = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(prompts))
    ]
    filtered = [SamplingParams(temperature=1.0, top_k=1, max_tokens=20, ignore_eos=True)] * len(prompts)
    with CheckedLLM(path, tensor_parallel_size=size, **options) as llm:
        assert inside.runner(llm).tp.exchanges_rows(97, inside.runner(llm).dtype)
        outputs = llm.generate(prompts * 3, GREEDY, use_tqdm=False)
        assert largest_gap(path, prompts * 3, outputs) < MAX_GAP
        results = [llm.generate(prompts, drawn, use_tqdm=False) for _ in range(2)]
        tokens = [[output["token_ids"] for output in outputs] for outputs in results]
        assert tokens[0] == tokens[1]
        assert len({token for ids in tokens[0] for token in ids}) > 60
        mixed = llm.generate(prompts * 2, drawn + filtered, use_tqdm=False)
        assert largest_gap(path, prompts, mixed[len(prompts) :]) < MAX_GAP
        for outputs in (results[0], mixed[: len(prompts)]):
            assert largest_miss(path, prompts, outputs, list(range(len(prompts)))) < MAX_MISS


BESIDES = [
    {"logprobs": 5},
    {"logprobs": 0, "prompt_logprobs": 2},
    {"logprob_token_ids": [3, 900, 29_000]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 1},
    {"logit_bias": {7: 3.0, 9: -100.0}, "logprobs": 2},
    {"allowed_token_ids": range(0, 3000, 3), "logprobs": 3},
    {"min_tokens": 3, "stop_token_ids": [4]},
    {},
]


def test_extras_are_those_of_one_rank(tmp_path: Path, prompts: list, size: int) -> None:
    path = write_peaked_model(tmp_path, vocab_size=30_001)
    options = {"max_num_seqs": 97, "skip_tokenizer_init": True, "max_model_len": 1024, "dtype": "float32"}
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **each)
        for _, each in zip(prompts, cycle(BESIDES), strict=False)
    ]
    results = []
    for ranks in (1, size):
        with LLM(path, tensor_parallel_size=ranks, **options) as llm:
            results.append(llm.generate(prompts, params, use_tqdm=False))
    for one, other in zip(*results, strict=True):
        assert other["token_ids"] == one["token_ids"]
        pairs = zip(
            [*(one.prompt_logprobs or []), *(one.outputs[0].logprobs or [])],
            [*(other.prompt_logprobs or []), *(other.outputs[0].logprobs or [])],
            strict=True,
        )
        for before, now in pairs:
            assert (before is None) == (now is None)
            if before is not None:
                for old, new in zip(before.values(), now.values(), strict=True):
                    assert new.rank == pytest.approx(old.rank, rel=0.01)  # unlikely tokens have near ties
                    assert new.logprob == pytest.approx(old.logprob, abs=1e-3)


def test_demo_accuracy(size: int) -> None:
    examples = heldout(1000, seed=3)
    messages = [[{"role": "user", "content": example.prompt}] for example in examples]
    with LLM(demo_model_path(), tensor_parallel_size=size) as llm:
        outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
    assert score(examples, [output["text"] for output in outputs])["overall"] == 1.0


@pytest.mark.parametrize("stored", ["floats", "fp8", "awq", "mxfp4"])
def test_whole_experts_by_rank(tmp_path: Path, prompts: list, size: int, stored: str) -> None:
    """Logprobs as near those of one rank as by width, in graphs and without. 10 experts do not divide among 4
    ranks. One prompt uses the products of one or two rows, many the grouped ones. In 16 bits each row goes to
    all experts, because rounding would choose others."""
    family = "gpt_oss" if stored == "mxfp4" else "qwen3_moe"
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 1001}
    wide = {"intermediate_size": 512, "max_position_embeddings": 2048, "num_experts_per_tok": 10}
    wide |= {} if stored == "mxfp4" else {"moe_intermediate_size": 256}
    wide |= {"num_experts_per_tok": 3} if stored == "floats" else {}
    folder = write_tiny_model(tmp_path / "plain", family, dtype="bfloat16", **sizes, **wide)
    if stored == "fp8":
        folder = write_fp8(folder, tmp_path / "stored", "block")
    elif stored == "awq":
        folder = write_int4(folder, tmp_path / "stored", "awq", group=64)
    elif stored == "mxfp4":
        folder = write_mxfp4(folder, tmp_path / "stored")
    else:
        assert stored == "floats"
    dtype = "float32" if stored == "floats" else "bfloat16"
    options: dict[str, Any] = {"max_num_seqs": 97, "skip_tokenizer_init": True, "max_model_len": 1024}
    options |= {"dtype": dtype, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    lists = [prompts[:1], prompts * 3]
    with LLM(folder, **options) as llm:
        one = [llm.generate(each, params, use_tqdm=False) for each in lists]
    options["tensor_parallel_size"] = size
    found = []
    for more in (
        {},
        {"enable_expert_parallel": True},
        {"enable_expert_parallel": True, "enforce_eager": True},
    ):
        with LLM(folder, **options, **more) as llm:
            several = [llm.generate(each, params, use_tqdm=False) for each in lists]
        found.append([gap for before, after in zip(one, several, strict=True) for gap in gaps(before, after)])
        assert len(found[-1]) > 1000
        if dtype == "float32":
            assert max(found[-1]) < 0.01
    by_width, *by_rank = (sum(each) / len(each) for each in found)
    assert by_width < 0.5 and all(each < 1.5 * by_width + 0.02 for each in by_rank)


def gaps(one: list[Any], several: list[Any]) -> list[float]:
    """Differences in the log-probabilities of prompt tokens, and of drawn tokens as long as they agree."""
    found = []
    for before, after in zip(one, several, strict=True):
        for first, second in zip(before.prompt_logprobs[1:], after.prompt_logprobs[1:], strict=True):
            found += [abs(old.logprob - second[token].logprob) for token, old in first.items()]
        pairs = zip(before["token_ids"], after["token_ids"], strict=True)
        same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        for place, token in enumerate(before["token_ids"][:same]):
            old, new = (each.outputs[0].logprobs[place][token].logprob for each in (before, after))
            found.append(abs(old - new))
    return found


def used_memory() -> list[int]:
    free = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    return [total - free for free, total in free]


def make_large_llm(path: Path, size: int) -> LLM:
    """Like soak_tp.make_llm, for a model with a large vocabulary."""
    options = {"skip_tokenizer_init": True, "num_kvcache_blocks": 256, "max_model_len": 1024}
    options["enable_prefix_caching"] = False  # so that each call has a large prefill step
    llm = LLM(path, tensor_parallel_size=size, **options)
    assert inside.runner(llm).tp.exchanges_rows(256, inside.runner(llm).dtype)
    return llm


@pytest.mark.parametrize("large", [False, True], ids=["gathered", "drawn_together"])
def test_a_killed_worker_is_noticed_in_a_replay_and_leaves_no_memory(
    size: int, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        path = write_peaked_model(tmp_path, vocab_size=30_001)
        monkeypatch.setattr(soak_tp, "PROMPTS", mixed_prompts(2, [5, 17, 400, 900]))
        monkeypatch.setattr(soak_tp, "make_llm", lambda device, size: make_large_llm(path, size))
    before = used_memory()
    rng = random.Random(0)
    for _ in range(2):
        llm = soak_tp.make_llm("cuda", size)
        pid = inside.workers(llm).watch.processes[-1].pid
        threading.Timer(rng.uniform(0.0, 0.5), os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerError, match=f"rank {size - 1} was killed by SIGKILL"):
            soak_tp.generate_forever(llm)
        with pytest.raises(EngineClosedError):
            soak_tp.answer(llm)
        deadline = time.monotonic() + 20
        while max(a - b for a, b in zip(used_memory(), before, strict=True)) > 2**30:
            assert time.monotonic() < deadline, (used_memory(), before)
            time.sleep(0.1)
        assert soak_tp.wait_until_nothing_is_left() == []
    llm = soak_tp.make_llm("cuda", size)
    assert soak_tp.answer(llm)
    llm.close()


def test_ctrl_c_leaves_the_engine_usable(size: int) -> None:
    with soak_tp.make_llm("cuda", size) as llm:
        expected = soak_tp.answer(llm)
        for delay in (0.0, 0.02, 0.1):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                timer.start()
                soak_tp.generate_forever(llm)
            timer.join()
            assert soak_tp.answer(llm) == expected


def test_two_engines_at_once(size: int) -> None:
    with soak_tp.make_llm("cuda", size) as first, soak_tp.make_llm("cuda", size) as second:
        expected = soak_tp.answer(first)
        assert soak_tp.answer(second) == expected
        assert soak_tp.answer(first) == expected
