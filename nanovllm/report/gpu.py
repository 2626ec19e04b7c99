"""GPUMonitor: power and memory of an engine's GPUs over time, from NVML, in its own thread.

Does not affect the engine or the GPU's work. Without NVML it has no samples and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event, Thread
from time import perf_counter

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.stats.calls import StatsCalls
from nanovllm.stats.timeline import INTERVAL_SECONDS, MAX_INTERVALS


@dataclass(frozen=True, slots=True)
class GPUSample:
    """Values from NVML at one time, one for each GPU."""

    time: float  # seconds since 1970
    power: tuple[float, ...]  # watts, averaged by the GPU
    memory: tuple[float, ...]  # bytes in use by all processes


class GPUMonitor:
    """Takes samples while its `with` block runs: ten per second at first. Whenever there are more than 600
    samples, pairs of them are averaged and the rate halves.

    >>> with GPUMonitor(llm) as gpu:
    ...     outputs = llm.generate(prompts)
    >>> write_report("report.html", llm, gpu=gpu)

    It can be entered again, and then continues. why_not: why sampling could not start or ended early, as
    readable text; None if nothing is wrong.
    """

    def __init__(self, llm: StatsCalls) -> None:
        self.why_not: str | None = None
        stats = llm.stats()
        # Plus a time of perf_counter this gives seconds since 1970, as in the timeline. A change of the
        # system clock moves neither.
        self._epoch = stats.start_time + stats.uptime - perf_counter()
        self._devices = devices_of(llm.config)
        self._interval = INTERVAL_SECONDS
        self._samples: list[GPUSample] = []
        self._end = Event()
        self._thread: Thread | None = None

    @property
    def samples(self) -> list[GPUSample]:
        """The samples so far, oldest first."""
        return list(self._samples)

    def __enter__(self) -> GPUMonitor:
        if not all(device.is_cuda for device in self._devices):
            self.why_not = "the engine runs on a CPU"
        elif self._sample():
            self._end.clear()
            self._thread = Thread(target=self._run, name="nanovllm-gpu-monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self._thread = None
            if self.why_not is None:
                self._sample()

    def _run(self) -> None:
        while not self._end.wait(self._interval) and self._sample():
            if len(self._samples) > MAX_INTERVALS:
                old, self._interval = self._samples, self._interval * 2
                self._samples = [mean(a, b) for a, b in zip(old[::2], old[1::2], strict=False)]

    def _sample(self) -> bool:
        """Take a sample; False if NVML fails, with its error in `why_not`."""
        try:
            power = tuple(device.power() for device in self._devices)
            memory = tuple(float(device.memory_in_use()) for device in self._devices)
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError)
            self.why_not = f"NVML: {error}" + (" Try pip install 'nanovllm[report]'" if missing else "")
            return False
        self._samples.append(GPUSample(self._epoch + perf_counter(), power, memory))
        return True


def mean(a: GPUSample, b: GPUSample) -> GPUSample:
    """The mean of two samples."""
    power = tuple((x + y) / 2 for x, y in zip(a.power, b.power, strict=True))
    memory = tuple((x + y) / 2 for x, y in zip(a.memory, b.memory, strict=True))
    return GPUSample((a.time + b.time) / 2, power, memory)


def devices_of(config: Config) -> list[Device]:
    """The devices that an engine with these options runs on."""
    specs = Device(config.device).ranks(config.tensor_parallel_size, config.data_parallel_size)
    return [Device(spec) for spec in specs]
