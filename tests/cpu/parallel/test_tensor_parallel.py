"""A model on several ranks gives the tokens of one rank, and any fault ends cleanly (tools/soak_tp.py)."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import inside
import pytest
import soak_tp
import torch
from checked_llm import BLOCK, CheckedLLM, CheckedSetup, make_tiny, run
from tiny_models import VOCAB_SIZE, transformers_greedy, write_tiny_model

from nanovllm import LLM, EngineClosedError, KVCacheMemoryError, SamplingParams, WorkerError, demo_model_path
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine import core
from nanovllm.parallel import channel, ranks
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.halves import OVERLAP_RANKS, OVERLAP_TOKENS, HalvedStream
from nanovllm.parallel.worker import Member
from nanovllm.runner import start
from nanovllm.runner.memory import KVCacheSpace, check_weights_fit, fit_kv_cache
from nanovllm.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Does not rely on the garbage collector."""
    segments = []

    class Recorded(SharedMemory):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            segments.append(self.name)

    monkeypatch.setattr(channel, "SharedMemory", Recorded)
    monkeypatch.setattr(soak_tp, "GONE_SECONDS", 60.0)
    gc.collect()
    gc.disable()
    yield
    left = soak_tp.wait_until_nothing_is_left()
    gc.enable()
    assert left == []
    assert not [name for name in segments if (soak_tp.SHARED_MEMORY / name).exists()]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(2 * BLOCK)]
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (1, BLOCK, BLOCK + 1, 3 * BLOCK)]
    return [*prompts, shared + prompts[1], shared, [*shared, 5]]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]


def make(model: Path, size: int = 2, **options: object) -> CheckedLLM:
    return make_tiny(model, tensor_parallel_size=size, **options)


def tokens(llm: LLM, prompts: list, params: object = GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


# -- the same tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (2, {"max_num_batched_tokens": 7, "num_kvcache_blocks": 14}),
        (2, {"max_num_batched_tokens": BLOCK + 1, "num_kvcache_blocks": 6, "async_scheduling": False}),
        (2, {"enable_prefix_caching": False, "max_num_batched_tokens": 1, "max_num_seqs": 3}),
        (4, {"num_kvcache_blocks": 14}),
    ],
    ids=["ample", "chunked_tight", "minimal_in_step", "no_prefix_cache", "four_ranks"],
)
def test_every_schedule_gives_transformers_tokens(
    model: Path, prompts: list, expected: list, size: int, options: dict
) -> None:
    """Two passes: the second one hits the prefix cache, where there is one."""
    with make(model, size, **options) as llm:
        assert len(inside.workers(llm).watch.processes) == size - 1
        for _ in range(2):
            assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("ranks", OVERLAP_RANKS)
def test_a_large_step_is_computed_in_halves(model: Path, ranks: int) -> None:
    """A step has more tokens than OVERLAP_TOKENS. Some prompts share a prefix, and one prompt is cut in the
    middle.
    """
    rng = random.Random(7)
    start = [rng.randrange(2, VOCAB_SIZE) for _ in range(2 * BLOCK)]
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(40, 50))] for _ in range(50)]
    prompts += [start + prompt[: 1 + i] for i, prompt in enumerate(prompts[:10])]
    assert sum(map(len, prompts[:50])) >= OVERLAP_TOKENS
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    results = []
    for size in (1, ranks):
        with make(model, size, max_num_seqs=64, max_num_batched_tokens=4096) as llm:
            streams: list[object] = []
            first = inside.model(llm).model.layers[0]
            first.register_forward_hook(lambda _, inputs, __, streams=streams: streams.append(inputs[0]))
            results.append(tokens(llm, prompts, params))
            assert sum(isinstance(stream, HalvedStream) for stream in streams) == (size > 1)
    assert results[0] == results[1]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_other_families(tmp_path: Path, prompts: list, family: str) -> None:
    """Biases, which are added once, and a head that is tied to a padded embedding."""
    path = write_tiny_model(tmp_path, family, tie_word_embeddings=True)
    with make(path) as llm:
        assert tokens(llm, prompts) == [transformers_greedy(path, prompt, 20) for prompt in prompts]


def test_sampling_aborts_and_broken_rows_are_those_of_one_rank(
    model: Path, prompts: list, expected: list
) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=11, max_tokens=12),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=12),
        SamplingParams(temperature=1.3, top_p=0.8, max_tokens=12, stop_token_ids=[7]),
        SamplingParams(temperature=1.0, min_p=0.1, top_k=20, top_p=0.9, seed=-3, max_tokens=12),
        GREEDY,
        SamplingParams(temperature=2.0, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=9),
    ]
    results = []
    for size in (1, 2):
        with make(model, size) as llm:
            sampled = tokens(llm, prompts, params)
            ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
            for _ in range(4):
                llm.step()
            aborted = llm.abort(ids[2])
            assert aborted is not None
            done = {output.request_id: output["token_ids"] for output in run(llm)}
            assert done == {ids[i]: expected[i] for i in range(len(ids)) if i != 2}
            compute_logits = inside.model(llm).compute_logits

            def broken(hidden: torch.Tensor, compute: Callable = compute_logits) -> torch.Tensor:
                logits = compute(hidden).clone()
                logits[1] = float("nan")
                return logits

            inside.model(llm).compute_logits = broken
            outputs = llm.generate(prompts[:3], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
            results.append((sampled, aborted["token_ids"]))
    assert results[0] == results[1]


def test_engines_at_once_and_in_turn(model: Path, prompts: list, expected: list) -> None:
    first, second = make(model), make(model)
    assert tokens(first, prompts) == expected
    assert tokens(second, prompts) == expected
    first.close()
    first.close()
    with pytest.raises(EngineClosedError):
        first.generate([[5]])
    assert tokens(second, prompts) == expected
    del second, first
    with make(model) as third:
        assert tokens(third, prompts) == expected


def test_the_demo_model_answers_and_ctrl_c_leaves_it_usable() -> None:
    with LLM(demo_model_path(), device="cpu", tensor_parallel_size=2) as llm:
        question = [{"role": "user", "content": "What is 687087 + 67?"}]
        params = SamplingParams(temperature=0, max_tokens=128)
        assert llm.chat(question, params, use_tqdm=False)[0]["text"].endswith("687154")
        for delay in (0.0, 0.1):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                timer.start()
                while True:
                    llm.generate(
                        ["Write"] * 4, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False
                    )
            timer.join()
            assert llm.is_finished()
            assert llm.chat(question, params, use_tqdm=False)[0]["text"].endswith("687154")


# -- how it is started -------------------------------------------------------------------------------------

SCRIPT = """
import sys
print("this is run once", __name__)
from nanovllm import LLM, SamplingParams
llm = LLM({model!r}, tensor_parallel_size=2, device="cpu", skip_tokenizer_init=True, max_model_len=64)
print(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]["token_ids"])
print({pids}[0])
"""


@pytest.mark.parametrize("how", ["command", "stdin", "script"])
def test_scripts_need_no_main_guard_and_no_close(model: Path, tmp_path: Path, how: str) -> None:
    code = SCRIPT.format(model=str(model), pids=inside.worker_pids())
    (tmp_path / "script.py").write_text(code)
    args = {"script": [str(tmp_path / "script.py")], "command": ["-c", code], "stdin": []}[how]
    result = subprocess.run(
        [sys.executable, *args],
        input=code if how == "stdin" else None,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "this is run once __main__" and len(lines) == 3, result
    assert json.loads(lines[1]) == transformers_greedy(model, [5, 6, 7], 5)
    assert not Path("/proc", lines[2]).exists()
    assert result.returncode == 0 and result.stderr == "", result


def test_a_daemonic_process_is_told_what_to_do(model: Path) -> None:
    code = (
        "import multiprocessing as m\n"
        f"def start(): import nanovllm; nanovllm.LLM({str(model)!r}, tensor_parallel_size=2, device='cpu', "
        "skip_tokenizer_init=True)\n"
        "p = m.get_context('fork').Process(target=start, daemon=True); p.start(); p.join()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "RuntimeError: a daemonic process cannot start workers" in result.stderr, result.stderr


# -- what is refused ---------------------------------------------------------------------------------------


def test_sizes_that_cannot_be_split_are_refused_with_those_that_can(model: Path) -> None:
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=3 does not divide .* sizes that do: 1, 2, 4$"
    ):
        make(model, 3)


def test_fewer_gpus_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu")
    assert device.ranks(3) == ["cpu", "cpu", "cpu"]
    device.torch = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device.ranks(3) == ["cuda:1", "cuda:2", "cuda:3"]
    with pytest.raises(
        ValueError, match=r"needs 4 GPUs from cuda:1 on, and torch sees 4 in all; use at most 3"
    ):
        device.ranks(4)


GIB = 2**30


def test_a_rank_with_less_memory_is_named_before_loading(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, device = Config("model", gpu_memory_utilization=0.5), Device("cpu")
    device.torch = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    memory = [(80 * GIB, 80 * GIB), (5 * GIB, 80 * GIB)]
    check_weights_fit(5 * GIB, memory, config, device)
    with pytest.raises(
        KVCacheMemoryError,
        match=r"need 6.00 GiB on rank 1 \(cuda:1\), and 5.00 GiB may be used \(5.00 of 80",
    ):
        check_weights_fit(6 * GIB, memory, config, device)
    check_weights_fit(3 * GIB, [(6 * GIB, 8 * GIB)] * 2, config, Device("cpu"))
    with pytest.raises(
        KVCacheMemoryError, match=r"need 4.00 GiB on rank 0 \(cpu\), and 3.00 GiB"
    ):  # both ranks share one memory
        check_weights_fit(4 * GIB, [(6 * GIB, 8 * GIB)] * 2, config, Device("cpu"))
    monkeypatch.undo()
    monkeypatch.setattr(start, "weight_bytes", lambda *args: 2**50)
    monkeypatch.setattr(ModelRunner, "__init__", lambda *args: pytest.fail("it was loaded"))
    with pytest.raises(KVCacheMemoryError, match="the model does not fit"):
        make(model)


def test_the_fewest_blocks_of_all_ranks_count(model: Path) -> None:
    big, small = KVCacheSpace("cuda:0", 900, 1000, 800, 5, 10), KVCacheSpace("cuda:1", 300, 1000, 200, 5, 10)
    assert fit_kv_cache([big, small], Config("m"), 16, 1000) == 20
    assert fit_kv_cache([big, small], Config("m"), 16, 7) == 7
    assert fit_kv_cache([big, small], Config("m", num_kvcache_blocks=30), 16, 1000) == 30
    with pytest.raises(
        KVCacheMemoryError, match=r"KV cache on rank 1 \(cuda:1\): 31 block\(s\) of 16 tokens"
    ):
        fit_kv_cache([big, small], Config("m", num_kvcache_blocks=31), 16, 1000)
    none = KVCacheSpace("cuda:1", 300, 1000, -50, 5, 10)
    with pytest.raises(KVCacheMemoryError, match=r"on rank 1 .* 0.0 MiB may be used"):
        fit_kv_cache([big, none], Config("m"), 16, 1000)
    with make(model, num_kvcache_blocks=9) as llm:
        assert inside.workers(llm).call(ModelRunner.allocate_kv_cache, 9) == [
            9,
            9,
        ]


@pytest.mark.parametrize(
    ("device", "free", "options", "said"),
    [
        ("cpu", 8, {}, "up to 4.00 GiB of memory will be used for keys and values"),
        ("cpu", 16, {}, None),
        ("cpu", 8, {"num_kvcache_blocks": 4096}, None),
        ("cuda:0", 8, {}, None),
    ],
)
def test_a_kv_cache_on_a_cpu_with_little_memory_gives_a_warning(
    device: str, free: int, options: dict, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the KV caches of all ranks may take more than a third of what is free."""
    space = KVCacheSpace(device, free * 2**30, 2**34, budget=4 * 2**30, reserve=0, per_block=2**20)
    fit_kv_cache([space], Config("m", **options), 16, 10**6)
    shown = [record for record in caplog.records if record.levelno >= logging.lastResort.level]
    assert len(shown) == (said is not None)
    assert said is None or said in shown[0].getMessage()
    if said is not None:  # once, by rank 0
        fit_kv_cache([space, space], Config("m"), 16, 10**6)
        assert "4.00 GiB of memory on each rank will be used" in caplog.records[-1].getMessage()


# -- faults: tools/soak_tp.py repeats each of them ---------------------------------------------------------


@pytest.mark.parametrize("fault", [fault for fault in soak_tp.FAULTS if fault != "ctrl_c_in_generate"])
def test_fault(fault: str) -> None:
    """Each fault ends correctly, however slow the machine is; the soak reports how fast."""
    soak_tp.FAULTS[fault](random.Random(7), "cpu")


class LonelyMember(Member):
    """Rank 1 never joins the group, and the user of rank 0 presses Ctrl-C."""

    def join_group(self, *args: Any) -> TPGroup:
        if self.setup.rank == 1:
            time.sleep(3600)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return super().join_group(*args)


def test_a_start_that_is_interrupted_stops_waiting_for_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture `nothing_is_left` checks that its ports are free and its folder is gone."""
    monkeypatch.setattr(ranks, "Member", LonelyMember)
    with pytest.raises(KeyboardInterrupt):
        LLM(str(model), tensor_parallel_size=2, device="cpu", skip_tokenizer_init=True, max_model_len=64)


class BrokenSetup(CheckedSetup):
    """Rank 1 raises at the call named in the environment."""

    def load(self, *args: object) -> ModelRunner:
        runner = super().load(*args)
        if self.rank == 1:
            name = os.environ["BROKEN_CALL"]
            setattr(runner, name, lambda *args: int("not a number"))
        return runner


@pytest.mark.parametrize(
    "call", ["warmup_model", "measure_kv_cache", "allocate_kv_cache", "capture_cudagraph"]
)
def test_a_worker_that_raises_at_any_call_of_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("BROKEN_CALL", call)
    monkeypatch.setattr(core, "RankSetup", BrokenSetup)
    with pytest.raises(WorkerError, match=r"rank 1 failed:(?s:.*)invalid literal for int\(\)"):
        LLM(str(model), tensor_parallel_size=2, device="cpu", skip_tokenizer_init=True, max_model_len=64)


def test_an_error_of_rank_0_ends_the_engine_and_is_not_blamed_on_a_worker(model: Path) -> None:
    with make(model) as llm:
        inside.runner(llm).ending.draw = None  # not callable: rank 0 fails after the workers continued
        with pytest.raises(TypeError, match="not callable"):
            llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        with pytest.raises(EngineClosedError):
            llm.generate([[5, 6]], GREEDY, use_tqdm=False)
