"""sleep and wake_up: every rank frees memory, calls that need it are refused, and answers stay the same."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import BLOCK, logits_of, run
from digests import DigestLLM, make_digest
from tiny_models import FAMILIES, VOCAB_SIZE, edit_json, write_tiny_model

from nanovllm import EngineClosedError, KVCacheMemoryError, ModelLoadError, SamplingParams
from nanovllm.residency.runner import TAGS, WakeUpNeed

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
PARAMS = [GREEDY, DRAWN, GREEDY]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (3 * BLOCK + 1, BLOCK, 5)]


@pytest.fixture(scope="module", params=[1, 2])
def shared(request: pytest.FixtureRequest, model: Path) -> Iterator[DigestLLM]:
    with make_digest(model, tensor_parallel_size=request.param) as llm:
        yield llm


@pytest.fixture
def llm(shared: DigestLLM) -> DigestLLM:
    """An engine of one or two ranks, awake and with the checkpoint's weights."""
    shared.sleep(2)
    shared.wake_up()
    return shared


def answers(llm: DigestLLM, prompts: list[list[int]]) -> tuple[torch.Tensor, list[list[int]], list[int]]:
    """The logits of the first prompt, and the tokens and the number of cached tokens of each."""
    llm.reset_prefix_cache()
    logits, _ = logits_of(llm, prompts, PARAMS, 0)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return (
        logits,
        [output["token_ids"] for output in outputs],
        [output.num_cached_tokens for output in outputs],
    )


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return torch.equal(one[0], other[0]) and one[1:] == other[1:]


@pytest.mark.parametrize("level", [1, 2])
def test_all_memory_is_freed_and_allocated_again(
    llm: DigestLLM, prompts: list[list[int]], level: int
) -> None:
    ranks = llm.config.tensor_parallel_size
    before, weights = answers(llm, prompts), llm.on_ranks("digest")
    sizes, caches = llm.on_ranks("weight_bytes"), llm.on_ranks("cache_bytes")
    assert min(sizes) > 0 and min(caches) > 0 and sum(before[2]) > 0
    for _ in range(2):
        llm.sleep(level)
        assert llm.is_sleeping()
        assert llm.on_ranks("weight_bytes") == llm.on_ranks("cache_bytes") == [0] * ranks
        llm.wake_up()
        assert not llm.is_sleeping()
        assert llm.on_ranks("weight_bytes") == sizes and llm.on_ranks("cache_bytes") == caches
        assert llm.on_ranks("digest") == weights
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)
        assert same(answers(llm, prompts), before)


def check_both_levels(llm: DigestLLM, prompts: list[list[int]]) -> None:
    """Check that weights and answers are the same after sleep and wake_up."""
    before, weights = answers(llm, prompts), llm.on_ranks("digest")
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert llm.on_ranks("digest") == weights
        assert same(answers(llm, prompts), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    tied = family in ("qwen3", "llama")
    with make_digest(write_tiny_model(tmp_path, family, tie_word_embeddings=tied)) as llm:
        check_both_levels(llm, prompts)


@pytest.mark.parametrize("options", [{"load_format": "dummy"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_dummy_weights_and_scales_of_an_fp8_cache_come_back(
    model: Path, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    with make_digest(model, **options) as llm:
        check_both_levels(llm, prompts)


@pytest.mark.parametrize("order", [TAGS, TAGS[::-1]])
def test_weights_and_kv_cache_wake_up_separately(
    llm: DigestLLM, prompts: list[list[int]], order: tuple
) -> None:
    before = answers(llm, prompts)
    llm.sleep()
    llm.wake_up(tags=[order[0]])
    assert llm.is_sleeping()
    assert all(llm.on_ranks("weight_bytes")) == (order[0] == "weights")
    assert all(llm.on_ranks("cache_bytes")) == (order[0] == "kv_cache")
    with pytest.raises(RuntimeError, match=rf"this engine sleeps \({order[1]}\); call wake_up\(\) first"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.wake_up(tags=[order[1], order[0]])
    assert not llm.is_sleeping()
    assert same(answers(llm, prompts), before)


CALLS: dict[str, Callable[[DigestLLM], object]] = {
    "generate": lambda llm: llm.generate([[1, 2]], GREEDY, use_tqdm=False),
    "stream": lambda llm: list(llm.stream([[1, 2]], GREEDY)),
    "add_request": lambda llm: llm.add_request([1, 2], GREEDY),
    "step": lambda llm: llm.step(),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_refused_while_asleep(llm: DigestLLM, call: str) -> None:
    llm.sleep()
    with pytest.raises(
        RuntimeError, match=r"this engine sleeps \(weights and kv_cache\); call wake_up\(\) first"
    ):
        CALLS[call](llm)
    assert llm.reset_prefix_cache() and llm.abort(5) is None and llm.is_finished()
    llm.wake_up()
    CALLS[call](llm)
    run(llm)


def test_levels_and_second_calls(llm: DigestLLM, prompts: list[list[int]]) -> None:
    before = answers(llm, prompts)
    llm.wake_up()  # the engine is awake
    changed = {"model.norm.weight": torch.full((32,), 2.0)}
    llm.update_weights(changed)
    updated = answers(llm, prompts)
    assert not same(updated, before)
    for levels, wanted in (([1], updated), ([1, 1], updated), ([1, 2], before), ([2, 1], before)):
        llm.update_weights(changed)
        for level in levels:
            llm.sleep(level)
        llm.wake_up()
        assert same(answers(llm, prompts), wanted), levels


@pytest.mark.parametrize("level", [0, 3, "1", True, None, 1.5])
def test_other_levels_are_refused(llm: DigestLLM, level: Any) -> None:
    with pytest.raises(ValueError, match=r"level=.* must be 1 \(weights to host memory\) or 2 \(drop them\)"):
        llm.sleep(level)
    assert not llm.is_sleeping()


@pytest.mark.parametrize("tags", ["weights", [], ["weight"], ["weights", "scheduling"], 3])
def test_other_tags_are_refused(llm: DigestLLM, tags: Any) -> None:
    llm.sleep()
    with pytest.raises(ValueError, match="must be None or a list of 'weights' and 'kv_cache'"):
        llm.wake_up(tags=tags)
    assert llm.is_sleeping()


def test_sleep_is_refused_with_unfinished_requests(llm: DigestLLM) -> None:
    llm.add_request([1, 2, 3], GREEDY)
    calls = {
        "sleep()": llm.sleep,
        "wake_up()": llm.wake_up,
        "update_weights()": lambda: llm.update_weights({}),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"1 request.* unfinished; .* before {name[:-2]}"):
            call()
    assert len(run(llm)) == 1 and not llm.is_sleeping()
    stream = llm.stream([[1, 2], [3, 4]], GREEDY)
    next(stream)
    for call in calls.values():
        with pytest.raises(RuntimeError, match="a stream of this engine is open"):
            call()
    assert len(list(stream)) == 1
    llm.sleep()


def test_without_enough_memory_it_stays_asleep(
    llm: DigestLLM, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answers(llm, prompts)
    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(
            inside.runner(llm), "wake_up_need", lambda tags: WakeUpNeed(3 * 2**30, 2**30, 4 * 2**30)
        )
        message = r"no room to wake up on rank 0: 3\.00 GiB are needed, and 1\.00 of 4\.00 GiB are free"
        with pytest.raises(KVCacheMemoryError, match=message):
            llm.wake_up()
    assert llm.is_sleeping() and set(llm.on_ranks("weight_bytes")) == {0}
    llm.wake_up()
    assert same(answers(llm, prompts), before)


def test_without_its_checkpoint_it_stays_asleep(tmp_path: Path, prompts: list[list[int]]) -> None:
    weights = write_tiny_model(tmp_path) / "model.safetensors"
    with make_digest(tmp_path, tensor_parallel_size=2) as llm:
        before = answers(llm, prompts)
        llm.sleep(2)
        weights.rename(tmp_path / "away")
        with pytest.raises(ModelLoadError, match=r"holds no \*\.safetensors"):
            llm.wake_up()
        assert llm.is_sleeping()
        llm.wake_up(tags=["kv_cache"])
        (tmp_path / "away").rename(weights)
        llm.wake_up()
        assert same(answers(llm, prompts), before)


def test_a_sleep_that_fails_can_be_undone(
    model: Path, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_digest(model) as llm:
        before, weights = answers(llm, prompts), llm.on_ranks("digest")
        made: list[int] = []
        storage = torch.UntypedStorage

        def full_host(size: int) -> torch.UntypedStorage:
            made.append(size)
            if len(made) == 4:
                raise MemoryError("the host is full")
            return storage(size)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "UntypedStorage", full_host)
            with pytest.raises(MemoryError, match="the host is full"):
                llm.sleep()
        assert llm.is_sleeping()
        llm.wake_up()
        assert llm.on_ranks("digest") == weights
        assert same(answers(llm, prompts), before)


def test_counts_of_penalties_are_freed_too(model: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.5, max_tokens=12, ignore_eos=True)
    with make_digest(model) as llm:
        before = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
        assert inside.token_counts(llm) is not None
        llm.sleep()
        assert inside.token_counts(llm) is None
        llm.wake_up()
        assert [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)] == before


def resident_bytes(pid: int) -> int:
    """Without pages of files, which the system takes back when it likes."""
    if pid == os.getpid():
        gc.collect()  # what earlier tests left goes now, not between two measurements
        ctypes.CDLL(None).malloc_trim(0)  # after many tests malloc may keep what this one frees
    [size] = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(size) * 1024


def test_resident_memory_shrinks(tmp_path: Path) -> None:
    """On the CPU, level 1 frees only the KV cache, because copies of the weights stay in host memory."""
    write_tiny_model(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size=150_000, hidden_size=128)
    options = {"load_format": "dummy", "tensor_parallel_size": 2, "num_kvcache_blocks": 20_000}
    with make_digest(tmp_path, **options) as llm:
        pids = [os.getpid(), *(process.pid for process in inside.workers(llm).watch.processes)]
        weights, caches = llm.on_ranks("weight_bytes"), llm.on_ranks("cache_bytes")
        # Malloc returns blocks of this size to the system.
        assert min(weights) > 2**26 and min(caches) > 2**25
        before = [resident_bytes(pid) for pid in pids]
        llm.sleep(1)
        freed = [held - resident_bytes(pid) for pid, held in zip(pids, before, strict=True)]
        assert all(0.8 * size < got < 1.2 * size + 2e6 for size, got in zip(caches, freed, strict=True)), (
            freed
        )
        llm.sleep(2)
        freed = [held - resident_bytes(pid) for pid, held in zip(pids, before, strict=True)]
        assert all(got > 0.9 * (w + c) for w, c, got in zip(weights, caches, freed, strict=True)), freed
        llm.wake_up(tags=["weights"])
        back = [
            resident_bytes(pid) - (held - gone) for pid, held, gone in zip(pids, before, freed, strict=True)
        ]
        assert all(got > 0.8 * size for size, got in zip(weights, back, strict=True)), (
            back
        )  # others give back


def test_a_sleeping_engine_can_be_closed(model: Path) -> None:
    llm = make_digest(model, tensor_parallel_size=2)
    pids = [process.pid for process in inside.workers(llm).watch.processes]
    llm.sleep()
    llm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    for call in (llm.sleep, llm.wake_up, llm.is_sleeping, lambda: llm.update_weights({})):
        with pytest.raises(EngineClosedError):
            call()
