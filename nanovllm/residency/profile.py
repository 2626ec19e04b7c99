"""RankProfile: what torch's profiler saw on one rank, as the file of a trace."""

from __future__ import annotations

from pathlib import Path

import torch

from nanovllm.device import Device


def check_can_profile() -> None:
    """Raise RuntimeError if a torch profiler is active in this process."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError("a torch profiler is already active in this process; stop it first")


class RankProfile:
    """A profile that starts at creation and ends with `stop` or `drop`."""

    def __init__(self, path: Path, device: Device) -> None:
        """path: of the trace, a .json or .json.gz in an existing folder."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._path, self._device = path, device
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()

    def stop(self) -> Path:
        """Wait for the device, end the profile, write the trace and return its path."""
        self._device.synchronize()
        self.drop()
        self._profiler.export_chrome_trace(str(self._path))
        return self._path

    def drop(self) -> None:
        """End the profile without writing a trace."""
        self._profiler.stop()
