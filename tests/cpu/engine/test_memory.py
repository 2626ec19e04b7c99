"""An engine's share of a GPU beside other programs, and memory that is taken while it starts."""

from __future__ import annotations

import logging
import re
from functools import wraps
from pathlib import Path

import inside
import pytest
import torch
from checked_llm import make_tiny
from cpu_kernel_cases import finish, start

from nanovllm.config import Config
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.device_facts import SPARE_BYTES
from nanovllm.errors import KVCacheMemoryError
from nanovllm.runner.memory import KVCacheSpace, check_weights_fit, fit_kv_cache
from nanovllm.runner.model_runner import ModelRunner

GIB = 2**30


def gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 80) -> Device:
    """A GPU with so many free GiB; no kernel runs on it."""
    device = Device("cpu")
    device.torch = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, total * GIB))
    return device


@pytest.mark.parametrize("free", [80, 60, 45, 42])
def test_memory_of_other_processes_is_not_part_of_the_share(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine at 0.5 that holds 10 GiB and needs 3 for activations has 27 left, whatever others hold."""
    device = gpu(monkeypatch, free)
    assert device.kv_cache_budget(0.5, 10 * GIB, 3 * GIB) == (27 * GIB, 0)


def test_a_share_that_is_not_free_is_cut_to_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, free=20)
    left = 20 * GIB - 3 * GIB - SPARE_BYTES
    assert device.kv_cache_budget(0.5, 10 * GIB, 3 * GIB) == (left, 27 * GIB - left)


def test_weights_may_take_the_share_if_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config("m", gpu_memory_utilization=0.16)
    device = gpu(monkeypatch, free=66, total=79)
    check_weights_fit(12 * GIB, [(66 * GIB, 79 * GIB)], config, device)
    with pytest.raises(
        KVCacheMemoryError, match=r"12.64 GiB may be used \(66.00 of .*Raise gpu_memory_utilization"
    ):
        check_weights_fit(13 * GIB, [(66 * GIB, 79 * GIB)], config, device)
    with pytest.raises(KVCacheMemoryError, match=r"5.00 GiB may be used .*Close other programs"):
        check_weights_fit(6 * GIB, [(5 * GIB, 79 * GIB)], config, device)


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"dtype": "bfloat16"}])
def test_advice_acts_on_the_device(options: dict) -> None:
    """No error on a CPU names `gpu_memory_utilization`, which does nothing there, or a dtype that it has."""
    config, half = Config("m", **options), "dtype='bfloat16' (half of float32) or "
    with pytest.raises(KVCacheMemoryError, match="the model does not fit") as caught:
        check_weights_fit(9 * GIB, [(8 * GIB, 16 * GIB)], config, Device("cpu"))
    has_half = isa.has_bf16() if not options else options["dtype"] == "bfloat16"
    smaller = "a smaller model" if has_half else f"{half}a smaller model"
    assert str(caught.value).endswith(f"GiB are free). Close other programs, or use {smaller}")
    for device, advice in (
        ("cpu", "Pass kv_cache_memory_bytes, up to what is free, or a smaller kvcache_block_size;"),
        ("cuda:0", "Raise gpu_memory_utilization (now 0.9), or lower max_model_len, "),
    ):
        space = KVCacheSpace(device, free=100, total=200, budget=50, reserve=0, per_block=60)
        with pytest.raises(KVCacheMemoryError, match="no room for the KV cache") as caught:
            fit_kv_cache([space], config, 16, 1000)
        assert advice in str(caught.value)
        assert ("gpu_memory_utilization" in str(caught.value)) == (device != "cpu")


@pytest.mark.parametrize(
    ("options", "most", "said"),
    [({}, 10**6, True), ({}, 100, False), ({"num_kvcache_blocks": 4}, 10**6, False)],
    ids=["tight", "enough", "chosen"],
)
def test_a_smaller_share_is_said(
    options: dict, most: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tight = KVCacheSpace("cuda:1", 40 * GIB, 80 * GIB, 30 * GIB, GIB, 2**20, lacking=12 * GIB)
    ample = KVCacheSpace("cuda:0", 80 * GIB, 80 * GIB, 70 * GIB, GIB, 2**20)
    fit_kv_cache([ample, tight], Config("m", **options), 16, most)
    shown = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(shown) == said
    assert not said or re.search(r"cuda:1 has 40.00 of 80.00 GiB free.* 12.00 GiB smaller", shown[0])


@pytest.mark.parametrize("failures", [1, 3])
def test_memory_that_is_taken_during_the_start_is_measured_again(
    failures: int, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other engine takes half of what was measured; the third time there is nothing left to take."""
    measure, allocate = ModelRunner.measure_kv_cache, ModelRunner.allocate_kv_cache
    measured: list[int] = []

    @wraps(measure)
    def measured_less(self: ModelRunner, reserve: int) -> KVCacheSpace:
        space = measure(self, reserve)
        measured.append(space.per_block * (64 >> len(measured)))
        return KVCacheSpace("cuda:0", space.free, space.total, measured[-1], 0, space.per_block)

    @wraps(allocate)
    def taken(self: ModelRunner, num_blocks: int) -> int:
        if num_blocks == 64 >> (len(measured) - 1) and len(measured) <= failures:
            raise KVCacheMemoryError("taken")
        return allocate(self, num_blocks)

    monkeypatch.setattr(ModelRunner, "measure_kv_cache", measured_less)
    monkeypatch.setattr(ModelRunner, "allocate_kv_cache", taken)
    if failures == 3:
        with pytest.raises(KVCacheMemoryError, match="taken"):
            make_tiny(model)
        return
    with make_tiny(model) as llm:
        assert inside.runner(llm).kv_cache.shape[2] == 32
    assert len([each for each in caplog.records if "measuring it again" in each.getMessage()]) == failures


@pytest.mark.parametrize("times", [2, 3])
def test_a_start_on_a_full_device_is_tried_again(
    times: int, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph that cannot be captured has the error of the allocation only as its context."""
    calls = []

    @wraps(ModelRunner.capture_cudagraph)
    def full(*args: object) -> None:
        calls.append(args)
        if len(calls) <= times:
            try:
                raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
            finally:
                raise RuntimeError("the capture failed")

    monkeypatch.setattr(ModelRunner, "capture_cudagraph", full)
    monkeypatch.setattr("nanovllm.runner.start.PAUSE_SECONDS", (0.0, 0.0))
    if times == 2:
        with make_tiny(model) as llm:
            assert llm.generate([[5]], use_tqdm=False)
    else:
        with pytest.raises(KVCacheMemoryError, match=r"ran out of memory while the engine started .*Close"):
            make_tiny(model)
    assert len(calls) == 3
    assert len([each for each in caplog.records if "trying again in" in each.getMessage()]) == 2


RESIDENT = f"""
import os
from pathlib import Path
from nanovllm import LLM, SamplingParams, demo_model_path
for size in (dict(num_kvcache_blocks=8), dict(kv_cache_memory_bytes=2**30)):
    with LLM(demo_model_path(), device="cpu", **size) as llm:
        llm.generate("1 + 1 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print({inside.KV_CACHE_BYTES}, pages * os.sysconf("SC_PAGE_SIZE"))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_large_cache_on_a_cpu_takes_only_the_memory_that_is_used() -> None:
    lines, _ = finish(start(RESIDENT))
    (small, before), (large, after) = (map(int, line.split()) for line in lines)
    assert small < 2**23 and large > 0.9 * GIB
    assert after - before < 200 * 2**20
