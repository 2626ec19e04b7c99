"""Parquet files that unpack to far more than they are: memory stays bounded, and good rows are answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import read_rows, run

from nanovllm.jobs import main as program
from nanovllm.jobs import parquet
from nanovllm.jobs.parquet import ParquetSource, import_pyarrow

MIB = 2**20
READ = """
import resource, sys
from pathlib import Path
from nanovllm.jobs.parquet import ParquetSource, import_pyarrow
import_pyarrow()
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    print(*("ok" if isinstance(row.data, dict) else "bad" for row in ParquetSource(Path(path)).rows()))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow = import_pyarrow()
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **({"compression": "zstd"} | options))
    assert path.stat().st_size < 64 * 1024
    return path


def repeated(values: list[Any], *indexes: int) -> Any:
    """A column that holds each value once."""
    pyarrow = import_pyarrow()
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(indexes, pyarrow.int32()), pyarrow.array(values))


def lists(lengths: list[int], values: Any) -> Any:
    pyarrow = import_pyarrow()
    return pyarrow.ListArray.from_arrays(pyarrow.array(np.cumsum([0, *lengths]), pyarrow.int32()), values)


def test_bombs_of_a_few_kilobytes(tmp_path: Path) -> None:
    """In a process of its own: a huge value, a dictionary, a list, a list of a dictionary, many columns."""
    pyarrow = import_pyarrow()
    long = "a" * (150 * MIB)
    texts, plain = ["x", long, "y"], {"use_dictionary": False}
    huge = repeated(["a" * (40 * MIB), "x"], *[0] * 12, 1)
    millions = pyarrow.array(np.zeros(20 * 10**6, np.int32))
    inner = repeated(["a" * MIB], *[0] * 10**5)
    files = [
        write(tmp_path / "value.parquet", {"prompt": texts}, **plain),
        write(tmp_path / "dictionary.parquet", {"prompt": texts}),
        write(tmp_path / "shared.parquet", {"prompt": huge}),
        write(tmp_path / "shared_too.parquet", {"prompt": huge}, store_schema=False),
        write(tmp_path / "list.parquet", {"prompt": lists([5, 20 * 10**6 - 5], millions)}),
        write(tmp_path / "texts.parquet", {"prompt": lists([1, 10**5 - 1], inner)}, store_schema=False),
        write(tmp_path / "columns.parquet", {f"c{number}": [long, "x"] for number in range(4)}, **plain),
    ]
    done = subprocess.run([sys.executable, "-c", READ, *files], capture_output=True, text=True, timeout=300)
    *found, memory = done.stdout.splitlines()
    one = "ok bad ok"
    assert found == [one, one, *["bad " * 12 + "ok"] * 2, "ok bad", "ok bad", "bad bad"], done.stderr
    assert int(memory) < 1300


def test_a_job_with_a_bomb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parquet, "MAX_UNPACKED", 32 * MIB)
    texts = ["x", "y", "z", "a" * (60 * MIB), "x", "a" * (9 * MIB), "y", "z"]
    options = {"use_dictionary": False, "row_group_size": 2}
    source = write(tmp_path / "in.parquet", {"prompt": texts}, **options)
    out = tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 1
    errors = {row["index"]: row["error"] for row in read_rows(out) if row["error"] is not None}
    assert errors.keys() == {2, 3, 5}
    for index in (2, 3):
        wrong = "row group 1 of the file takes more than 0.03125 GiB of memory to unpack, and its rows 3 to 4"
        assert errors[index].startswith(
            f"in.parquet: row {index + 1}: {wrong} are not read; write it with smaller row"
        )
    assert errors[5] == "in.parquet: row 6: it is longer than 8 MiB"
    assert program.main(["check", str(source)]) == 1
    assert capsys.readouterr().out.endswith("in.parquet: 8 rows, 3 bad\n")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["snappy", "none"])
def test_good_files_are_read_whatever_their_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, version: str
) -> None:
    """They need more memory as a whole than there is at once."""
    monkeypatch.setattr(parquet, "MAX_UNPACKED", 16 * MIB)
    pyarrow = import_pyarrow()
    lengths = [0, 1, 2, 7, 8, 9, 30, 100, 64, 0] * 3000
    columns = {
        "ids": lists(lengths, pyarrow.array(np.arange(sum(lengths)) % 7)),
        "chat": [[{"role": "user", "content": f"{row} " * 9}] * (row % 4) for row in range(30000)],
        "text": [f"text {row} " * 9 for row in range(30000)],
    }
    table, path = pyarrow.table(columns), tmp_path / "in.parquet"
    pyarrow.parquet.write_table(table, path, compression=compression, data_page_version=version)
    assert [row.data for row in ParquetSource(path).rows()] == table.to_pylist()
