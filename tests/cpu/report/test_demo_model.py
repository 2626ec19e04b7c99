"""The bundled model: real text through the whole engine, in seconds on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checked_llm import CheckedLLM
from demo_tasks import heldout
from eval_demo_model import answer, evaluate, log_probabilities

from nanovllm import SamplingParams, demo_model_path

GREEDY = SamplingParams(temperature=0, max_tokens=300)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def llm() -> Iterator[CheckedLLM]:
    # The KV cache holds 250 problems at once and no more: the checks visit all blocks after every step.
    with CheckedLLM(demo_model_path(), device="cpu", num_kvcache_blocks=3000) as llm:
        yield llm


def ask(llm: CheckedLLM, *questions: str) -> list:
    return llm.chat(
        [[{"role": "user", "content": question}] for question in questions], GREEDY, use_tqdm=False
    )


def test_accuracy_on_problems_never_trained_on(llm: CheckedLLM) -> None:
    assert evaluate(llm, 250)["overall"] >= 0.95


def test_log_probabilities_show_what_a_quantised_cache_costs(llm: CheckedLLM) -> None:
    outputs = answer(llm, 20)
    count = sum(len(output.prompt_token_ids) + len(output["token_ids"]) - 1 for output in outputs)
    found = []
    for dtype in ("auto", "auto", "fp8"):
        options = {"device": "cpu", "num_kvcache_blocks": 300, "kv_cache_dtype": dtype}
        with CheckedLLM(demo_model_path(), **options) as other:
            found.append(log_probabilities(other, outputs)[0])
            assert found[-1].shape == (count,)
    assert torch.equal(found[0], found[1])
    assert 1e-4 < (found[2] - found[0]).abs().mean() < 0.2


def test_accuracy_holds_under_preemption_and_chunks() -> None:
    """Too few blocks for the batch and tiny chunks: the answers stay the same although sequences are
    preempted.
    """
    cache = {"num_kvcache_blocks": 40, "kvcache_block_size": 16}
    options = {"device": "cpu", "max_num_batched_tokens": 50, "max_num_seqs": 24, **cache}
    with CheckedLLM(demo_model_path(), **options) as llm:
        assert evaluate(llm, 80, seed=2)["overall"] >= 0.95
        assert sum(seq.num_preemptions > 0 for seq in llm.sequences) >= 5


def test_answers_vary_in_length_and_end_by_themselves(llm: CheckedLLM) -> None:
    outputs = ask(llm, *[example.prompt for example in heldout(60, seed=3)])
    lens = [len(output["token_ids"]) for output in outputs]
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    assert min(lens) < 20 and max(lens) > 80


def test_text_and_ids_agree(llm: CheckedLLM) -> None:
    (output,) = ask(llm, "Reverse the word BANANA.")
    ids = output["token_ids"]
    assert ids[-1] in llm.model_config.eos_token_ids and output.outputs[0].stop_reason is None
    assert output["text"] == llm.tokenizer.decode(ids[:-1])
    assert output["text"].endswith("ANANAB")
    assert "BANANA" in output.prompt and llm.tokenizer.decode(output.prompt_token_ids) == output.prompt


def test_a_text_is_the_same_as_its_tokens(llm: CheckedLLM) -> None:
    (chat,) = ask(llm, "Add 12 and 30.")
    forms = [
        chat.prompt,
        chat.prompt_token_ids,
        {"prompt": chat.prompt},
        {"prompt_token_ids": chat.prompt_token_ids},
    ]
    for form in forms:
        assert llm.generate(form, GREEDY, use_tqdm=False)[0]["text"] == chat["text"]
    assert [o["text"] for o in llm.generate(forms, GREEDY, use_tqdm=False)] == [chat["text"]] * 4


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(llm: CheckedLLM) -> None:
    (full,) = ask(llm, "Reverse the word BANANA.")
    stop = full["token_ids"][5]
    params = SamplingParams(temperature=0, max_tokens=300, stop_token_ids=[stop])
    (output,) = llm.generate(full.prompt, params, use_tqdm=False)
    end = full["token_ids"].index(stop)
    assert output["token_ids"] == full["token_ids"][: end + 1]
    assert output.outputs[0].stop_reason == stop
    assert output["text"] == llm.tokenizer.decode(full["token_ids"][:end])


def test_any_text_goes_through(llm: CheckedLLM) -> None:
    text = "héllo wörld, 你好 🌍👨‍👩‍👧 \x00\t\n"
    (output,) = llm.generate(text, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert llm.tokenizer.decode(output.prompt_token_ids) == text


@pytest.mark.full
def test_generate_prints_nothing_into_a_file(
    llm: CheckedLLM, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=False)
    silent = capfd.readouterr()
    assert (silent.out, silent.err) == ("", "")
    code = (
        "from nanovllm import LLM, SamplingParams, demo_model_path\n"
        "llm = LLM(demo_model_path(), device='cpu', num_kvcache_blocks=64)\n"
        "llm.generate(['abc', 'b'], SamplingParams(max_tokens=3))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean_env()
    )
    # Neither a terminal nor a run long enough for progress lines.
    assert (shown.stdout, shown.stderr) == ("", "")


def test_example_script() -> None:
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=ROOT, capture_output=True, text=True, check=True, env=clean_env()
    )
    assert done.stdout.count("\n> ") >= 5
    assert "--model" in done.stdout


def clean_env() -> dict[str, str]:
    return {
        key: value for key, value in os.environ.items() if key not in ("TQDM_DISABLE", "TRITON_INTERPRET")
    }
