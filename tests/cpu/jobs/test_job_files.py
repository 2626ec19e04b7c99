"""Files of rows that are damaged or hostile: each row in is a row out, or the file is refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from job_files import try_file

FILES = 150
FOUND = (861, 1185, 1698, 2823)  # names that are no text, token ids, a footer at which pyarrow ends


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 6))])
def test_mutated_files_are_answered_row_by_row_or_refused(tmp_path: Path, part: int) -> None:
    seeds = [*range(part * FILES // 6, (part + 1) * FILES // 6), *FOUND]  # a few of each kind of file
    outcomes = Counter(try_file(tmp_path / "work", seed) for seed in seeds)
    assert outcomes["answered"] > len(seeds) / 4 and outcomes["refused"] > len(seeds) / 10
