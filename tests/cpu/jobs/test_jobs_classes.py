"""Jobs with a model that classifies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import TOKENS, write_demo, write_head_model
from jobs import Lent, read_rows, run, write_rows

from nanovllm import LLM
from nanovllm.jobs.errors import REFUSED
from nanovllm.jobs.main import main

TEXTS = ["What is 2 + 3?", "Spell NOTE.", "Count down from 9.", "What is 2 + 4?"]
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**24}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_demo(tmp_path_factory.mktemp("classes"), 3)
    with LLM(str(folder), dtype="float32", **OPTIONS) as llm:
        yield llm


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Good rows, one that is empty, and one with parameters of its own."""
    good: list[dict[str, Any]] = [{"id": f"r{number}", "prompt": text} for number, text in enumerate(TEXTS)]
    return write_rows(
        tmp_path / "rows.jsonl", [*good, {"prompt": ""}, {"prompt": "a", "sampling_params": {"top_k": 1}}]
    )


@pytest.mark.parametrize("options", [(), ("--ordered",)], ids=["any order", "ordered"])
def test_rows_get_labels_and_values(tmp_path: Path, rows: Path, llm: LLM, options: tuple[str, ...]) -> None:
    out = tmp_path / "out.jsonl"
    run(rows, "-o", out, *options, make_llm=Lent(llm))
    found = read_rows(out)
    wanted = llm.classify(TEXTS, use_tqdm=False)
    assert [row["id"] for row in found] == ["r0", "r1", "r2", "r3", None, None]
    for row, output in zip(found, wanted, strict=False):
        assert row["text"] == output.outputs.label and row["error"] is None
        assert list(row["choice_scores"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert list(row["choice_scores"].values()) == pytest.approx(output.outputs.probs, abs=1e-5)
        assert row["choice_scores"][row["text"]] == max(row["choice_scores"].values())
        assert (row["prompt_tokens"], row["completion_tokens"]) == (len(output.prompt_token_ids), 0)
    assert "the prompt['prompt'] is empty" in found[4]["error"]
    assert "sampling_params' is {'top_k': 1}" in found[5]["error"]
    before = out.read_bytes()
    run(rows, "-o", out, *options, make_llm=Lent(llm))
    assert out.read_bytes() == before


def test_a_job_that_is_resumed(tmp_path: Path, llm: LLM) -> None:
    """Rows without a line are classified, others stay."""
    few = write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in TEXTS])
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run(few, "-o", whole, make_llm=Lent(llm)) == 0
    assert run(few, "-o", parts, "--limit", 2, make_llm=Lent(llm)) == 0
    assert read_rows(parts) == read_rows(whole)[:2]
    assert run(few, "-o", parts, "--extend", make_llm=Lent(llm)) == 0
    assert read_rows(parts) == read_rows(whole)


def test_jobs_that_are_refused(
    tmp_path: Path, rows: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_rows(
        tmp_path / "batch.jsonl",
        [
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "m", "prompt": "a"},
            }
        ],
    )
    for given, message in (
        ((rows, "--sampling", "top_k=3"), '--sampling {"top_k": 3} draws tokens, and'),
        ((rows, "--choice", "a,b"), "--choice need a model that generates"),
        ((batch,), "rows of an OpenAI batch"),
    ):
        assert run(*given, "-o", tmp_path / "out.jsonl", make_llm=Lent(llm)) == REFUSED
        assert message in capsys.readouterr().out
        assert not (tmp_path / "out.jsonl").exists() or not read_rows(tmp_path / "out.jsonl")
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
    folder = write_head_model(tmp_path / "tokens", "qwen3", TOKENS)
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, **OPTIONS) as tokens:
        assert run(rows, "-o", tmp_path / "out.jsonl", make_llm=Lent(tokens)) == REFUSED
    assert "a job classifies whole rows" in capsys.readouterr().out


def test_conversations_are_written_by_the_template(tmp_path: Path, llm: LLM) -> None:
    few = write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in TEXTS])
    out = tmp_path / "out.jsonl"
    tokenizer = llm.get_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    try:
        assert run(few, "-o", out, "--chat", make_llm=Lent(llm)) == 0
    finally:
        tokenizer.chat_template = None
    ids = [tokenizer(f"user: {text} ", add_special_tokens=False)["input_ids"] for text in TEXTS]
    wanted = torch.tensor([each.outputs.probs for each in llm.classify(ids, use_tqdm=False)])
    found = torch.tensor([list(row["choice_scores"].values()) for row in read_rows(out)])
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_check_knows_what_a_run_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_demo(tmp_path / "model", 3)
    texts = ["1 " * 200, "1 " * 600, "Spell NOTE."]
    few = write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in texts])
    own = write_rows(tmp_path / "own.jsonl", [{"prompt": "a", "sampling_params": {"top_k": 1}}])
    with LLM(str(folder), **OPTIONS) as llm:
        lengths = [len(llm.get_tokenizer()(text)["input_ids"]) for text in texts]
    assert lengths[1] > 1000 > lengths[0] == max(lengths[0], lengths[2])

    def checked(*given: object) -> tuple[int, str]:
        code = main(["check", *map(str, given), "--model", str(folder), "--device", "cpu"])
        return code, capsys.readouterr().out

    code, said = checked(few, "--max-model-len", lengths[0])  # a prompt of this length can be classified
    assert code != 0 and f"has {lengths[1]} tokens, and at most {lengths[0]} fit" in said and "1 bad" in said
    assert "nothing is drawn" in checked(own)[1]
    assert "draws tokens" in checked(few, "--sampling", "top_k=3")[1]
