"""Kernels are compiled once for a CPU, and loaded from a folder that only this user can write to."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cpu_kernel_cases import finish, start

from nanovllm.cpu.kernels.native import cache_folder, function_address, jit

CODE = """
import sys, torch
from nanovllm.cpu.kernels.rms_norm import rms_norm
print(float(rms_norm(torch.ones(3, 20), torch.ones(20), 0.0).sum()), "numba" in sys.modules)
"""
COMPILED, LOADED = ["60.0 True"], ["60.0 False"]


def run(folder: Path | str) -> tuple[list[str], str]:
    return finish(start(CODE, NANOVLLM_CACHE_DIR=str(folder)))


def files_in(folder: Path) -> list[Path]:
    return sorted((folder / "nanovllm" / "kernels").iterdir())


@pytest.mark.full
def test_two_processes_compile_at_once_and_later_ones_load(tmp_path: Path) -> None:
    both = [start(CODE, NANOVLLM_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in both:
        lines, errors = finish(process)
        assert lines == COMPILED and errors.count("compiling kernels for this CPU") == 1
    files = files_in(tmp_path)
    assert len(files) >= 4 and {each.suffix for each in files} == {".o"}
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in files)
    assert run(tmp_path) == (LOADED, "")
    # Damaged files, and files of which others could have written the code, are compiled again.
    cut, changed, empty, shared = files[:4]
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    empty.write_bytes(b"")
    shared.chmod(0o666)
    lines, errors = run(tmp_path)
    assert lines == COMPILED and "Error" not in errors
    assert run(tmp_path) == (LOADED, "")
    assert files_in(tmp_path) == files


def test_a_folder_that_cannot_be_written_is_no_error() -> None:
    assert run("/dev/null/nothing")[0] == COMPILED


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE_DIR", str(tmp_path))
    folder = cache_folder()
    assert folder == tmp_path / "nanovllm" / "kernels" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert cache_folder() is None
    assert "other users can write to" in caplog.text
    folder.chmod(0o755)
    assert cache_folder() == folder


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE_DIR", str(tmp_path))
    assert cache_folder() is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache_folder() is None


def test_a_home_that_is_missing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NANOVLLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null/home")
    assert cache_folder() is None


def make_power() -> Callable[[int, int], int]:
    @jit
    def power(a: int, b: int) -> int:
        return a**b - (a // b) * (a % b)  # numba has functions of its own for these

    return power


def make_sum() -> Callable[[int, int], int]:
    power = make_power()

    def total(a: int, b: int) -> int:
        return power(a, b) + power(b, a)

    return total


def test_a_callers_own_functions_of_numba_run_after_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba compiles some functions once for both; parts of a kernel have no machine code of their own."""
    numba = pytest.importorskip("numba")
    monkeypatch.setenv("NANOVLLM_CACHE_DIR", str(tmp_path))

    @numba.njit
    def theirs(a: int, b: int) -> int:
        return a**b - (a // b) * (a % b)

    kind = ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p, *[ctypes.c_int64] * 2
    )
    kernel, result = kind(function_address(make_sum, results="int64")), ctypes.c_int64()
    assert kernel(ctypes.byref(result), None, 7, 3) == 0
    assert result.value == (343 - 2 * 1) + (3**7 - 0 * 3)
    assert theirs(7, 3) == 341 and theirs(2.0, 3) == 8.0
