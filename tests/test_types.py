"""What type checkers, editors and `inspect.signature` see of the constructors that users call."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nanovllm import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.config import Config

ROOT = Path(__file__).parent.parent
RIGHT = """
from pathlib import Path
import torch
from nanovllm import BeamSearchParams, EngineArgs, LLM, PoolingParams, SamplingParams, StructuredOutputsParams
llm = LLM(Path("m"), dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len="auto", seed=3)
LLM(model="m", download_dir=Path("d"), hf_overrides={"a": 1}, generation_config=Path("g"), quantization=None)
params = SamplingParams(temperature=0, max_tokens=None, stop=["a"], logit_bias={5: -1.0})
answers: list[str] = [out.outputs[0].text for out in llm.generate(["x"], params)]
PoolingParams(dimensions=5)
BeamSearchParams(beam_width=4, max_tokens=4)
StructuredOutputsParams(regex="a")
EngineArgs(model="m", seed=4)
"""
WRONG = (
    "SamplingParams(max_tokns=3)",
    'SamplingParams(max_tokens="3")',
    "SamplingParams(0.5)",
    'LLM("m", max_seqs=3)',
    'LLM("m", seed="3")',
    'LLM("m", 3)',
    "LLM()",
    "PoolingParams(dimnsions=4)",
    "BeamSearchParams(beam_width=4, max_tokns=4)",
    'StructuredOutputsParams(regx="a")',
    'EngineArgs(model="m", sed=4)',
)


def lines_with_errors(tmp_path: Path, *checker: str) -> set[str]:
    """The lines of both snippets in which a type checker sees an error."""
    script = tmp_path / "script.py"
    script.write_text("\n".join([RIGHT.strip(), *WRONG]))
    done = subprocess.run(
        [sys.executable, "-m", *checker, str(script)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"script\.py:(\d+)(?::\d+)*(?: -)?:? error", done.stdout)
    return {script.read_text().splitlines()[int(number) - 1] for number in found}


def test_mypy_sees_each_wrong_argument(tmp_path: Path) -> None:
    """With the options of `mypy` alone, which then finds in the cache what this has read of torch."""
    assert lines_with_errors(tmp_path, "mypy") == set(WRONG)


@pytest.mark.full
def test_pyright_sees_each_wrong_argument(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="it needs pip install 'nanovllm[types]', with node 280 MB")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    pyright = "basedpyright", "--level", "error", "--project", str(tmp_path), "--pythonpath", sys.executable
    assert lines_with_errors(tmp_path, *pyright) == set(WRONG)


@pytest.mark.parametrize(
    ("made", "of"),
    [
        (LLM, Config),
        (EngineArgs, Config),
        *(
            (each, each)
            for each in (SamplingParams, PoolingParams, BeamSearchParams, StructuredOutputsParams)
        ),
    ],
)
def test_signatures_show_the_names(made: type, of: type[Any]) -> None:
    """Each with its type and default, and by name alone where the order of other engines differs."""
    parameters = inspect.signature(made).parameters
    shown = {name: each.default for name, each in parameters.items() if name != "model"}
    names = {each.name: each.default for each in fields(of) if each.name != "model"}
    if made is EngineArgs:  # vLLM's arguments too
        assert names.items() <= shown.items()
        return
    assert list(shown) == list(names)
    assert {name: each for name, each in shown.items() if each is not inspect.Parameter.empty}.items() <= (
        names.items()
    )
    assert not any("Held" in str(each.annotation) for each in parameters.values())
    if made in (LLM, SamplingParams, PoolingParams):
        assert {parameters[name].kind for name in names} == {inspect.Parameter.KEYWORD_ONLY}


def test_the_help_of_llm_has_its_options() -> None:
    assert f"\nseed: {Config.__dataclass_fields__['seed'].metadata['option'].text}\n" in str(
        LLM.__init__.__doc__
    )


def test_at_run_time_vllms_neutral_arguments_are_taken() -> None:
    assert SamplingParams(best_of=None) == SamplingParams()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'max_tokns'; did you mean 'max_tokens'"):
        SamplingParams(max_tokns=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown argument '_call'; it knows: temperature, "):
        SamplingParams(_call="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'max_seqs'; did you mean 'max_num_seqs'"):
        LLM("m", max_seqs=3)  # type: ignore[call-arg]
