"""With NANOVLLM_CPU_CHECK=1 a kernel that leaves the memory of its tensors is named; the others pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_kernel_cases import finish, start

from nanovllm.cpu.kernels.checking import CHECKED

HERE = Path(__file__).parent
CHECK = {"NANOVLLM_CPU_CHECK": "1"}
WRONG = """
import torch
from cpu_kernel_cases import copy, threads
from nanovllm.cpu.kernels.recording import Arena, Recording
source, target = torch.arange(6.0), torch.full((6,), -1.0)
for number in (1, 2):
    with threads(number):
        copy(source, target, 6)
        for call in (copy, lambda *args: Recording.record(lambda: copy(*args), Arena())):
            for args in ((source, torch.empty(20), 7), (torch.zeros(20), target, 7), (source[1:], target, 6)):
                try:
                    call(*args)
                except AssertionError as error:
                    print(str(error).split(" used the address ")[0])
        assert torch.equal(copy_of := target.clone(), target) and copy_of[0] != -1
        print("end")
"""


@pytest.mark.skipif(CHECKED, reason="this process checks already")
def test_a_kernel_that_goes_one_element_too_far_is_named() -> None:
    lines, _ = finish(start(WRONG, **CHECK))
    assert lines == [*["cpu_kernel_cases._make_copy"] * 6, "end"] * 2


ENGINE = """
from nanovllm import LLM, SamplingParams, demo_model_path
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
with LLM(demo_model_path(), device="cpu", dtype="float32", num_kvcache_blocks=8, num_threads=2) as llm:
    for output in llm.generate(["12 + 3 =", "Sort: d b a"], params, use_tqdm=False):
        print(output.outputs[0].token_ids, output.outputs[0].logprobs)
"""


@pytest.mark.skipif(CHECKED, reason="this process checks already")
def test_an_engine_passes_with_checks_and_gives_the_same_answers() -> None:
    checked, plain = start(ENGINE, **CHECK), start(ENGINE)
    answers, _ = finish(checked)
    assert len(answers) == 2 and answers == finish(plain)[0]


@pytest.mark.skipif(CHECKED, reason="this process checks already")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param("test_cpu_kernels_[dn]*.py", id="few"),
        pytest.param("test_cpu_[kr]*.py", id="all", marks=pytest.mark.full),
    ],
)
def test_the_tests_of_kernels_pass_with_checks(names: str) -> None:
    files = sorted(HERE.glob(names))
    assert len(files) > 1
    finish(start("", "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *map(str, files), **CHECK))
