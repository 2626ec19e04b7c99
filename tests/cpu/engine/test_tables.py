"""LLM.map: a table of any library in, the same kind out, with a column of answers and one of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model_path

ROWS = [
    {"id": 7, "question": "What is 2 + 3?"},
    {"id": 3, "question": None},
    {"id": 5, "question": "Sort: d b a"},
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
COLUMNS = ["answer", "answer_finish_reason", "answer_error"]


def of_pandas(rows: list[dict[str, Any]]) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(rows, index=[10 + index for index in range(len(rows))])


def of_polars(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("polars").DataFrame(rows)


def of_arrow(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pyarrow").Table.from_pylist(rows)


def of_datasets(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[dict[str, Any]]]]] = {
    "list": (list, list),
    "pandas": (of_pandas, lambda table: table.to_dict("records")),
    "polars": (of_polars, lambda table: table.to_dicts()),
    "arrow": (of_arrow, lambda table: table.to_pylist()),
    "datasets": (of_datasets, lambda table: table.to_list()),
}


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_comes_out_in_the_same_order(kind: str, llm: LLM) -> None:
    make, rows_of = KINDS[kind]
    table = make(ROWS)
    made = llm.map(table, GREEDY, False, prompt="question")
    assert type(made) is type(table) and list(rows_of(table)[0]) == ["id", "question"]
    rows = rows_of(made)
    assert [row["id"] for row in rows] == [7, 3, 5] and list(rows[0]) == ["id", "question", *COLUMNS]
    expected = [output["text"] for output in llm.generate(["What is 2 + 3?", "Sort: d b a"], GREEDY, False)]
    assert [row["answer"] for row in rows] == [expected[0], None, expected[1]]
    assert [row["answer_error"] for row in rows] == [None, "the column 'question' has no value here", None]
    if kind == "pandas":
        assert list(made.index) == [10, 11, 12]
    again = llm.map(made, GREEDY, False, template="{question} {answer}", into="second")
    assert [row["second_error"] is None for row in rows_of(again)] == [True, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_and_several_answers(kind: str, llm: LLM) -> None:
    make, rows_of = KINDS[kind]
    talk = [{"role": "user", "content": "What is 2 + 3?"}]
    rows = [{"talk": talk, "text": "What is 2 + 3?"}, {"talk": [], "text": "Sort: d b a"}]
    [good, bad] = rows_of(llm.map(make(rows), GREEDY, False, messages="talk"))
    assert good["answer"] == llm.chat(talk, GREEDY, False)[0]["text"] and good["answer_error"] is None
    assert bad["answer"] is None and "has no messages" in bad["answer_error"]
    chats = rows_of(llm.map(make(rows), GREEDY, False, prompt="text", chat=True))
    assert chats[0]["answer"] == good["answer"] and chats[1]["answer_error"] is None
    several = SamplingParams(n=2, seed=1, max_tokens=3)
    for row in rows_of(llm.map(make(rows), several, False, template="{text}", system="Be brief.")):
        assert len(row["answer"]) == len(row["answer_finish_reason"]) == 2


def test_cells_that_are_no_text(llm: LLM) -> None:
    rows: list[dict[str, Any]] = [{"a": [5, 6]}, {"a": 5}, {"a": {"prompt": "x"}}, {"a": []}, {"a": "ok"}, {}]
    params = [SamplingParams(temperature=0, max_tokens=1 + index) for index in range(6)]
    made = llm.map(rows, params, False, prompt="a")
    assert [row["answer_error"] is None for row in made] == [True, False, False, False, True, False]
    talk = [{"talk": {"role": "user", "content": "a"}}, {"talk": "a"}, {"talk": None}]
    for row in llm.map(talk, GREEDY, False, messages="talk"):
        assert "the column 'talk' must have a list of messages" in row["answer_error"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_rows(kind: str, llm: LLM) -> None:
    make, rows_of = KINDS[kind]
    table = make(ROWS)[:0]
    if kind == "datasets":
        table = make(ROWS).select([])
    assert rows_of(llm.map(table, GREEDY, template="{question}")) == []


def test_wrong_tables_and_columns(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no column 'prompt'; it has 'id', 'question'"):
        llm.map(ROWS, prompt="prompt")
    with pytest.raises(ValueError, match=r"map\(\) takes one of prompt=.* not prompt=None, messages=None"):
        llm.map(ROWS)
    with pytest.raises(ValueError, match="the table has a column 'id' already; pass into='another name'"):
        llm.map(ROWS, prompt="question", into="id")
    with pytest.raises(ValueError, match="must name columns in braces"):
        llm.map(ROWS, template="no column")
    with pytest.raises(ValueError, match="chat and system go with prompt or template"):
        llm.map(ROWS, messages="question", chat=True)
    with pytest.raises(TypeError, match=r"a list of dictionaries, not 'a\.csv'"):
        llm.map("a.csv", prompt="question")
    with pytest.raises(TypeError, match="its rows must be dictionaries, not 'What is 2"):
        llm.map(["What is 2 + 3?"], prompt="question")
    polars = pytest.importorskip("polars")
    with pytest.raises(TypeError, match=r"not a polars.LazyFrame; pass table.collect\(\)"):
        llm.map(polars.DataFrame(ROWS).lazy(), prompt="question")


@pytest.mark.parametrize(
    ("table", "brings"),
    [
        ('[{"a": 1}]', ""),
        ('polars.DataFrame({"a": [1]})', "polars"),
        ('pandas.DataFrame({"a": [1]})', "pandas"),
    ],
)
def test_nothing_is_imported_that_the_table_did_not_bring(table: str, brings: str) -> None:
    script = f"""
import sys
{"import " + brings if brings else ""}
from nanovllm.tables.tables import open_table
table, before = {table}, set(sys.modules)
opened = open_table(table)
new = {{"pandas", "polars", "pyarrow", "datasets"}} & (set(sys.modules) - before)
assert not new, new
"""
    subprocess.run([sys.executable, "-c", script], check=True)
