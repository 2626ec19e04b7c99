"""Columns of `nanovllm run`: those that answers repeat, and those of which it makes conversations."""

from __future__ import annotations

import csv
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from jobs import FakeLLM, no_model, read_rows, run, watched, write_rows

from nanovllm.jobs import main as program
from nanovllm.jobs.output import MAX_COLUMNS
from nanovllm.jobs.params import PARAMS_COLUMN
from nanovllm.jobs.parquet import import_pyarrow

OURS = ["index", "id", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error"]
ROWS: list[Any] = [
    {"id": "a", "prompt": "one", "label": 3, "text": "theirs", "ok": True, "score": 1},
    {"id": "b", "prompt": "", "label": None, "input_text": [1], "score": 0.5, "=x": "=cmd()"},
    b"{ broken\n",
    {"id": "c", "prompt": "two", "label": 7, "tags": {"k": "é"}, "ok": False, "=x": None},
]


def test_answers_repeat_the_columns_of_their_rows(tmp_path: Path) -> None:
    """Also error rows; a column with the name of one of ours gets `input_` before it."""
    source, out = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 1
    found = [{name: value for name, value in row.items() if name not in OURS} for row in read_rows(out)]
    assert found == [
        {"prompt": "one", "label": 3, "input_text": "theirs", "ok": True, "score": 1},
        {"prompt": "", "label": None, "input_input_text": [1], "score": 0.5, "=x": "=cmd()"},
        {},
        {"prompt": "two", "label": 7, "tags": {"k": "é"}, "ok": False, "=x": None},
    ]
    assert all(list(row)[:7] == OURS for row in read_rows(out))
    for value, names in (("none", set()), ("label,score", {"label", "score"}), ('["label"]', {"label"})):
        other = tmp_path / f"{len(value)}.jsonl"
        assert run(source, "-o", other, "--columns", value) == 1
        assert {name for row in read_rows(other) for name in row} == {*OURS, *names}
    assert run(source, "-o", out, "--columns", "all", make_llm=no_model) == 1, "it is the default"


def test_another_id_column(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"id": 5, "key": "k", "prompt": "a"}])
    assert run(source, "-o", tmp_path / "out.jsonl", "--id-column", "key") == 0
    [row] = read_rows(tmp_path / "out.jsonl")
    assert (row["id"], row["key"], row["input_id"]) == ("k", "k", 5)


def test_tables_have_the_columns(tmp_path: Path) -> None:
    pyarrow = import_pyarrow()
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    names = ["prompt", "label", "input_text", "ok", "score", "input_input_text", "=x", "tags"]
    assert run(source, "-o", tmp_path / "out.csv", "--csv-safe") == 1
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == [*OURS, *names[:6], "'=x", "tags"], "a name is a cell, too"
    assert [table[0][name] for name in names[:5]] == ["one", "3", "theirs", "true", "1"]
    assert (table[1]["'=x"], table[1]["input_input_text"], table[1]["label"]) == ("'=cmd()", "[1]", "")
    assert table[3]["tags"] == '{"k": "é"}'
    assert run(source, "-o", tmp_path / "out.parquet") == 1
    read = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert read.column_names[10:] == names
    kinds = {name: str(read.schema.field(name).type) for name in names}
    assert kinds == dict.fromkeys(names, "string") | {"label": "int64", "ok": "bool", "score": "double"}
    assert read["label"].to_pylist() == [3, None, None, 7] and read["score"].to_pylist() == [
        1,
        0.5,
        None,
        None,
    ]


def test_columns_without_values_are_not_in_a_csv_file(tmp_path: Path) -> None:
    """Ours; those of the input are what the input has."""
    rows = [{"prompt": "a", "label": None}, {"prompt": "b", "label": None}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    for ending in ("csv", "tsv"):
        assert run(source, "-o", tmp_path / f"out.{ending}") == 0
        delimiter = {"csv": ",", "tsv": "\t"}[ending]
        header = (tmp_path / f"out.{ending}").read_text().partition("\n")[0].split(delimiter)
        assert header == [name for name in OURS if name not in ("id", "error")] + ["prompt", "label"]
    empty = write_rows(tmp_path / "empty.jsonl", [b"{ broken\n"])
    assert run(empty, "-o", tmp_path / "empty.csv") == 1
    header = (tmp_path / "empty.csv").read_text().partition("\n")[0]
    assert header == "index,text,finish_reason,prompt_tokens,completion_tokens,error", (
        "the text always has its column"
    )


def test_a_table_of_ever_new_columns_ends(tmp_path: Path) -> None:
    rows = [{"prompt": "a", f"c{number}": number} for number in range(MAX_COLUMNS + 50)]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.csv"
    assert run(source, "-o", out) == 0
    header = out.read_text().partition("\n")[0].split(",")
    assert len(header) == 5 + MAX_COLUMNS and len(read_rows(tmp_path / "out.csv.rows.jsonl")) == len(rows)


def test_columns_of_parquet(tmp_path: Path) -> None:
    """Only those that are wanted are read; bytes are no JSON, and become null."""
    pyarrow = import_pyarrow()
    columns = {"prompt": ["a", "b"], "image": [b"\xff", None], "n": [1, 2], "broken": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", "-o", tmp_path / "out.jsonl") == 0
    assert [(row["image"], row["n"]) for row in read_rows(tmp_path / "out.jsonl")] == [(None, 1), (None, 2)]
    assert run(tmp_path / "in.parquet", "-o", tmp_path / "n.jsonl", "--columns", "n") == 0
    assert [set(row) - {*OURS} for row in read_rows(tmp_path / "n.jsonl")] == [{"n"}] * 2


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    batch = [{"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "a"}}]
    openai = write_rows(tmp_path / "batch.jsonl", batch)
    for file, argv, error in (
        (
            source,
            ["--columns", "label,nope"],
            "in.jsonl: the first 100 rows have no column 'nope', but 'id', ",
        ),
        (source, ["--template", "{nope} {{}}"], "rows have no column 'nope', but"),
        (source, ["--system", "s"], "--system is for conversations; add --chat, or --messages-column"),
        (source, ["--chat", "--messages-column", "prompt"], "is of conversations already; leave out --chat"),
        (
            openai,
            ["--columns", "all"],
            "batch.jsonl is an OpenAI batch, which has no --columns; leave it out",
        ),
        (openai, ["--chat"], "batch.jsonl is an OpenAI batch, which has no --chat"),
    ):
        assert run(file, "-o", out, *argv, make_llm=no_model) == 2
        assert error in capsys.readouterr().out and not out.exists()
    assert run(openai, "-o", out) == 0 and "prompt" not in read_rows(out)[0]
    with pytest.raises(SystemExit):
        program.main(["run", str(source), "-o", str(out), "--model", "m", "--columns", "a,,b"])
    assert "must be all, none, names with commas between" in capsys.readouterr().err


class Chatting(FakeLLM):
    """Has a chat template, and answers with its prompt."""

    tokenizer = Mock(chat_template="{{ messages }}", return_value={"input_ids": [[1]]})

    def answer(self, index: int, prompt: dict[str, Any], params: Any) -> Any:
        output = super().answer(index, prompt, params)
        output.outputs[0].text = prompt["prompt"]
        return output


def conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render a conversation as JSON."""
    monkeypatch.setattr("nanovllm.jobs.tasks.check_template_options", lambda *args: {})
    render = lambda tokenizer, found, options, process: [json.dumps(each) for each in found]  # noqa: E731
    monkeypatch.setattr(
        "nanovllm.jobs.tasks.render_conversations", lambda *args: [{"prompt": each} for each in render(*args)]
    )


def test_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations(monkeypatch)
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "Hi"}]
    rows = [{"prompt": "a"}, {"messages": own}, {"messages": own[1:]}, {"prompt": [5]}, {"prompt": ""}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    (tmp_path / "system.txt").write_text("Be brief.")

    def asked(*argv: str) -> list[Any]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        run(source, "-o", out, *argv, make_llm=Chatting)
        return [json.loads(row["text"]) if row["error"] is None else row["error"] for row in read_rows(out)]

    user = {"role": "user", "content": "a"}
    *found, ids, empty = asked("--chat")
    assert found == [[user], own, own[1:]]
    assert ids.startswith(
        "in.jsonl: line 4: the prompt is a list of token ids, and --chat needs a text for the"
    )
    assert "line 5: the prompt is empty, and --chat needs" in empty
    system = {"role": "system", "content": "Be brief."}
    assert asked("--chat", "--system", f"@{tmp_path / 'system.txt'}")[:3] == [
        [system, user],
        own,
        [system, own[1]],
    ]


def test_a_template_fills_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations(monkeypatch)
    source, out = write_rows(tmp_path / "in.jsonl", [{"text": "Hi"}]), tmp_path / "out.jsonl"
    argv = [source, "-o", out, "--template", "Translate to {{German}}: {text}"]
    assert run(*argv, "--chat", make_llm=Chatting) == 0
    [row] = read_rows(out)
    assert json.loads(row["text"]) == [{"role": "user", "content": "Translate to {German}: Hi"}]
    assert row["input_text"] == "Hi"
    for more, code in (([], 2), (["--chat", "--system", "s"], 2), (["--chat"], 0)):
        assert run(*argv, *more, make_llm=no_model) == code, "another prompt is another job"


def test_chat_needs_a_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Base(FakeLLM):
        tokenizer = Mock(chat_template=None, return_value={"input_ids": [[1]]})

    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert run(source, "-o", tmp_path / "out.jsonl", "--chat", make_llm=Base) == 2
    assert "rows with messages: " in capsys.readouterr().out


def test_columns_of_a_job_that_resumes(tmp_path: Path) -> None:
    rows = [{"id": index, "prompt": "a" * (index + 1), "label": index} for index in range(200)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    whole, out = tmp_path / "whole.csv", tmp_path / "out.csv"
    assert run(source, "-o", whole, "--columns", "label") == 0

    def stop(number: int) -> None:
        if number == 90:
            raise KeyboardInterrupt

    assert run(source, "-o", out, "--columns", "label", make_llm=watched(stop)) == 130
    assert run(source, "-o", out, make_llm=no_model) == 2
    assert run(source, "-o", out, "--columns", "label") == 0
    assert out.read_bytes() == whole.read_bytes()
    with out.open(newline="") as file:
        assert [(row["label"], row["text"].split()[0]) for row in csv.DictReader(file)] == [
            (str(index), str(index + 1)) for index in range(200)
        ]
    assert PARAMS_COLUMN not in whole.read_text()


def test_the_program_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints its help, and with `--version` its version, without a fault."""
    for argv, said in (([], "usage: nanovllm"), (["--version"], f"nanovllm {version('nanovllm')}\n")):
        with pytest.raises(SystemExit) as caught:
            program.main(argv)
        printed = capsys.readouterr()
        assert not caught.value.code and printed.out.startswith(said) and not printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("run a -o b --model c --max-num-seq 5", "arguments: --max-num-seq 5; did you mean --max-num-seqs?"),
        ("run a -o c --model d b", "arguments: b; `nanovllm run --help` lists all arguments"),
        ("check a --window=5", "arguments: --window=5; `nanovllm check --help` lists"),
    ],
)
def test_unknown_arguments(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(argv.split())
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and message in printed and printed.count("\n") == 2
