"""Shared set-up: without a CUDA device Triton kernels run in its interpreter, and `gpu` tests are skipped."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

HAS_GPU = shutil.which("nvidia-smi") is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any import of nanovllm
os.environ.setdefault("TQDM_DISABLE", "1")
# What was started in the background by a shell ignores Ctrl-C, and the tests of Ctrl-C would run for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
