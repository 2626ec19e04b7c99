"""start_profile and stop_profile: a Chrome trace of every rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from checked_llm import CheckedLLM, make_tiny

from nanovllm import SamplingParams
from nanovllm.cpu import isa

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def generate(llm: CheckedLLM) -> list[int]:
    return llm.generate([[5] * 9], GREEDY, use_tqdm=False)[0]["token_ids"]


def operations(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_writes_a_trace(model: Path, size: int, tmp_path: Path) -> None:
    shown = "nanovllm.cpu.kernels.rms_norm._make" if isa.has_kernels() else "aten::linear"
    with make_tiny(model, tensor_parallel_size=size) as llm:
        expected = generate(llm)
        folder = tmp_path / "new" / "folder"
        for count in (1, 2):  # profiles
            llm.start_profile(folder)
            assert generate(llm) == expected
            traces = llm.stop_profile()
            assert [trace.name.split(".")[0] for trace in traces] == [f"rank{rank}" for rank in range(size)]
            assert all(shown in operations(trace) for trace in traces)
            assert len(list(folder.iterdir())) == count * size
        assert generate(llm) == expected


def test_the_folder_may_be_named_by_the_environment(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_tiny(model) as llm:
        with pytest.raises(ValueError, match="needs a folder; pass one, or set VLLM_TORCH_PROFILER_DIR"):
            llm.start_profile()
        monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "named"))
        llm.start_profile()
        [trace] = llm.stop_profile()
        assert trace.parent == tmp_path / "named"


def test_mistakes_leave_the_engine_usable(model: Path, tmp_path: Path) -> None:
    with make_tiny(model) as llm:
        with pytest.raises(RuntimeError, match=r"no profile is on; call start_profile\(\) first"):
            llm.stop_profile()
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError):
            llm.start_profile(tmp_path / "file")
        llm.start_profile(tmp_path)
        with pytest.raises(RuntimeError, match="a torch profiler is already active in this process"):
            llm.start_profile(tmp_path)
        assert len(generate(llm)) == 3
    assert not torch._C._autograd._profiler_enabled(), "close() ends it"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
