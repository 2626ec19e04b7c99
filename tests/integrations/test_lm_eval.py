"""lm-evaluation-harness: metrics and answers of `--model nanovllm` equal those of `--model hf`."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import inside
import pytest
from demo_tasks import make_example

from nanovllm import demo_model_path

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install -e '.[lm-eval]'")
pytest.importorskip("accelerate", reason="needs accelerate, which --model hf does")

import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from nanovllm.integrations.lm_eval import NanoVLLM

LENGTH = 160  # maximum length of the models; some texts and prompts are longer
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 400}
TASKS = ("demo_choice", "demo_greedy", "demo_rolling", "demo_generate")


def examples(task: str, number: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = Random(seed)
    return [vars(make_example(rng, "test", task)) for _ in range(number)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four tasks and their data, in the harness's format."""
    folder = tmp_path_factory.mktemp("tasks")
    # Differs from the questions of the other tasks: `--model hf` confuses equal texts with different
    # continuations.
    asked = [row for task in ("parity", "spell", "capitals") for row in examples(task, 5, seed=1)]
    choices = [
        {"prompt": row["prompt"], "choices": [row["answer"], row["answer"][::-1], "even", " odd "]}
        for row in asked
    ]
    rows = [*examples("spell", 5), *examples("reverse", 5), *examples("add", 5)]
    rows[0] = rows[0] | {"prompt": "WORDS TO BE CUT OFF " * 20 + rows[0]["prompt"]}
    texts = [{"text": " ".join(row["answer"] for row in examples("alphabet", n))} for n in (1, 2, 5, 12)]
    data = {"demo_choice": choices, "demo_greedy": rows, "demo_generate": rows, "demo_rolling": texts}
    own: dict[str, dict[str, Any]] = {
        "demo_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{prompt}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "demo_greedy": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{prompt}}",
            "gen_prefix": "{{answer[0]}}",  # otherwise a newline of the chat template is scored too
            "doc_to_target": "{{answer[1:]}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        "demo_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "demo_generate": {
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\nAnswer", "<|im_end|>"], "max_gen_toks": 60},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for task in TASKS:
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data[task]))
        files = {"test": str(folder / f"{task}.jsonl")}
        common = {
            "task": task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "test_split": "test",
        }
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(common | own[task]))
    return folder


@pytest.fixture(scope="module")
def model() -> Iterator[NanoVLLM]:
    model = NanoVLLM(demo_model_path(), max_length=LENGTH, **ENGINE)
    yield model
    model.model.close()


@pytest.fixture(scope="module")
def reference() -> HFLM:
    options = {"device": "cpu", "dtype": "float32", "batch_size": 8}
    return HFLM(demo_model_path(), max_length=LENGTH, **options)


@pytest.fixture(scope="module")
def results(folder: Path, model: NanoVLLM, reference: HFLM) -> tuple[dict[str, Any], dict[str, Any]]:
    """The harness's results for both models."""
    ours, theirs = (
        simple_evaluate(
            lm,
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            apply_chat_template=True,
            bootstrap_iters=0,
        )
        for lm in (model, reference)
    )
    assert ours is not None and theirs is not None
    return ours, theirs


def numbers(results: dict[str, Any], task: str) -> dict[str, float]:
    """The metrics of a task."""
    found = results["results"][task]
    return {name: value for name, value in found.items() if isinstance(value, float) and "stderr" not in name}


@pytest.mark.parametrize("task", TASKS)
def test_metrics_are_those_of_transformers(results: tuple[dict[str, Any], dict[str, Any]], task: str) -> None:
    ours, theirs = (numbers(each, task) for each in results)
    assert len(ours) == (1 if task == "demo_generate" else 2)
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_is_that_of_transformers(
    results: tuple[dict[str, Any], dict[str, Any]], task: str
) -> None:
    ours, theirs = ({row["doc_id"]: row["resps"] for row in each["samples"][task]} for each in results)
    assert ours.keys() == theirs.keys() and len(ours) >= 4
    for index, answers in ours.items():
        for answer, expected in zip(answers, theirs[index], strict=True):
            if task == "demo_generate":
                assert answer == expected
            elif task == "demo_rolling":
                assert answer[0] == pytest.approx(expected[0], rel=1e-4)
            else:
                assert answer[0][1] == expected[0][1]
                assert answer[0][0] == pytest.approx(expected[0][0], rel=1e-4, abs=1e-3)


def test_the_tasks_tell_models_apart(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The answers are right and wrong, greedy and not, and some prompts are cut. Otherwise equal metrics
    prove little.
    """
    ours, _ = results
    greedy = [row["resps"][0][0][1] for row in ours["samples"]["demo_greedy"]]
    assert set(greedy) == {True, False}
    assert 0 < numbers(ours, "demo_generate")["exact_match,none"] < 1
    assert numbers(ours, "demo_choice")["acc,none"] > 0.5


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_the_models_own_limit(tmp_path: Path, reference: HFLM) -> None:
    """Long texts, texts that fill the model's limit of 64 tokens and prompts that are cut, without
    `max_length`."""
    folder = tmp_path / "short"
    shutil.copytree(demo_model_path(), folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    ours = NanoVLLM(str(folder), **ENGINE)
    assert ours.max_length == theirs.max_length == 64
    letters = " ".join(row["answer"] for row in examples("alphabet", 40))
    ids = ours.tok_encode(letters)
    texts = [ours.tokenizer.decode(ids[:size]) for size in (1, 63, 64, 65, 128, 129, 130, 193, 700)]
    lengths = [len(ours.tok_encode(text)) for text in texts]
    assert {63, 64, 65} <= set(lengths) and max(lengths) > 600
    asked = [request("loglikelihood_rolling", text) for text in texts]
    found = ours.loglikelihood_rolling(asked)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked), rel=1e-5)
    whole = ours.tokenizer.decode(ids[:66])
    pairs = [(whole[:place], whole[place : place + size]) for place in (1, 20, 40) for size in (1, 9, 22)]
    pairs += [(whole, "A"), (whole * 3, whole[:20]), ("A", ours.tokenizer.decode(ids[:63]))]
    pairs += [
        (ours.tokenizer.decode(ids[:-9]), ours.tokenizer.decode(ids[-9:])) for ids in (ids[:65], ids[:66])
    ]
    assert {64, 65, 66} <= {len(ours.tok_encode(a + b)) for a, b in pairs}
    asked = [request("loglikelihood", *pair) for pair in pairs]
    for answer, expected in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert answer[1] == expected[1] and answer[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-4)
    options = {"until": [], "max_gen_toks": 20}
    prompts = [letters[-size:] for size in (20, 43, 44, 45, 60, 300)]
    asked = [request("generate_until", prompt, options) for prompt in prompts]
    answers = ours.generate_until(asked)
    assert answers == theirs.generate_until(asked) and all(answers)
    assert options == {"until": [], "max_gen_toks": 20}
    ours.model.close()


def test_texts_without_a_context_and_special_tokens_in_the_text(model: NanoVLLM, reference: HFLM) -> None:
    texts = [("", "ABC"), ("", "<|im_end|>ABC"), ("<|im_end|>A ", " B"), ("A  ", "B")]
    requests = [request("loglikelihood", *each) for each in texts]
    ours, theirs = model.loglikelihood(requests), reference.loglikelihood(requests)
    for answer, expected in zip(ours, theirs, strict=True):
        assert answer[1] == expected[1] and answer[0] == pytest.approx(expected[0], rel=1e-4)
    empty = [request("loglikelihood_rolling", "")]
    assert model.loglikelihood_rolling(empty) == reference.loglikelihood_rolling(empty) == [0.0]


def test_generation_options(model: NanoVLLM, reference: HFLM) -> None:
    [prompt] = [row["prompt"] for row in examples("reverse", 1)]
    chat = model.apply_chat_template([{"role": "user", "content": prompt}])
    assert chat == reference.apply_chat_template([{"role": "user", "content": prompt}])
    options: list[dict[str, Any]] = [
        {"until": ["1"], "max_gen_toks": 40},
        {"until": [" ", ":"], "max_gen_toks": 40, "do_sample": False, "temperature": 0.7},
        {"until": [], "max_gen_toks": 3},
        {"max_new_tokens": 40},
        {"until": "\n", "temperature": 0.0, "max_tokens": 50},
    ]
    requests = [request("generate_until", chat, each) for each in options]
    ours = model.generate_until(requests)
    assert ours == reference.generate_until(requests) and len(set(ours)) >= 4
    # A stop string of text and a special token; transformers keeps the text before the token.
    [whole] = model.generate_until([request("generate_until", chat, {"max_gen_toks": 80})])
    last = whole[-1]
    stop = {"until": [f"{last}<|im_end|>"], "max_gen_toks": 80}
    assert model.generate_until([request("generate_until", chat, stop)]) in ([whole], [whole[:-1]])


def test_sampled_answers(model: NanoVLLM) -> None:
    options = {"do_sample": True, "temperature": 5.0, "seed": 7, "max_gen_toks": 12}
    chat = model.apply_chat_template([{"role": "user", "content": "Spell KEY."}])
    requests = [request("generate_until", chat, options | {"seed": seed}) for seed in (7, 7, 8)]
    one, same, other = model.generate_until(requests)
    assert one == same != other


def test_thoughts_are_no_part_of_answers(model: NanoVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string within thinking text does not end it."""
    [row] = examples("reverse", 1)
    chat = model.apply_chat_template([{"role": "user", "content": row["prompt"]}])
    asked = [request("generate_until", chat, {"until": ["\n"], "max_gen_toks": 80})]
    [token_id] = model.tok_encode(":", add_special_tokens=False)
    for end in ("Answer:", token_id):
        inside.set_end_of_thoughts(monkeypatch, model, end)
        assert model.generate_until(asked) == [row["answer"].rpartition(": ")[2]]


def test_what_cannot_run_is_refused_by_name(model: NanoVLLM) -> None:
    with pytest.raises(ValueError, match="max_gen_toks=160 leaves no room for a prompt"):
        model.generate_until([request("generate_until", "A", {"max_gen_toks": LENGTH})])
    with pytest.raises(ValueError, match=r"a continuation has 200 tokens, but at most 160 .*: ' A A"):
        model.loglikelihood([request("loglikelihood", "A", " A" * 100)])
    with pytest.raises(TypeError, match="num_beams"):
        model.generate_until([request("generate_until", "A", {"num_beams": 4})])
    with pytest.raises(ValueError, match="max_length=9 and max_model_len are one option"):
        NanoVLLM(demo_model_path(), max_length=9, max_model_len=9)
    assert model.generate_until([request("generate_until", "A", {"max_gen_toks": 1})])


def test_a_choice_that_joins_the_context(model: NanoVLLM) -> None:
    """One token holds the end of the context and the choice, so no token of the choice is left to score."""
    requests = [request("loglikelihood", "x we", choice) for choice in ("r", "!")]
    with pytest.raises(ValueError, match="the continuation of pair 0 is empty"):
        model.loglikelihood(requests)


def test_the_program(folder: Path, results: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """The README's command with local data, on a machine without a GPU."""
    command = [sys.executable, "-m", "nanovllm.integrations.lm_eval", "--model", "nanovllm"]
    command += [
        "--model_args",
        f"pretrained={demo_model_path()},max_length={LENGTH},dtype=float32,num_kvcache_blocks=400",
    ]
    command += ["--include_path", str(folder), "--tasks", "demo_generate,demo_greedy"]
    command += ["--apply_chat_template", "--output_path", str(tmp_path)]
    offline = {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
    }
    subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | offline)
    [path] = tmp_path.rglob("results_*.json")
    found = json.loads(path.read_text())
    assert found["config"]["model"] == "nanovllm"
    for task in ("demo_generate", "demo_greedy"):
        assert numbers(found, task) == pytest.approx(numbers(results[0], task))
        assert all(map(math.isfinite, numbers(found, task).values()))
