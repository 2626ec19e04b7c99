"""Kernels that a model needs are compiled when its engine starts, several at once."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import inside
import inside_kinds
import pytest
from cpu_kernel_cases import finish, start

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.cpu import ahead, isa
from nanovllm.cpu.kernels import native
from nanovllm.cpu.kernels.launch import Kernel
from nanovllm.cpu.kernels.team import OWN

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="needs numba")
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_kvcache_blocks": 16}


@pytest.fixture(autouse=True, scope="module")
def _kernels_are_compiled_here() -> None:
    """They are not: other processes compile."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kernels; nothing was said yet."""
    monkeypatch.setenv(native.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    inside_kinds.nothing_was_said(monkeypatch)
    found = native.cache_folder()
    assert found is not None
    return found


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_start_finds_the_kernels_of_its_model_and_no_others(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps of prompts that share a beginning need, with any parameters. Nothing runs to find it."""
    asked: list[tuple[Any, ...]] = []
    used: set[tuple[Any, ...]] = set()
    inside_kinds.note_compiled(monkeypatch, asked.extend)
    monkeypatch.setattr(ahead, "is_kept", lambda kernel: False)
    run = Kernel.launch

    def launch(kernel: Kernel, variant: tuple[object, ...], programs: int, *arguments: Any) -> None:
        if asked:  # the engine has started
            used.add(inside_kinds.kernel_asked(kernel, variant))
        run(kernel, variant, programs, *arguments)

    monkeypatch.setattr(Kernel, "launch", launch)
    with LLM(demo_model_path(), quantization=quantization, **OPTIONS) as llm:
        assert not inside.runner(llm).ending.last_token_ids.any()
        for temperature in (0, 1):
            penalty = 1 + temperature / 10
            params = SamplingParams(
                temperature=temperature, top_p=0.9, max_tokens=4, repetition_penalty=penalty
            )
            many = "What is 2 + 3? And 4 + 5, 6 + 7, 8 + 9?"  # more rows than FEW_ROWS
            llm.generate([f"{many} 2", f"{many} 4"], params, use_tqdm=False)
    assert set(asked) == used | {(make,) for make in OWN} and len(used) >= 10


def test_several_processes_compile_and_say_how_far_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of this name in the current folder is not theirs."""
    (tmp_path / "nanovllm" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    kernels = [(make,) for make in OWN]
    assert not any(native.is_kept(each) for each in kernels)
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    inside_kinds.compile_ahead(kernels)
    assert all(native.is_kept(each) for each in kernels)
    lines = shown.getvalue().split("\r")
    assert [line.partition("once: ")[2] for line in lines[1:-1]] == [f"{done} of 3" for done in range(4)]
    assert lines[-1] == "\x1b[K"
    assert {path.suffix for path in folder.iterdir()} == {".o"}


def test_a_process_that_fails_leaves_its_kernels_to_their_first_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside_kinds.compile_by(monkeypatch, "raise SystemExit(3)")
    with caplog.at_level(logging.WARNING):
        inside_kinds.compile_ahead([(make,) for make in OWN])
    assert not any(native.is_kept((each,)) for each in OWN)
    assert caplog.text.count("compiling 3 kernels for this CPU") == 1


@pytest.mark.full
def test_a_first_start_imports_no_compiler(tmp_path: Path) -> None:
    """Other processes compile, and no step waits for them."""
    code = (
        "import sys, nanovllm\n"
        "with nanovllm.LLM(nanovllm.demo_model_path(), device='cpu') as llm:\n"
        "    print(len(llm.generate(['1 + 1 =', '1 + 2 ='], use_tqdm=False)), 'numba' in sys.modules)"
    )
    lines, errors = finish(start(code, NANOVLLM_CACHE_DIR=str(tmp_path), NANOVLLM_CPU_ISA=""))
    assert lines == ["2 False"] and errors.count("compiling") == 1 and " kernels for this CPU" in errors
