"""The GPU tests that need flash-attn or an FP8 cache: skipped, with the reason, where these cannot run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import inside
import needs
import pytest
import torch

from nanovllm.device import Device

ROOT = Path(__file__).parents[3]


class GPU(Device):
    """A fake GPU that runs nothing."""

    is_cuda = True
    name = "GPU"
    capability = (9, 0)

    def __init__(self, capability: tuple[int, int]) -> None:
        self.torch = torch.device("cuda", 0)
        self.capability = capability


def skip_reason(need: str, *arguments: str) -> str | None:
    try:
        getattr(needs, need)(*arguments)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return None


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str | None) -> None:
    """Simulate a GPU of `capability`, and flash-attn of `version` if it is not None."""
    package = None
    if version is not None:
        package = ModuleType("flash_attn")
        package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    inside.look_for_flash_attn_again(monkeypatch)
    monkeypatch.setattr(needs, "this_gpu", lambda: GPU(capability))


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "reason"),
    [
        ((9, 0), None, "auto", "flash-attn cannot be imported .*; pip install flash-attn"),
        ((9, 0), "3.0", "auto", "needs flash-attn 2.x, and 3.0 is installed"),
        ((7, 5), "2.8.3", "auto", "needs compute capability 8.0"),
        ((9, 0), "2.8.3", "float32", "supports float16 and bfloat16"),
    ],
)
def test_flash_attn_is_skipped_where_it_cannot_run(
    capability: tuple[int, int],
    version: str | None,
    dtype: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, capability, version)
    assert re.search(f"'flash_attn': .*{reason}", skip_reason("needs_backend", "flash_attn", dtype) or "")
    for backend in ("triton", "reference", "auto"):
        assert skip_reason("needs_backend", backend, dtype) is None


def test_flash_attn_runs_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 0), "2.8.3")
    assert skip_reason("needs_backend", "flash_attn") is None


def test_an_fp8_cache_is_skipped_before_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 0), None)
    assert "compute capability 8.9 or newer" in (skip_reason("needs_kv_cache_dtype", "fp8") or "")
    assert skip_reason("needs_kv_cache_dtype", "auto") is None
    pretend(monkeypatch, (8, 9), None)
    assert skip_reason("needs_kv_cache_dtype", "fp8") is None


PLUGIN = """
import sys
sys.modules["flash_attn"] = None
import needs
from test_needs import GPU
needs.this_gpu = lambda: GPU((9, 0))
"""


def test_every_gpu_test_of_flash_attn_is_skipped_where_it_is_missing(tmp_path: Path) -> None:
    """All tests run as if there were a GPU; those that are not skipped fail, because there is none."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "pretend_gpu.py").write_text(PLUGIN)
    paths = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "tests/cpu", tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(paths),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    arguments = ["-m", "pytest", "-q", "-rs", "-p", "pretend_gpu", "-m", "full or not full"]
    arguments += ["-k", "flash_attn", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and "failed" not in summary and "error" not in summary, done.stdout
    counts = re.findall(r"^SKIPPED \[(\d+)\] .*flash-attn cannot be imported", done.stdout, re.M)
    assert "passed" not in summary and sum(map(int, counts)) >= 18, done.stdout
