"""CSV and TSV files of all kinds: each row is read once, as it is, or is an error with its line."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path

import pytest
from test_jobs_rows import plain_task, values_of

from nanovllm.jobs import main as program
from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.formats import open_source
from nanovllm.jobs.main import parse_args

# Each: a name, the flags, the content, and for each row its fields or how its error begins.
NASTY = {
    "a quote that opens": ("a.tsv", {}, b'a\tb\n1\t"open\n2\tx\n3\tclose"\n', ['1|"open', "2|x", '3|close"']),
    "a quote in a word": ("a.csv", {}, b'a,b\n5" disk,x\n6,y\n', ['5" disk|x', "6|y"]),
    "quotes, single": ("a.tsv", {}, b'a\tb\n"1"\t2\n""\t"\n', ['"1"|2', '""|"']),
    "quotes, doubled": ("a.tsv", {}, b'a\tb\n1\t"say ""hi"""\n"2\n3"\tx\n', ['1|say "hi"', "2\n3|x"]),
    "doubled in a word": ("a.tsv", {}, b'a\tb\n1\tsay ""hi""\n"2\t3\n', ['1|say ""hi""', '"2|3']),
    "tsv, minimal": ("a.tsv", {"quoting": "minimal"}, b'a\tb\n"1\t2"\tx\n', ["1\t2|x"]),
    "csv, none": ("a.csv", {"quoting": "none"}, b'a,b\n1,"open\n2,x\n3,y"\n', ['1|"open', "2|x", '3|y"']),
    "a semicolon": ("a.csv", {"delimiter": ";"}, b'a;b\n1,5;"x;y"\n', ["1,5|x;y"]),
    "a wide delimiter": ("a.tsv", {"delimiter": "\u3001"}, 'a\u3001b\n1\u3001"""x"\n'.encode(), ['1|"x']),
    "CR LF": ("a.csv", {}, b"a,b\r\n1,2\r\n\r\n3,4\r\n", ["1|2", "3|4"]),
    "CR LF, tsv": ("a.tsv", {}, b"a\tb\r\n1\t2\r\n\r\n3\t4", ["1|2", "3|4"]),
    "CR in a field": ("a.tsv", {}, b"a\tb\n1\tx\ry\n2\tz\n", ["1|x\ry", "2|z"]),
    "CR in quotes": ("a.csv", {}, b'a,b\n1,"x\ry"\n2,z\n', ["1|x\ry", "2|z"]),
    "CR without quotes": ("a.csv", {}, b"a,b\n1,x\ry\n2,z\n", ["line 2: a carriage return stands", "2|z"]),
    "BOM": ("a.csv", {}, b'\xef\xbb\xbf"a",b\n1,\xef\xbb\xbf2\n', ["1|\ufeff2"]),
    "NUL, tsv": ("a.tsv", {}, b"a\tb\n1\tx\0y\n2\tz\n", ["1|x\0y", "2|z"]),
    "ragged": ("a.csv", {}, b"a,b\n1\n1,2,3\n4,5", ["line 2: it has 1 field", "line 3: it has 3 f", "4|5"]),
    "ragged, tsv": ("a.tsv", {}, b"a\tb\n1\n\n1\t2\t3\n", ["line 2: it has 1 field", "line 4: it has 3 f"]),
    "no UTF-8": ("a.tsv", {}, b"a\tb\n\xe9\tx\n2\ty\n", ["line 2: it is not UTF-8: byte 0xe9", "2|y"]),
    "an open quote at the end": ("a.csv", {}, b'a,b\n1,2\n3,"x\n4,y\n', ["1|2", "line 3: it is not", "4|y"]),
    "empty cells": ("a.csv", {}, b'a,b\n,\n"",x\n', ["|", "|x"]),
    "spaces": ("a.tsv", {}, b"a\tb\n \t\n\t\n", [" |", "|"]),
    "after lines of a row": (
        "a.csv",
        {},
        b'a,b\n"x\ny\nz",1\n\n2\n',
        ["x\ny\nz|1", "line 6: it has 1 field"],
    ),
}


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_file_keeps_its_rows(tmp_path: Path, name: str) -> None:
    file, flags, content, expected = NASTY[name]
    path = tmp_path / file
    path.write_bytes(content)
    found = list(open_source(path, "auto", **flags).rows())
    assert [row.index for row in found] == list(range(len(expected)))
    for row, wanted in zip(found, expected, strict=True):
        if isinstance(row.data, dict):
            assert "|".join(row.data.values()) == wanted
        else:
            assert f"{row.place}: {row.data}".startswith(f"{file}: {wanted}")


def test_rows_in_are_rows_out(tmp_path: Path) -> None:
    """Random bytes, without quoting: a row for each line. Random fields, with quoting: the fields."""
    rng = random.Random(0)
    alphabet = ['"', '""', ",", "\t", "\r", "\n", "\0" * (csv_has_nul()), "a", "é", "\ufeff", " "]
    path = tmp_path / "rows.tsv"
    for _ in range(300):
        lines = ["".join(rng.choices(alphabet, k=rng.randrange(8))).replace("\n", "") for _ in range(8)]
        path.write_bytes("\n".join(["a\tb", *lines]).encode())
        wanted = [line for line in lines if line.removesuffix("\r")]
        found = list(open_source(path, "auto", quoting="none").rows())
        assert len(found) == len(wanted)
        for row, line in zip(found, wanted, strict=True):
            assert isinstance(row.data, dict) == (line.count("\t") == 1)
        fields = [["".join(rng.choices(alphabet, k=rng.randrange(6))) for _ in "ab"] for _ in range(8)]
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="\t").writerows([["a", "b"], *fields])
        rows = open_source(path, "auto", quoting="minimal").rows()
        assert [[*row.values().values()] for row in rows] == fields


def csv_has_nul() -> bool:
    """Whether Python's csv reads the character 0: from 3.11 on."""
    try:
        return next(csv.reader(["\0"])) == ["\0"]
    except csv.Error:
        return False


def test_a_file_of_old_macs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\r1,2\r3,4")
    with pytest.raises(JobRefusedError, match=r"the row of column names: a carriage return .* `tr '"):
        open_source(tmp_path / "a.csv", "auto")


def test_flags_of_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    with pytest.raises(JobRefusedError, match="is read as jsonl, and --quoting is for CSV and TSV; leave it"):
        open_source(tmp_path / "a.jsonl", "auto", quoting="none")
    assert parse_args(["check", "a.csv", "--delimiter", "\\t"]).delimiter == "\t"
    for wrong in ("", ",,", '"', "\n"):
        with pytest.raises(SystemExit):
            parse_args(["check", "a.csv", "--delimiter", wrong])
        assert "must be one character, no quote and no line end" in capsys.readouterr().err


def test_check_names_a_field_of_many_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,prompt\n1,"' + "".join(f"{row},x\n" for row in range(150)) + '",\n2,y\n')
    assert program.main(["check", str(path)]) == 1
    path.write_text(path.read_text().replace('",', '"'))
    assert program.main(["check", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()[-2:]
    assert printed[0].startswith(
        f"{path}: line 2: its field 'prompt' spans 151 lines, which are no rows then"
    )
    assert printed[0].endswith("pass --quoting none") and printed[1] == f"{path}: 2 rows, 0 bad"
    assert program.main(["check", str(path), "--quoting", "none"]) == 1
    assert re.search(r"a\.csv: 152 rows, \d+ bad", capsys.readouterr().out)


def test_an_empty_cell_is_an_empty_string(tmp_path: Path) -> None:
    """Not null: a template fills it in. Of `prompt` and `messages` the one that is not empty counts."""
    (tmp_path / "a.csv").write_text('prompt,messages\n,"[{""role"": ""user"", ""content"": ""Hi""}]"\nHi,\n')
    chat, text = values_of(tmp_path / "a.csv")
    assert chat["prompt"] == text["messages"] == ""
    assert plain_task(chat).is_chat and plain_task(text).prompt == "Hi"
    assert plain_task(chat, template="<{prompt}>").prompt == "<>"
    assert plain_task({"prompt": "", "messages": ""}).prompt == "", "which the engine refuses"
    with pytest.raises(ValueError, match="it has both 'prompt' and 'messages'; leave one of them out"):
        plain_task({"prompt": "Hi", "messages": chat["messages"]})


def test_blank_lines_count_for_lines_and_not_for_indexes(tmp_path: Path) -> None:
    for name, lines in {
        "a.jsonl": ["", '{"a": 1}', " ", "", "{"],
        "a.csv": ["a,b", "1,2", "", "", "3"],
    }.items():
        (tmp_path / name).write_text("\n".join(lines))
        good, bad = open_source(tmp_path / name, "auto").rows()
        assert (good.index, good.place) == (0, f"{name}: line 2")
        assert (bad.index, bad.place) == (1, f"{name}: line 5")


def test_json_files_are_read_as_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert values_of(tmp_path / "a.json") == [{"a": 1}, {"a": 2}]
    (tmp_path / "a.json").write_text('[\n{"a": 1},\n{"a": 2}\n]')
    with pytest.raises(JobRefusedError, match=r"is a JSON array, .* `jq -c '\.\[\]'`"):
        open_source(tmp_path / "a.json", "auto")
