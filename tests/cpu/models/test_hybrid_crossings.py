"""What there is beside a plain call, with a model that has states: samples, streams, aborts, scores,
embeddings, sleep, new weights, rules, stop strings, jobs and replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_llm import CheckedLLM, make_tiny
from digests import make_digest
from jobs import Lent, read_rows, run, write_rows
from safetensors.torch import load_file
from tiny_models import transformers_answers, transformers_logits, transformers_model, write_tiny_model

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model_path

FAMILY = "qwen3_5"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHARED = [3 + 7 * index % 83 for index in range(41)]
PROMPTS = [[*SHARED, *range(10 + own, 14 + own)] for own in range(6)]
LITTLE = {"num_kvcache_blocks": 60, "max_num_batched_tokens": 13}  # prompts come in parts


def tokens(outputs: Any) -> list[list[int]]:
    return [each["token_ids"] for each in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("hybrid"), FAMILY)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[CheckedLLM]:
    with make_tiny(folder, **LITTLE) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder: Path, llm: CheckedLLM) -> list[list[int]]:
    found = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert found == transformers_answers(folder, PROMPTS, 6, found)
    return found


def test_streams_and_their_parts(llm: CheckedLLM, expected: list[list[int]]) -> None:
    whole = {output.index: output["token_ids"] for output in llm.stream(iter(PROMPTS), GREEDY)}
    assert [whole[index] for index in range(len(PROMPTS))] == expected
    parts: dict[int, list[int]] = defaultdict(list)
    for output in llm.stream(PROMPTS, GREEDY, deltas=True):
        parts[output.index] += output["token_ids"]
    assert [parts[index] for index in range(len(PROMPTS))] == expected


def test_samples_of_one_prompt(folder: Path, llm: CheckedLLM) -> None:
    """The same with and without a prefix cache, whatever runs beside them."""
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6, ignore_eos=True)
    with make_tiny(folder, enable_prefix_caching=False, async_scheduling=False, **LITTLE) as plain:
        alone = [plain.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
    for output, other in zip(llm.generate(PROMPTS, params, use_tqdm=False), alone, strict=True):
        samples = [answer.token_ids for answer in output.outputs]
        assert samples == [answer.token_ids for answer in other.outputs] and samples[0] != samples[1]


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_an_abort_changes_no_other_answer(llm: CheckedLLM, expected: list[list[int]], steps: int) -> None:
    llm.reset_prefix_cache()
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    found = {output.request_id: output for _ in range(steps) for output in llm.step()}
    assert llm.abort(ids[1])["finish_reason"] == "abort"
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step()}
    for index in (0, 2, 3, 4, 5):
        assert found[ids[index]]["token_ids"] == expected[index]


def test_scores_and_embeddings(folder: Path, llm: CheckedLLM) -> None:
    """Twice, so that a kept state begins the second call's prompts."""
    model = transformers_model(folder)
    for _ in range(2):
        scores = llm.score_pairs([(prompt[:-4], prompt[-4:]) for prompt in PROMPTS], use_tqdm=False)
        embeddings = llm.embed(PROMPTS, use_tqdm=False, normalize=False)
        for prompt, score, embedding in zip(PROMPTS, scores, embeddings, strict=True):
            wanted = transformers_logits(folder, prompt).log_softmax(-1)[-5:-1]
            wanted = wanted.gather(1, torch.tensor(prompt[-4:])[:, None])[:, 0]
            assert score.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)
            with torch.inference_mode():
                hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            assert np.allclose(embedding.outputs.embedding, hidden.numpy(), atol=2e-3)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_new_weights(folder: Path, tmp_path: Path, expected: list[list[int]], level: int) -> None:
    """States that were kept before are those of other weights, and forgotten."""
    other = write_tiny_model(tmp_path, FAMILY, seed=1)
    with make_digest(folder, **LITTLE) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        before = llm.on_ranks("digest")
        llm.sleep(level)
        llm.wake_up()
        assert llm.on_ranks("digest") == before
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        llm.update_weights(load_file(other / "model.safetensors").items())
        found = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert found == transformers_answers(other, PROMPTS, 6, found) and found != expected
        llm.update_weights(load_file(folder / "model.safetensors").items())
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


TEXTS = [f"Add the numbers and say what you did with them: 2 + {number}." for number in range(5)]
RULES = [
    SamplingParams(
        temperature=0.8, seed=3, structured_outputs=StructuredOutputsParams(choice=["odd", "even"])
    ),
    SamplingParams(temperature=0.8, seed=3, structured_outputs=StructuredOutputsParams(regex="[0-9]{3,5}")),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, stop=["e", "1"]),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=8, min_tokens=4, bad_words=["a"]),
]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With as many tokens as the demo model's tokenizer has."""
    size = 512
    return write_tiny_model(tmp_path_factory.mktemp("speaking"), FAMILY, vocab_size=size)


def answers(llm: LLM) -> list[list[tuple[str, list[int]]]]:
    found: list[list[tuple[str, list[int]]]] = [[] for _ in RULES]
    for number, params in enumerate(RULES):
        for output in llm.generate(TEXTS, params, use_tqdm=False):
            found[number].append((output["text"], output["token_ids"]))
    return found


def test_rules_and_stop_strings(speaking: Path) -> None:
    options: dict[str, Any] = {"tokenizer": demo_model_path(), "device": "cpu", "dtype": "float32"}
    options |= {"max_model_len": 128, "kvcache_block_size": 16}
    with LLM(speaking, enable_prefix_caching=False, async_scheduling=False, **options) as plain:
        wanted = answers(plain)
    with LLM(speaking, max_num_batched_tokens=19, **options) as llm:
        assert answers(llm) == wanted and answers(llm) == wanted
        assert llm.stats().num_cached_tokens > 0
    assert {text for text, _ in wanted[0]} <= {"odd", "even"}
    assert all(text.isdigit() and 3 <= len(text) <= 5 for text, _ in wanted[1])
    assert all("e" not in text and "1" not in text for text, _ in wanted[2])


def test_jobs_and_replicas(tmp_path: Path, speaking: Path) -> None:
    """A job in two parts, and one of two replicas, write what one engine writes at once."""
    options: dict[str, Any] = {"tokenizer": demo_model_path(), "device": "cpu", "dtype": "float32"}
    options |= {"max_model_len": 128, "max_num_batched_tokens": 64, "kvcache_block_size": 16}
    rows = write_rows(tmp_path / "rows.jsonl", [{"id": text[-3:], "prompt": text} for text in TEXTS])
    flags = ["--ordered", "--sampling", "temperature=0.7,max_tokens=6,seed=5"]
    whole, parts, both = (tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "both"))
    with LLM(speaking, **options) as llm:
        assert run(rows, "-o", whole, *flags, make_llm=Lent(llm)) == 0
        assert run(rows, "-o", parts, *flags, "--limit", 2, make_llm=Lent(llm)) == 0
        assert read_rows(parts) == read_rows(whole)[:2]
        assert run(rows, "-o", parts, *flags, "--extend", make_llm=Lent(llm)) == 0
    with LLM(speaking, data_parallel_size=2, **options) as llm:
        assert run(rows, "-o", both, *flags, make_llm=Lent(llm)) == 0
    assert read_rows(parts) == read_rows(both) == read_rows(whole)
    assert all(row["completion_tokens"] and row["error"] is None for row in read_rows(whole))
