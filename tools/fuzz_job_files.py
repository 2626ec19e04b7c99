"""Run and check many damaged files of rows: each row in is a row out, or the file is refused by name.

    python tools/fuzz_job_files.py                # seeds 0 to 9,999
    python tools/fuzz_job_files.py 12000 13000    # these seeds

Prints what fails, with its seed, and exits with status 1 if anything does. The tests try the first 150 seeds.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from job_files import try_file


def main(first: int = 0, last: int = 10_000) -> int:
    """Try the files of these seeds; return the exit status."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        for seed in range(first, last):
            try:
                outcomes[try_file(Path(name, "work"), seed)] += 1
            except AssertionError as error:
                outcomes["failed"] += 1
                print(error, flush=True)
    print(dict(outcomes))
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
