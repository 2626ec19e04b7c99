"""lighteval: metrics and answers of our custom model equal those of lighteval's transformers model."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import inside
import pytest
import torch
from demo_tasks import make_example

from nanovllm import demo_model_path

pytest.importorskip("lighteval", reason="needs lighteval: pip install -e '.[lighteval]'")
pytest.importorskip("accelerate", reason="needs accelerate, which lighteval accelerate does")

from lighteval.__main__ import app
from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.models.custom.custom_model import CustomModelConfig
from lighteval.models.transformers.transformers_model import TransformersModelConfig
from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
from lighteval.tasks.registry import Registry
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from nanovllm.integrations import lighteval as ours

OPTIONS = "device=cpu,dtype=float32,num_kvcache_blocks=400"
TASKS = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def choice(line, task_name):
    return Doc(query=line["prompt"], choices=line["choices"], gold_index=0, task_name=task_name)


def answer(line, task_name):
    return Doc(query=line["prompt"], choices=[line["answer"]], gold_index=0, task_name=task_name)


def text(line, task_name):
    return Doc(query=line["answer"], choices=[""], gold_index=0, task_name=task_name)


def task(name, function, metric, **options):
    return LightevalTaskConfig(
        name=name, prompt_function=function, hf_repo={folder!r}, hf_subset="default", metrics=[metric],
        evaluation_splits=["test"], hf_avail_splits=["test"], **options,
    )


TASKS_TABLE = [
    task("demo_choice", choice, Metrics.loglikelihood_acc),
    task("demo_answer", answer, Metrics.exact_match, generation_size=60, stop_sequence=["Q"]),
    task("demo_text", text, Metrics.word_perplexity),
]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the three tasks, next to their data."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = Random(0)
    kinds = ("spell", "parity", "alphabet", "reverse", "add")
    rows = [vars(make_example(rng, "test", kind)) for kind in kinds for _ in range(3)]
    for row in rows:
        row["choices"] = [row["answer"], row["answer"][::-1] + ".", "even", "odd "]
    data = folder / "data"
    data.mkdir()
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "demo_lighteval_tasks.py").write_text(TASKS.replace("{folder!r}", repr(str(data))))
    return folder / "demo_lighteval_tasks.py"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without lighteval's own tasks, one of which downloads a file when it is imported; caches are in a
    folder.
    """
    for name in ("_load_from_files", "_load_from_subdirs"):
        monkeypatch.setattr(Registry, name, staticmethod(lambda *arguments: {}))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    torch.set_grad_enabled(True)  # lighteval's transformers model disables it


def run(config: Any, file: Path, names: str, folder: Path) -> Pipeline:
    """Run an evaluation like lighteval's commands."""
    is_custom = isinstance(config, CustomModelConfig)
    pipeline = Pipeline(
        tasks=names,
        pipeline_parameters=PipelineParameters(
            launcher_type=ParallelismManager.CUSTOM if is_custom else ParallelismManager.NONE,
            custom_tasks_directory=str(file),
            max_samples=None,
        ),
        evaluation_tracker=EvaluationTracker(output_dir=str(folder), save_details=False),
        model_config=config,
    )
    pipeline.evaluate()
    return pipeline


def custom_config(folder: Path, options: str = "") -> CustomModelConfig:
    return CustomModelConfig(
        model_name=f"{demo_model_path()},{OPTIONS}{options}",
        model_definition_file_path=ours.__file__,
        cache_dir=str(folder / "cache"),
    )


def responses(pipeline: Pipeline) -> dict[str, list[Any]]:
    """The model's answers by task."""
    details = pipeline.evaluation_tracker.details_logger.details
    return {name: [row.model_response for row in rows] for name, rows in details.items()}


@pytest.mark.parametrize("is_chat", [True, False])
def test_metrics_and_answers_are_those_of_transformers(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    names = "demo_choice|0,demo_answer|0"
    custom = run(custom_config(tmp_path, f",override_chat_template={is_chat}"), tasks, names, tmp_path)
    monkeypatch.chdir(tmp_path)
    # With an absolute path lighteval would cache the answers.
    (tmp_path / "demo").symlink_to(demo_model_path())
    theirs = TransformersModelConfig(
        model_name="demo",
        dtype="float32",
        device="cpu",
        batch_size=8,
        override_chat_template=is_chat,
        cache_dir=str(tmp_path / "their_cache"),
    )
    reference = run(theirs, tasks, names, tmp_path)
    found, expected = custom.get_results()["results"], reference.get_results()["results"]
    assert found.keys() == expected.keys() and len(found) >= 2
    for name, metrics in expected.items():
        assert found[name] == pytest.approx(metrics, nan_ok=True)
    if is_chat:
        assert found["demo_answer:0"]["em"] > 0.5 and found["demo_choice:0"]["acc"] > 0.5
    mine, others = responses(custom), responses(reference)
    for one, other in zip(mine["demo_choice|0"], others["demo_choice|0"], strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-4) and len(one.logprobs) == 4
        assert list(one.argmax_logits_eq_gold) == list(other.argmax_logits_eq_gold)
    texts = [[row.text[0] for row in each["demo_answer|0"]] for each in (mine, others)]
    assert texts[0] == texts[1]


def test_perplexity_is_that_of_the_model(tasks: Path, tmp_path: Path) -> None:
    """Compared with transformers directly, in windows of 32 tokens."""
    pipeline = run(custom_config(tmp_path, ",max_model_len=32"), tasks, "demo_text|0", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    total, num_words = 0.0, 0
    for response in responses(pipeline)["demo_text|0"]:
        ids = [tokenizer.eos_token_id, *tokenizer.encode(response.input, add_special_tokens=False)]
        expected = 0.0
        for start in range(1, len(ids), 31):
            end = min(start + 31, len(ids))
            window = ids[max(0, end - 32) : end]
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([window[:-1]])).logits[0], -1)
            scored = torch.tensor(ids[start:end])[:, None]
            expected += logprobs[-len(scored) :].gather(1, scored).sum().item()
        assert response.logprobs == pytest.approx([expected], rel=1e-4)
        total += expected
        num_words += len(response.input.split())
    found = pipeline.get_results()["results"]["demo_text:0"]["word_perplexity"]
    assert found == pytest.approx(math.exp(-total / num_words), rel=1e-3)


def test_options(tmp_path: Path) -> None:
    model, options, generation = inside.parsed_lighteval_model(
        "a/b,dtype=float32,seed=3,enforce_eager=True,generation_parameters={temperature:0.5,top_p:0.9},device=cpu"
    )
    assert (model, options) == (
        "a/b",
        {"dtype": "float32", "seed": 3, "enforce_eager": True, "device": "cpu"},
    )
    assert generation is not None and (generation.temperature, generation.top_p) == (0.5, 0.9)
    with pytest.raises(ValueError, match="'float32' is not an option"):
        ours.NanoVLLM(custom_config(tmp_path, ",float32"))
    with pytest.raises(TypeError, match="max_num_seqs"):
        ours.NanoVLLM(custom_config(tmp_path, ",max_seqs=3"))


def test_the_program(tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's command with local data and the demo model's chat template."""
    runpy.run_module("nanovllm.integrations.lighteval", run_name="__main__")
    file = capsys.readouterr().out.strip()
    command = ["custom", f"{demo_model_path()},{OPTIONS}", file, "demo_answer|0"]
    command += ["--custom-tasks", str(tasks), "--output-dir", str(tmp_path)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    [path] = tmp_path.rglob("results_*.json")
    assert json.loads(path.read_text())["results"]["demo_answer|0"]["em"] > 0.5
