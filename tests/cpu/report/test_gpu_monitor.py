"""GPUMonitor: samples of GPUs, and their charts in a report."""

from __future__ import annotations

import threading
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import inside
import pytest
from checked_llm import CheckedLLM
from report_pages import TITLES, check_axes, drawn, named, parse, pictures, preempted_llm, words

from nanovllm.report import GPUMonitor, charts, gpu, make_report
from nanovllm.report.gpu import MAX_INTERVALS, GPUSample

AHEAD = 100.0  # in seconds: samples use the engine's clock, and the host's clock was set back by this much


@pytest.fixture(scope="module")
def llm(model: Path) -> CheckedLLM:
    return preempted_llm(model)


class FakeGPU:
    """Counts its calls; from call number `end` on they fail."""

    is_cuda = True

    def __init__(self, number: int, end: float = float("inf"), kind: type[Exception] = RuntimeError) -> None:
        self.number, self.end, self.kind, self.calls = number, end, kind, 0
        self.enough = threading.Event()

    def power(self) -> float:
        self.calls += 1
        if self.calls >= 5:
            self.enough.set()
        if self.calls >= self.end:
            raise self.kind("GPU is lost")
        return 100.0 * (self.number + 1)

    def memory_in_use(self) -> int:
        return (self.number + 1) * 2**30


def threads() -> list[threading.Thread]:
    """The threads that sample GPUs."""
    return [each for each in threading.enumerate() if each.name == "nanovllm-gpu-monitor"]


def monitor_of(devices: list[Any], monkeypatch: pytest.MonkeyPatch) -> GPUMonitor:
    monkeypatch.setattr(gpu, "devices_of", lambda config: devices)
    monkeypatch.setattr(gpu, "INTERVAL_SECONDS", 0.002)
    stats = SimpleNamespace(start_time=time() + AHEAD, uptime=1.0)
    return GPUMonitor(SimpleNamespace(config=None, stats=lambda: stats))  # type: ignore[arg-type]


def test_samples_of_all_gpus(llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, begin = [FakeGPU(0), FakeGPU(1)], time() + AHEAD + 1.0
    with monkeypatch.context() as patch:
        monitor = monitor_of(devices, patch)
        with monitor:
            assert devices[0].enough.wait(60)
        assert threads() == []
        before = len(monitor.samples)
        with monitor:
            assert len(threads()) == 1
    assert monitor.why_not is None and threads() == []
    samples = monitor.samples
    assert before >= 5 and len(samples) >= before + 2
    assert begin <= samples[0].time < samples[-1].time <= time() + AHEAD + 1.0
    assert {sample.power for sample in samples} == {(100.0, 200.0)}
    assert {sample.memory for sample in samples} == {(2.0**30, 2.0**31)}
    found = pictures(parse(make_report(llm, gpu=monitor)))
    assert list(found)[-2:] == list(charts(llm, monitor))[-2:] == ["GPU power", "GPU memory in use"]
    check_axes(found["GPU power"])
    assert named(found["GPU power"], "unit")[0] == "W, by GPU"
    assert [round(drawn(found["GPU power"], number)[0][1]) for number in (0, 1)] == [100, 200]
    assert [round(drawn(found["GPU memory in use"], number)[-1][1], 1) for number in (0, 1)] == [1.0, 2.0]


def test_a_gpu_that_is_lost_ends_sampling_and_the_page_says_so(
    llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        monitor = monitor_of([FakeGPU(0, end=4)], patch)
        with monitor:
            for thread in threads():
                thread.join(60)
    assert len(monitor.samples) == 3 and monitor.why_not == "NVML: GPU is lost"
    page = parse(make_report(llm, gpu=monitor))
    assert "GPU power" in pictures(page) and "are incomplete: NVML: GPU is lost" in words(page)


def test_without_nvml_or_a_gpu_there_is_a_reason_and_no_thread(
    llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = FakeGPU(0, 1, ModuleNotFoundError)
    with monkeypatch.context() as patch, monitor_of([missing], patch) as monitor:
        assert threads() == []
    assert monitor.samples == [] and "pip install 'nanovllm[report]'" in (monitor.why_not or "")
    with GPUMonitor(llm) as monitor:
        assert threads() == []
    assert monitor.samples == [] and monitor.why_not == "the engine runs on a CPU"
    page = parse(make_report(llm, gpu=monitor))
    assert list(pictures(page)) == TITLES and "the engine runs on a CPU" in words(page)


def test_samples_of_a_long_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = monitor_of([FakeGPU(0)], monkeypatch)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        assert inside.num_kept_samples(monitor) <= MAX_INTERVALS
        return len(waits) > 3 * MAX_INTERVALS

    inside.run_monitor(monkeypatch, monitor, wait)
    assert waits[0] == 0.002 and set(waits) == {0.002, 0.004, 0.008, 0.016, 0.032}
    times = [sample.time for sample in monitor.samples]
    assert MAX_INTERVALS // 2 <= len(times) <= MAX_INTERVALS and times == sorted(times)
    middle = gpu.mean(GPUSample(1.0, (10.0,), (4.0,)), GPUSample(2.0, (30.0,), (8.0,)))
    assert middle == GPUSample(1.5, (20.0,), (6.0,))
