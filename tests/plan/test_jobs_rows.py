"""The input of a job without an engine: sources, rows, and the lines of OpenAI batches."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from nanovllm.jobs import sources
from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.formats import open_source
from nanovllm.jobs.main import parse_sampling
from nanovllm.jobs.openai_batch import OpenAIFormat
from nanovllm.jobs.output import line_index, to_line
from nanovllm.jobs.params import job_params, make_params, row_seed
from nanovllm.jobs.parquet import import_pyarrow
from nanovllm.jobs.sources import SourceRow
from nanovllm.jobs.tasks import PlainFormat, Task
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def values_of(path: Path, format: str = "auto") -> list[Any]:
    """The rows of a file, and the errors of its bad rows."""
    found: list[Any] = []
    for index, row in enumerate(open_source(path, format).rows()):
        assert row.index == index
        try:
            found.append(row.values())
        except ValueError as error:
            found.append(str(error))
    return found


# -- sources -----------------------------------------------------------------------------------------------


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        b'\xef\xbb\xbf{"a": 1}',
        b"",
        b"{",
        b'{"a": "\xe9"}',
        b"[1]",
        b'{"a": NaN}',
        b'{"a": "\xc3\xa9"}\r',
    ]
    deep = [b'{"a": ' + b"[" * depth + b"]" * depth + b"}" for depth in (99, 100, 950)]
    path.write_bytes(b"\n".join([*lines, b"[" * 100_000, b'{"b": 2}', *deep, b'{"a": "%b"}' % (b"[" * 200)]))
    found = values_of(path)
    assert found[0] == {"a": 1} and found[5] == {"a": "é"} and found[7] == {"b": 2} and len(found) == 12
    assert str(found[8]) == "{'a': %s}" % ("[" * 99 + "]" * 99) and found[11] == {"a": "[" * 200}
    for row, error in {
        1: "line 3: it is not JSON",
        2: "line 4: it is not UTF-8: byte 0xe9 at position 7; convert",
        3: "line 5: it must be a JSON object {...}, not a list",
        4: "line 6: it is not JSON: NaN is no JSON number",
        6: "line 8: it is not JSON: more than 100 lists and objects within each other",
        9: "line 11: it is not JSON: more than 100 lists and objects within each other",
        10: "line 12: it is not JSON: more than 100 lists and objects within each other",
    }.items():
        assert found[row].startswith(f"rows.jsonl: {error}")
    (tmp_path / "empty.jsonl").touch()
    assert values_of(tmp_path / "empty.jsonl") == []


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_line_of_10_mb_is_one_bad_row(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    rows = ["a,b", "1,2", "x" * 5_000_000 + "," + "y" * 5_000_000, "3,4"]
    if ending == "jsonl":
        rows = [json.dumps(dict(zip("ab", row.split(","), strict=True))) for row in rows[1:]]
    path.write_text("\n".join(rows))
    good, bad, last = values_of(path)
    assert good == {"a": "1", "b": "2"} and last == {"a": "3", "b": "4"}
    assert bad.endswith("it is longer than 8 MiB")


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = ['\ufefftext,"n,m"', '"two\nlines, ""quoted""",1', "", "é,2", "one,two,three", "one"]
    path.write_bytes("\n".join(rows).encode() + b"\n\xe9t\xe9,3\nlast,4\n")
    assert values_of(path) == [
        {"text": 'two\nlines, "quoted"', "n,m": "1"},
        {"text": "é", "n,m": "2"},
        "rows.csv: line 6: it has 3 fields, and the row of column names has 2",
        "rows.csv: line 7: it has 1 field, and the row of column names has 2",
        "rows.csv: line 8: it is not UTF-8: byte 0xe9 at position 0; convert the file, for example with "
        "`iconv -f latin1 -t utf-8`",
        {"text": "last", "n,m": "4"},
    ]
    (tmp_path / "rows.tsv").write_text("a\tb\n1,\t2\n")
    assert values_of(tmp_path / "rows.tsv") == [{"a": "1,", "b": "2"}]
    (tmp_path / "twice.csv").write_text("a,b,a\n")
    with pytest.raises(JobRefusedError, match="several columns are named 'a'; rename them"):
        open_source(tmp_path / "twice.csv", "auto")


@pytest.mark.parametrize("limit", [100, 2**20])
def test_an_open_quote_swallows_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", limit)
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,"open\n' + "2,3\n" * 40 + '"he said "no"",4\n' + "5,6\n" * 30 + '7,"open')
    found = values_of(path)
    for row, error in {0: "line 2: it is not CSV: ", 41: "line 43: it is not CSV: ", 72: "line 74: "}.items():
        assert (
            found[row].startswith(f"rows.csv: {error}")
            and "; close every quote, and double those inside" in found[row]
        )
    assert found[1:41] == [{"a": "2", "b": "3"}] * 40 and found[42:72] == [{"a": "5", "b": "6"}] * 30
    assert len(found) == 73
    csv.field_size_limit(2**17)


def test_a_long_line_with_an_open_quote_is_one_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 100)
    (tmp_path / "rows.csv").write_text('a,b\n1,"' + "x" * 500 + '"\n2,3\n')
    found = values_of(tmp_path / "rows.csv")
    assert found[0] == "rows.csv: line 2: it is longer than 0 MiB"
    assert found[1:] == [{"a": "2", "b": "3"}]
    csv.field_size_limit(2**17)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = import_pyarrow()
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": f"p{i}", "sampling_params": {"seed": i}, "other": None} for i in range(600)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    source = open_source(path, "auto")
    assert source.num_rows == 600 and source.columns == ["prompt", "sampling_params", "other"]
    assert [row.values() for row in source.rows()] == rows and source.position == source.size
    source.wanted = {"prompt"}
    assert next(source.rows()).values() == {"prompt": "p0"}
    pyarrow.parquet.write_table(pyarrow.table([[1], [2]], names=["prompt", "prompt"]), path)
    with pytest.raises(JobRefusedError, match="several columns are named 'prompt'; rename them"):
        open_source(path, "auto")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), path)
    path.write_bytes(path.read_bytes().replace(b"prompt", b"\xffrompt"))
    with pytest.raises(JobRefusedError, match=r"is no Parquet file that can be read: 'utf-8' codec can't"):
        open_source(path, "auto")
    path.write_bytes(b"PAR1 no table")
    with pytest.raises(JobRefusedError, match=r"rows\.parquet is no Parquet file that can be read"):
        open_source(path, "auto")


def test_a_value_that_python_has_not_makes_one_bad_row(tmp_path: Path) -> None:
    """A text that is not UTF-8, and a date out of range."""
    pyarrow = import_pyarrow()
    path = tmp_path / "rows.parquet"
    length = 600
    text = pyarrow.array([b"\xff" if row == 300 else b"a" for row in range(length)]).view(pyarrow.string())
    dates = [2**30 if row == 302 else None for row in range(length)]
    table = pyarrow.table({"text": text, "date": pyarrow.array(dates, pyarrow.date32())})
    pyarrow.parquet.write_table(table, path)
    found = values_of(path)
    assert [index for index, row in enumerate(found) if isinstance(row, str)] == [300, 302]
    assert found[300].startswith(
        "rows.parquet: row 301: it cannot be read: 'utf-8' codec can't decode byte 0xff"
    )
    assert found[301] == {"text": "a", "date": None} and len(found) == length


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("rows.txt", b"", "the ending '.txt' is no known format; rename it to one of .jsonl"),
        ("rows.jsonl", "text".encode("utf-16"), "is UTF-16, and UTF-8 text is read; convert it, .* `iconv"),
        ("rows.csv", b"\x1f\x8b", "is compressed and damaged: Compressed file ended"),
        ("rows.jsonl.gz", b"\x1f\x8b\0\0", "is compressed and damaged: .*; replace it by a good copy"),
        ("rows.jsonl.zst", b"\x28\xb5\x2f\xfd", "is compressed and damaged: Truncated"),
        ("rows.parquet.gz", gzip.compress(b"PAR1", mtime=0), "is a compressed Parquet file, which is"),
        ("rows.jsonl.xz", b"\xfd7zXZ\0", r"is compressed \(xz\), .* gzip and zstd are .* `xz -dc FILE"),
        ("rows.jsonl.bz2", b"BZh9", r"is compressed \(bzip2\)"),
        ("rows.xlsx", b"PK\x03\x04", "is a zip archive or an Excel file"),
        ("rows.json", b'\xef\xbb\xbf [\n{"prompt": "a"}]', "is a JSON array"),
        ("rows.csv", b"\xff\xffa,b\n", None),
        ("none.jsonl", None, "No such file or directory"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, error: str | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if error is None:
        open_source(tmp_path / name, "auto")
        return
    with pytest.raises(JobRefusedError, match=error):
        open_source(tmp_path / name, "auto")


def test_a_pipe_is_refused_because_it_is_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(JobRefusedError, match=r"is no regular file, .* twice; .* pass -"):
        open_source(tmp_path / "rows.jsonl", "auto")


# -- rows --------------------------------------------------------------------------------------------------


def plain_task(
    values: dict[str, Any], index: int = 0, params: SamplingParams = GREEDY, **columns: Any
) -> Task:
    row_format = PlainFormat(params, 0, **columns)
    return row_format.task(SourceRow(index, "line 1", values), values)


def test_prompts_of_rows() -> None:
    user = [{"role": "user", "content": "Hi"}]
    assert plain_task({"prompt": "Hi", "id": 7}).id == 7
    assert plain_task({"prompt": [5, 6], "custom_id": "a"}).id == "a"
    assert plain_task({"messages": user}).is_chat
    assert plain_task({"m": json.dumps(user)}, messages="m").prompt == user
    assert plain_task({"body": "x{y", "n": {"m": 3}}, template="{body}: {n[m]} {{}}").prompt == "x{y: 3 {}"
    assert plain_task({"q": "Hi", "key": 1, "id": 2}, prompt="q", id="key").id == 1


@pytest.mark.parametrize(
    ("values", "columns", "error"),
    [
        ({"text": "Hi"}, {}, "no column 'prompt' or 'messages'; there are 'text': say which one with"),
        ({"text": "Hi"}, {"prompt": "q"}, "there is no column 'q'; there are 'text'"),
        ({"prompt": None}, {}, r"column 'prompt' must be a string or a list of token ids, not None"),
        ({"prompt": 5}, {}, "column 'prompt' must be a string or a list of token ids, not 5"),
        ({"prompt": [5, True]}, {}, "column 'prompt' must be a string or a list of token ids"),
        ({"prompt": [2**40]}, {}, "has a token id that does not fit into 32 bits"),
        ({"prompt": "a", "sampling_params": {"top_p": 2}}, {}, r"top_p must be in \(0, 1\]"),
        ({"prompt": "a", "sampling_params": {"topp": 1}}, {}, "topp"),
        ({"prompt": "a", "sampling_params": "{"}, {}, "column 'sampling_params' is no JSON object"),
        ({"prompt": "a", "sampling_params": "[" * 950 + "]" * 950}, {}, "more than 100 lists"),
        ({"prompt": "a", "sampling_params": [1]}, {}, "column 'sampling_params' must be an object"),
        ({"prompt": "a", "sampling_params": {"prompt_logprobs": 1}}, {}, "not written by a job"),
        ({"prompt": "a", "sampling_params": {"structured_outputs": 1}}, {}, "must be an object"),
        ({"messages": "Hi"}, {"messages": "messages"}, "is a string, but not a JSON list of messages"),
        ({"messages": "[" * 950 + "]" * 950}, {"messages": "messages"}, "more than 100 lists"),
        ({"messages": []}, {"messages": "messages"}, "column 'messages' must be a list of messages"),
        ({"messages": [{"content": "Hi"}]}, {}, "column 'messages', message 0 needs a role"),
        ({"a": 5}, {"template": "{a.b}"}, "the template cannot be filled: AttributeError"),
        ({"a": 2**40}, {"template": "{a:c}"}, "the template cannot be filled: OverflowError"),
    ],
)
def test_bad_rows(values: dict[str, Any], columns: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        plain_task(values, **columns)


@pytest.mark.parametrize("template", ["none", "{", "{}", "{0}{}"])
def test_bad_templates(template: str) -> None:
    if template == "{0}{}":  # a column may be called 0, but must have a name
        assert PlainFormat(GREEDY, 0, template="{0}").needed == ["0"]
    with pytest.raises(ValueError, match="the template"):
        PlainFormat(GREEDY, 0, template=template)


def test_seeds_follow_from_the_engine_and_the_index() -> None:
    sampled = SamplingParams(temperature=1)
    seeds = [plain_task({"prompt": "a"}, index, sampled).params.seed for index in range(100)]
    assert len(set(seeds)) == 100
    assert plain_task({"prompt": "b"}, 7, sampled).params.seed == seeds[7]
    assert seeds[7] == row_seed(0, 7) != row_seed(1, 7)
    given = SamplingParams(temperature=1, seed=5)
    assert plain_task({"prompt": "b"}, 7, given).params.seed == 5
    assert plain_task({"prompt": "b", "sampling_params": {"seed": -1}}, 7, given).params.seed == seeds[7]
    for none in (None, -1):
        own = plain_task({"prompt": "b", "sampling_params": {"seed": none, "top_k": 3}}, 7, sampled).params
        assert own.seed == seeds[7]
    own = plain_task({"prompt": "a", "sampling_params": {"seed": 9, "max_tokens": 3}}, 7, sampled).params
    assert (own.seed, own.max_tokens, own.temperature) == (9, 3, 1)
    # Greedy: all rows share one object.
    assert plain_task({"prompt": "a"}).params is plain_task({"prompt": "b"}).params


CHAT = [{"role": "user", "content": "a"}]


def batch_task(body: dict[str, Any], url: str = "/v1/chat/completions", **others: Any) -> Task:
    values = {"custom_id": "r", "method": "POST", "url": url, "body": body} | others
    params = job_params({"temperature": 0}, None, OpenAIFormat.default_params)
    row_format = OpenAIFormat(params, 0, "folder")
    return row_format.task(SourceRow(3, "line 4", values), values)


def test_openai_bodies() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    chat = batch_task(
        {
            "model": "m",
            "messages": messages,
            "max_completion_tokens": 5,
            "temperature": 0.5,
            "stop": ["a"],
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}},
            },
            "stream": False,
            "user": "me",
        }
    )
    assert chat.is_chat and chat.prompt[0]["content"] == [{"type": "text", "text": "Hi"}]
    assert chat.template == {"tools": [{"type": "function"}]}
    params = chat.params
    assert (params.max_tokens, params.temperature, params.stop, params.logprobs) == (5, 0.5, ["a"], 2)
    assert params.structured_outputs is not None and params.structured_outputs.json == '{"type": "object"}'
    text = batch_task({"prompt": ["Hi"], "max_tokens": 3}, "/v1/completions")
    assert text.prompt == "Hi" and text.params.max_tokens == 3
    assert batch_task({"prompt": [5, 6]}, "/v1/completions").params.max_tokens is None
    embed = batch_task({"input": ["a", [5]]}, "/v1/embeddings")
    assert embed.kind == "embed" and embed.prompt == ["a", array("i", [5])]


@pytest.mark.parametrize(
    ("body", "others", "error"),
    [
        ({"messages": []}, {}, "column 'messages' must be a list of messages"),
        ({"messages": CHAT, "stream": True}, {}, "stream=True .* is not supported"),
        ({"messages": CHAT, "foo": 1}, {}, "'foo' in the body is not known"),
        ({"messages": CHAT, "top_p": 5}, {}, "top_p must be"),
        ({"messages": CHAT, "top_logprobs": 2}, {}, "top_logprobs in the body needs logprobs=true"),
        ({"messages": CHAT, "prompt": "a"}, {}, "'prompt' in the body is not known for /v1/chat"),
        ({"messages": CHAT, "response_format": 1}, {}, "response_format must have"),
        ({}, {"url": "/v1/images"}, "url must be one of /v1/chat/completions, /v1/completions"),
        ({}, {"url": ["/v1/completions"]}, "url must be one of /v1/chat/completions, /v1/completions"),
        ({}, {"custom_id": 5}, "custom_id must be a string, not 5"),
        ({}, {"method": "GET"}, "method must be 'POST', not 'GET'"),
        (5, {}, "body must be an object"),
        ({"prompt": ["a", "b"]}, {"url": "/v1/completions"}, "prompt has 2 prompts; write one for each row"),
        ({"input": []}, {"url": "/v1/embeddings"}, "input must be a string or a list of token ids"),
        ({"input": "a", "top_p": 1}, {"url": "/v1/embeddings"}, "'top_p' in the body is not known"),
    ],
)
def test_bad_openai_rows(body: dict[str, Any], others: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        batch_task(body, **others)


def test_openai_answers() -> None:
    row_format = OpenAIFormat(GREEDY, 0, "folder")
    logprobs = [{5: Logprob(-0.5, 1, "a"), 6: Logprob(-float("inf"), 2, "b")}]
    completion = CompletionOutput(0, "a", [5], None, logprobs, "stop")
    output = RequestOutput("0", "Hi", [1, 2], None, [completion])
    chat = batch_task({"messages": CHAT, "logprobs": True, "top_logprobs": 2})
    answer = row_format.answer(chat, output)
    assert answer["id"] == "batch_req_3" and answer["custom_id"] == "r" and answer["error"] is None
    body = answer["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "folder"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a"} and choice["finish_reason"] == "stop"
    [entry] = choice["logprobs"]["content"]
    assert entry["token"] == "a" and entry["bytes"] == [97]
    assert [each["logprob"] for each in entry["top_logprobs"]] == [-0.5, -9999]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    text = batch_task({"prompt": "Hi", "logprobs": 1}, "/v1/completions")
    [choice] = row_format.answer(text, output)["response"]["body"]["choices"]
    assert choice["text"] == "a" and choice["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5}],
        "text_offset": [0],
    }
    error = row_format.error(4, "r", "why")
    assert line_index(to_line(error)) == 4 and line_index(to_line(answer)) == 3
    assert error["error"] == {"code": "invalid_request", "message": "why"} and error["response"] is None


def test_parameters_from_json() -> None:
    params = make_params({"structured_outputs": {"choice": ["a"]}, "logit_bias": {"5": 1}}, GREEDY)
    assert params.structured_outputs is not None and params.structured_outputs.choice == ("a",)
    assert params.logit_bias == {5: 1.0} and params.temperature == 0
    assert parse_sampling("temperature=0.6,max_tokens=None,stop=x,ignore_eos=true") == {
        "temperature": 0.6,
        "max_tokens": None,
        "stop": "x",
        "ignore_eos": True,
    }
    assert parse_sampling('{"stop": ["a", "b"]}') == {"stop": ["a", "b"]}
    wrong = {"top_p=2": "top_p", "a": "is no name=value", "{": "Expecting", "topp=1": "topp"}
    for text, error in wrong.items():
        with pytest.raises(argparse.ArgumentTypeError, match=error):
            parse_sampling(text)
