"""Replicas on separate GPUs: correct answers, a killed replica, and freed memory.

Skipped where there are too few GPUs.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import inside
import pytest
import torch
from demo_tasks import heldout, score
from test_engine_gpu import GREEDY, MAX_GAP, largest_gap, mixed_prompts, write_peaked_model

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.models.registry import load_model_config
from nanovllm.parallel.replicas.replica import Replica

pytestmark = pytest.mark.gpu

MEMORY_SLACK = 64 * 2**20  # bytes
GONE_SECONDS = 10.0


@pytest.fixture(params=[1, 2], ids=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    needs_gpus(2 * request.param)
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peaked_model(tmp_path_factory.mktemp("model"), vocab_size=1000)


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"the replicas need {count} GPUs; tests/cpu runs them as processes")


def used_memory(count: int) -> list[int]:
    """Bytes in use on the first GPUs."""
    free = [torch.cuda.mem_get_info(index) for index in range(count)]
    return [total - free for free, total in free]


def test_answers_are_likely_and_each_replica_has_its_gpus(model: Path, ranks: int) -> None:
    prompts = mixed_prompts(1, [1, 15, 16, 17, 255, 257, 700]) * 8
    options = {"max_num_seqs": 16, "skip_tokenizer_init": True, "max_model_len": 1024}
    config = load_model_config(model)
    heads = config.num_kv_heads // ranks
    kv_bytes = 16 * 1024 * 2 * config.num_layers * heads * config.head_dim * 2  # what all rows need
    before = used_memory(2 * ranks)
    with LLM(model, data_parallel_size=2, tensor_parallel_size=ranks, **options) as llm:
        taken = [now - then for now, then in zip(used_memory(2 * ranks), before, strict=True)]
        assert min(taken) >= kv_bytes, "every GPU holds a KV cache"
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert largest_gap(model, prompts, outputs) < MAX_GAP


def test_seeded_answers_do_not_depend_on_the_replica() -> None:
    """deterministic=True gives the same bits in any batch, so also the same tokens."""
    needs_gpus(2)
    prompts = [f"Add {number} and {3 * number}." for number in range(100)]
    params = SamplingParams(temperature=1.0, max_tokens=30)
    tokens = []
    for size in (1, 2):
        with LLM(demo_model_path(), data_parallel_size=size, deterministic=True, max_num_seqs=8) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([output["token_ids"] for output in outputs])
    assert tokens[0] == tokens[1]


def test_a_killed_replica_is_started_again_and_leaves_no_memory(ranks: int) -> None:
    examples = heldout(600, seed=3)
    messages = [[{"role": "user", "content": example.prompt}] for example in examples]
    greedy = SamplingParams(temperature=0, max_tokens=256)
    torch.cuda.init()
    before = used_memory(2 * ranks)
    options = {"max_num_seqs": 16, "num_kvcache_blocks": 256}
    with LLM(demo_model_path(), data_parallel_size=2, tensor_parallel_size=ranks, **options) as llm:
        first = inside.replicas(llm).processes[0].pid
        for on_step in (lambda stats: kill_once(llm, first), None):
            llm.on_step = on_step
            outputs = llm.chat(messages, greedy, use_tqdm=False)
            assert score(examples, [output["text"] for output in outputs])["overall"] == 1.0
            assert len(inside.replicas(llm).call(Replica.get_room)) == 2
            assert inside.replicas(llm).processes[0].pid != first
    deadline = time.monotonic() + GONE_SECONDS
    while any(now > then + MEMORY_SLACK for now, then in zip(used_memory(2 * ranks), before, strict=True)):
        assert time.monotonic() < deadline, "its memory is still in use"
        time.sleep(0.1)


def kill_once(llm: LLM, pid: int | None) -> None:
    """Kill the first replica while it works, but only once."""
    member = inside.members(llm)[0]
    if pid is not None and member.is_ready and member.process is not None and member.process.pid == pid:
        member.is_ready = False  # counts as dead
        os.kill(pid, signal.SIGKILL)
