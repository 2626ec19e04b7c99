"""Tables of other libraries, for `LLM.map`: their columns as lists, and the same table with more columns.

Reads pandas, polars, Arrow, Hugging Face datasets and lists of dictionaries. Imports none of these libraries,
because whoever passes a table has done so. Answers nothing itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

from nanovllm.answers import RequestOutput
from nanovllm.checks import BadRow
from nanovllm.inputs import show

_KINDS = "a pandas or polars DataFrame, an Arrow table, a Hugging Face Dataset or a list of dictionaries"
_ADVICE = {
    ("polars", "LazyFrame"): "pass table.collect()",
    ("datasets", "DatasetDict"): "pass one of its splits, such as table['train']",
    ("datasets", "IterableDataset"): "pass Dataset.from_list(list(table)), or use llm.stream()",
    ("pandas", "Series"): "pass table.to_frame()",
}


class Table(NamedTuple):
    """A table that was passed to `LLM.map`."""

    names: list[str]  # of its columns
    num_rows: int
    column: Callable[[str], list[Any]]
    extended: Callable[
        [dict[str, list[Any]]], Any
    ]  # the table with more columns of strings, or of lists of them


def open_table(table: Any) -> Table:
    """The table in one form. TypeError for anything else."""
    if isinstance(table, Sequence) and not isinstance(table, (str, bytes)):
        if all(isinstance(row, Mapping) for row in table):
            return _of_rows(table)
        raise TypeError(f"table must be {_KINDS}; its rows must be dictionaries, not {show(table[0])}")
    for kind in type(table).__mro__:
        found = kind.__module__.split(".")[0], kind.__name__
        if found in _ADVICE:
            raise TypeError(f"table must be {_KINDS}, not a {'.'.join(found)}; {_ADVICE[found]}")
        if found in _LIBRARIES:
            return _LIBRARIES[found](table, sys.modules[found[0]])
    raise TypeError(f"table must be {_KINDS}, not {show(table)}")


def _of_rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))

    def extended(columns: dict[str, list[Any]]) -> Any:
        added = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [{**row, **more} for row, more in zip(rows, added, strict=True)]

    return Table(names, len(rows), lambda name: [row.get(name) for row in rows], extended)


def _of_pandas(table: Any, pandas: Any) -> Table:
    names = list(table.columns)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the table has {names.count(name)} columns {name!r}; rename them")

    def value(cell: Any) -> Any:
        if hasattr(cell, "tolist"):  # NumPy's
            cell = cell.tolist()
        return None if cell is pandas.NA or cell != cell else cell

    def extended(columns: dict[str, list[Any]]) -> Any:
        longer = table.copy()
        for name, each in columns.items():
            longer[name] = pandas.Series(each, table.index, object)
        return longer

    return Table(names, len(table), lambda name: [value(cell) for cell in table[name]], extended)


def _of_polars(table: Any, polars: Any) -> Table:
    def extended(columns: dict[str, list[Any]]) -> Any:
        types = {name: _type(values, polars.String, polars.List) for name, values in columns.items()}
        return table.with_columns(*(polars.Series(name, columns[name], types[name]) for name in columns))

    return Table(table.columns, table.height, lambda name: table[name].to_list(), extended)


def _of_arrow(table: Any, pyarrow: Any) -> Table:
    def extended(columns: dict[str, list[Any]]) -> Any:
        made = table
        for name, values in columns.items():
            kind = _type(values, pyarrow.string(), pyarrow.list_)
            made = made.append_column(name, pyarrow.array(values, kind))
        return made

    return Table(table.schema.names, table.num_rows, lambda name: table.column(name).to_pylist(), extended)


def _of_dataset(table: Any, datasets: Any) -> Table:
    def extended(columns: dict[str, list[Any]]) -> Any:
        made, list_of = table, getattr(datasets, "List", None) or datasets.Sequence
        for name, values in columns.items():
            kind = _type(values, datasets.Value("string"), list_of)
            made = made.add_column(name, values, feature=kind)
        return made

    plain = table.with_format(None)
    return Table(table.column_names, table.num_rows, lambda name: list(plain[name]), extended)


def _type(values: list[Any], text: Any, list_of: Callable[[Any], Any]) -> Any:
    """The type of a column: strings, or lists of strings."""
    return list_of(text) if any(isinstance(value, list) for value in values) else text


_LIBRARIES: dict[tuple[str, str], Callable[[Any, Any], Table]] = {
    ("pandas", "DataFrame"): _of_pandas,
    ("polars", "DataFrame"): _of_polars,
    ("pyarrow", "Table"): _of_arrow,
    ("datasets", "Dataset"): _of_dataset,
}


def read_prompts(
    table: Table,
    prompt: str | None,
    messages: str | None,
    template: str | None,
    chat: bool,
    system: str | None,
) -> tuple[list[Any | BadRow], bool]:
    """The prompt or the conversation of each row, or why it has none; and whether they are conversations.

    The arguments are those of `LLM.map`. ValueError if they name no column.
    """
    given = [name for name in (prompt, messages, template) if name is not None]
    if len(given) != 1 or not isinstance(given[0], str):
        raise ValueError(
            "map() takes one of prompt='column of texts', messages='column of conversations' and "
            "template='a text with {columns}', as strings, not "
            f"prompt={prompt!r}, messages={messages!r}, template={template!r}"
        )
    needed = _names_in(template) if template is not None else given
    for name in needed:
        if name not in table.names and table.num_rows:
            raise ValueError(f"the table has no column {name!r}; it has {', '.join(map(repr, table.names))}")
    columns = {name: table.column(name) for name in needed} if table.num_rows else {}
    rows = [{name: columns[name][index] for name in needed} for index in range(table.num_rows)]
    if messages is not None:
        if chat or system is not None:
            raise ValueError("chat and system go with prompt or template; messages are conversations already")
        return [_conversation(row[messages], messages) for row in rows], True
    texts = [_text(row, prompt, template) for row in rows]
    if not (chat or system is not None):
        return [text if isinstance(text, Exception) else _as_prompt(text) for text in texts], False
    first = [] if system is None else [{"role": "system", "content": system}]
    return [
        text if isinstance(text, Exception) else [*first, {"role": "user", "content": text}] for text in texts
    ], True


def _conversation(value: Any, name: str) -> Any | BadRow:
    """A conversation that cannot be taken for several."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value
    expected = "a list of messages {'role': ..., 'content': ...}"
    return TypeError(f"the column {name!r} must have {expected}, not {show(value)}")


def _names_in(template: str) -> list[str]:
    """The columns of a template. ValueError for a wrong one."""
    try:
        parts = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template={template!r}: {error}; write {{{{ for a brace") from None
    names = [part.partition(".")[0].partition("[")[0] for part in parts]
    if not names or not all(names):
        raise ValueError(f"template={template!r} must name columns in braces, such as {{text}}")
    return list(dict.fromkeys(names))


def _text(row: dict[str, Any], prompt: str | None, template: str | None) -> Any | BadRow:
    """The text of a row, or token ids."""
    for name, value in row.items():
        if value is None:
            return ValueError(f"the column {name!r} has no value here")
    if template is None:
        return row[prompt or ""]
    try:
        return template.format_map(row)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        return ValueError(f"the template cannot be filled: {type(error).__name__}: {error}")


def _as_prompt(value: Any) -> dict[str, Any]:
    """A prompt that cannot be taken for several."""
    is_text = isinstance(value, str) or not isinstance(value, Sequence)
    return {"prompt" if is_text else "prompt_token_ids": value}


def answer_columns(
    found: Sequence[RequestOutput | BadRow], into: str, names: Sequence[str]
) -> dict[str, list[Any]]:
    """The columns of answers, of finish reasons and of errors: lists of strings where requests have several
    completions. names: the table's columns. ValueError if it has one of these."""
    columns = [into, f"{into}_finish_reason", f"{into}_error"]
    if taken := [name for name in columns if name in names]:
        raise ValueError(f"the table has a column {taken[0]!r} already; pass into='another name'")
    several = any(isinstance(each, RequestOutput) and len(each.outputs) > 1 for each in found)
    rows: list[tuple[Any, Any, Any]] = []
    for each in found:
        if not isinstance(each, RequestOutput):
            rows.append((None, None, str(each)))
            continue
        texts = [completion.text for completion in each.outputs]
        reasons = [completion.finish_reason for completion in each.outputs]
        texts_or_none = None if each.error is not None else texts if several else texts[0]
        rows.append((texts_or_none, reasons if several else reasons[0], each.error))
    values = [[row[place] for row in rows] for place in range(3)]
    return dict(zip(columns, values, strict=True))
