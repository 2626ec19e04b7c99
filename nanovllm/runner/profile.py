"""RankProfile: torch.profiler over one rank's steps, and the Chrome trace that it leaves.

Changes nothing in the runner. A process has one torch profiler at most.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nanovllm.device import Device


def check_can_profile() -> None:
    """Raise RuntimeError when a torch profiler is on in this process."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError("a torch profiler is on in this process already; stop that one first")


class RankProfile:
    """A profile that is on from the start, until `stop` or `drop`."""

    def __init__(self, path: Path, device: Device) -> None:
        """path: of the trace, a .json or .json.gz in a folder that is there."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._path, self._device = path, device
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()

    def stop(self) -> Path:
        """End the profile once the device has done its work; write the trace and return its path."""
        self._device.synchronize()
        self.drop()
        self._profiler.export_chrome_trace(str(self._path))
        return self._path

    def drop(self) -> None:
        """End the profile and write nothing."""
        self._profiler.stop()
