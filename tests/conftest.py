"""Shared set-up: without a CUDA device Triton kernels run in its interpreter, and `gpu` tests are skipped.

`-n auto` runs files side by side, except on GPUs, whose memory an engine takes for itself.
"""

from __future__ import annotations

import os
import shutil
import signal

import pytest

HAS_GPU = shutil.which("nvidia-smi") is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any import of nanovllm
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small models the fastest, beside other processes
os.environ.setdefault("TQDM_DISABLE", "1")
MAX_WORKERS = 8  # each holds about 1 GiB; the longest file takes an eighth of the whole
# What was started in the background by a shell ignores Ctrl-C, and the tests of Ctrl-C would run for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return 0 if HAS_GPU else min(os.cpu_count() or 1, MAX_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
