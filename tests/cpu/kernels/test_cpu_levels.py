"""Each instruction set: tests of kernels run on those that this CPU has, and code for the others compiles."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cpu_kernel_cases import finish, start

from nanovllm import LLM, demo_model_path
from nanovllm.cpu import isa
from nanovllm.cpu import kernels as cpu
from nanovllm.cpu.kernels.launch import Kernel
from nanovllm.jobs.main import main

HERE = Path(__file__).parent
OWN = [name for name, needs in isa.NEEDS.items() if needs <= isa.cpu_features()]
OTHERS = [name for name in isa.NEEDS if name not in OWN]
# Runs the tests, then compiles the first variant that they used of each kernel, for each level in argv.
COMPILE = f"""
import sys, pytest
sys.path.insert(0, {str(HERE)!r})
from test_cpu_levels import kernels
levels, sys.argv[1:] = LEVELS, []
assert pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", *TESTS]) == 0
found = [each for each in kernels() if each.variants]
assert found
for each in found:
    for level in levels:
        text = each.assembly(sorted(each.variants, key=str)[0], level)
        print(each.name, level, "zmm" in text, "ymm" in text)
"""
FILES = sorted(HERE.glob("test_cpu_kernels_*.py"))
# Each level compiles every kernel anew: a few kernels in each run, all of them with -m full.
FEW = [HERE / f"test_cpu_kernels_{name}.py" for name in ("norm", "activation", "dtypes")]
FEW.append(HERE / "test_cpu_kernels_matmul.py::test_an_odd_number_of_steps")
FEW.append(HERE / "test_cpu_kernels_matmul.py::test_gated_products_have_the_bits_of_two_kernels")
WHOLE = [
    pytest.param(FEW[:1], id="one"),
    pytest.param(FEW, id="few", marks=pytest.mark.full),
    pytest.param(FILES, id="all", marks=pytest.mark.full),
]


def kernels() -> Iterator[Kernel]:
    """Every kernel of `cpu/kernels`."""
    for found in pkgutil.iter_modules(cpu.__path__):
        module = importlib.import_module(f"nanovllm.cpu.kernels.{found.name}")
        for each in vars(module).values():
            if isinstance(each, Kernel) and each.name.startswith(module.__name__ + "."):
                yield each


def test_every_kernel_is_found() -> None:
    names = [each.name for each in kernels()]
    assert "nanovllm.cpu.kernels.rms_norm._make" in names and len(set(names)) == len(names)


@pytest.mark.parametrize("files", WHOLE)
@pytest.mark.parametrize("level", [each for each in OWN if each != isa.level()])
@pytest.mark.full
def test_kernels_of_other_levels_that_this_cpu_has(level: str, files: list[Path]) -> None:
    arguments = "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *map(str, files)
    finish(start("", *arguments, NANOVLLM_CPU_ISA=level))


@pytest.mark.parametrize("files", WHOLE)
def test_kernels_of_other_levels_compile(files: list[Path]) -> None:
    code = COMPILE.replace("LEVELS", repr(OTHERS or OWN)).replace("TESTS", repr([*map(str, files)]))
    lines, _ = finish(start(code))
    found = [line.split() for line in lines if line.startswith("nanovllm.cpu.kernels.")]
    assert {level for _, level, _, _ in found} == set(OTHERS or OWN)
    wide = {level for _, level, zmm, _ in found if zmm == "True"}
    assert wide == {level for level in OTHERS or OWN if level.startswith(("amx", "avx512"))}


def error_of_a_start() -> str:
    with pytest.raises(ValueError, match=isa.VARIABLE) as caught:
        LLM(demo_model_path(), device="cpu")
    return str(caught.value)


def test_a_wrong_level_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    isa.forget()
    monkeypatch.setenv(isa.VARIABLE, "avx3")
    try:
        levels = "amx, avx512_bf16, avx512, avx2, generic"
        message = f"NANOVLLM_CPU_ISA=avx3: there is no such level; use one of {levels}"
        assert error_of_a_start().startswith(message)
        assert main(["doctor", "--device", "cpu"]) == 2
        assert message in capsys.readouterr().out
        monkeypatch.setenv(isa.VARIABLE, "avx512")
        isa.forget()
        monkeypatch.setattr(isa, "cpu_features", lambda: frozenset({"avx2", "fma"}))
        assert "this CPU has no avx512bw, avx512dq, avx512f, avx512vl" in error_of_a_start()
    finally:
        monkeypatch.undo()
        isa.forget()


WITHOUT = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("numba", "llvmlite") else find(name, *rest)
import nanovllm
from nanovllm.jobs.main import main
for _ in range(2):
    with nanovllm.LLM(nanovllm.demo_model_path(), device="cpu", num_kvcache_blocks=8) as llm:
        print(len(llm.generate("1 + 1 =", use_tqdm=False)))
main(["version"])
"""


def test_without_numba_a_start_says_once_what_it_would_bring() -> None:
    lines, errors = finish(start(WITHOUT, NANOVLLM_CPU_ISA=""))
    assert lines[:2] == ["1", "1"]
    assert errors.count('pip install "nanovllm[cpu]"') == 1
    assert any("kernels for CPUs: none, torch's" in line and "nanovllm[cpu]" in line for line in lines)


def test_version_and_doctor_name_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--device", "cpu", "--num-threads", "3"])
    text = capsys.readouterr().out
    assert f"\nkernels for CPUs: {isa.level()}, 3 threads\n" in text and "\nnumba " in text
    assert main(["version"]) == 0
    text = capsys.readouterr().out
    assert f"\n  kernels for CPUs: {isa.level()}, {isa.count_of(torch.get_num_threads())}\n" in text
