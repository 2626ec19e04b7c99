"""A profile on a GPU contains its kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams, demo_model_path

pytestmark = pytest.mark.gpu


def test_kernels_are_in_the_trace(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(demo_model_path(), max_num_seqs=8) as llm:
        expected = llm.generate("What is 2 + 3?", params, use_tqdm=False)[0]["text"]
        for _ in range(2):
            llm.start_profile(tmp_path)
            assert llm.generate("What is 2 + 3?", params, use_tqdm=False)[0]["text"] == expected
            [trace] = llm.stop_profile()
            with gzip.open(trace, "rt") as file:
                kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
            assert "kernel" in kinds
