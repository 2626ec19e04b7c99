"""Jobs whose answers have thinking and tool calls: columns of lines and tables; messages of OpenAI."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from jobs import FakeLLM, read_rows, run, write_rows

from nanovllm import SamplingParams
from nanovllm.jobs.openai_batch import OpenAIFormat, read_body
from nanovllm.jobs.run import sample_of
from nanovllm.jobs.tasks import Task
from nanovllm.outputs import CompletionOutput, RequestOutput

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class ThinkingLLM(FakeLLM):
    """Thinks about each prompt; calls a tool if it is asked to."""

    def answer(self, index: int, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        text = prompt["prompt"] if isinstance(prompt, dict) else prompt.text
        calls = [CALL] if "call" in text else []
        errors = ["a call is cut off"] if "broken" in text else []
        answers = [
            CompletionOutput(
                number,
                "" if calls or "deep" in text else "yes",
                [1, 2, 3],
                finish_reason="stop",
                reasoning=f"hm {number}",
                tool_calls=calls,
                tool_call_errors=errors,
                num_reasoning_tokens=2,
            )
            for number in range(params.n)
        ]
        return RequestOutput(str(index), text, [1], None, answers, index=index)


def test_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "call", "reasoning": "given"}, {"prompt": "broken"}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert run(source, "-o", tmp_path / "out.jsonl", "--columns", "reasoning", make_llm=ThinkingLLM) == 0
    first, second = read_rows(tmp_path / "out.jsonl")
    assert (first["text"], first["reasoning"], first["tool_calls"]) == ("", "hm 0", [CALL])
    assert (
        first["input_reasoning"] == "given" and "tool_call_errors" not in first and "reasonings" not in first
    )
    assert (second["tool_calls"], second["tool_call_errors"]) == ([], ["a call is cut off"])
    assert run(source, "-o", tmp_path / "out.csv", make_llm=ThinkingLLM) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["reasoning"] for row in table] == ["hm 0"] * 2
    assert json.loads(table[0]["tool_calls"]) == [CALL]
    assert run(source, "-o", tmp_path / "out.parquet", make_llm=ThinkingLLM) == 0
    found = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert found[1]["reasoning"] == "hm 0" and json.loads(found[1]["tool_call_errors"]) == [
        "a call is cut off"
    ]


def test_several_completions(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": "call"}])
    sampling = '{"n": 2, "temperature": 1}'
    assert run(source, "-o", tmp_path / "out.jsonl", "--sampling", sampling, make_llm=ThinkingLLM) == 0
    [row] = read_rows(tmp_path / "out.jsonl")
    assert row["reasoning"] == "hm 0" and row["reasonings"] == ["hm 0", "hm 1"]
    assert row["tool_calls"] == [CALL] and row["all_tool_calls"] == [[CALL], [CALL]]


def test_without_parsers_there_are_no_columns(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": "call"}])
    assert run(source, "-o", tmp_path / "out.jsonl") == 0
    [row] = read_rows(tmp_path / "out.jsonl")
    assert not {"reasoning", "tool_calls", "tool_call_errors"} & row.keys()


def test_openais_messages(tmp_path: Path) -> None:
    url = "/v1/completions"
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"prompt": name}}
        for name in ("call", "plain")
    ]
    assert (
        run(write_rows(tmp_path / "rows.jsonl", lines), "-o", tmp_path / "out.jsonl", make_llm=ThinkingLLM)
        == 0
    )
    body = read_rows(tmp_path / "out.jsonl")[0]["response"]["body"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert body["choices"][0]["text"] == "" and body["choices"][0]["finish_reason"] == "stop"


def test_messages_of_chats() -> None:
    llm, format_ = ThinkingLLM(), OpenAIFormat(SamplingParams(), 0, "model")
    for prompt, content, calls, reason in [
        ("call", None, [CALL], "tool_calls"),
        ("plain", "yes", None, "stop"),
    ]:
        output = llm.answer(0, {"prompt": prompt}, SamplingParams())
        task = Task(0, "a", [], SamplingParams(), is_chat=True, request={"model": "model"})
        [choice] = format_.answer(task, output)["response"]["body"]["choices"]
        assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == content
        assert choice["message"]["reasoning"] == "hm 0" and choice["message"].get("tool_calls") == calls
        assert choice["finish_reason"] == reason
    body = {"messages": [], "reasoning_effort": "low"}
    assert read_body("/v1/chat/completions", body) == ({}, {"reasoning_effort": "low"})
    with pytest.raises(ValueError, match="'reasoning_effort' in the body is not known for /v1/completions"):
        read_body("/v1/completions", {"prompt": "a", "reasoning_effort": "low"})


def test_an_answer_that_is_thinking_alone_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": each} for each in ("deep", "deeper", "call", "plain")]
    )
    assert run(source, "-o", tmp_path / "out.jsonl", make_llm=ThinkingLLM) == 0
    assert "2 stop while thinking" in capsys.readouterr().err
    samples = [sample_of(row["index"], row) for row in read_rows(tmp_path / "out.jsonl")]
    ended = {sample.index: sample.reasons for sample in samples}
    assert ended == {0: ("stop while thinking",), 1: ("stop while thinking",), 2: ("stop",), 3: ("stop",)}
