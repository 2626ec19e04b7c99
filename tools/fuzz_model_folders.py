"""Load many model folders with one mutated file each: every one must load, or be refused by name, in seconds.

    python tools/fuzz_model_folders.py                # seeds 0 to 4,999
    python tools/fuzz_model_folders.py 12000 13000    # these seeds
    python tools/fuzz_model_folders.py 0 1000 awq     # of a hybrid in a format of HYBRIDS

Prints what fails, with its seed, and exits with status 1 if anything does. The tests try the first 200 seeds.
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from model_folders import mutate, mutate_hybrid, try_folder, write_base


def main(first: int = 0, last: int = 5000, hybrid: str | None = None) -> int:
    """Try the folders of these seeds; return the exit status."""
    change = mutate if hybrid is None else mutate_hybrid
    logging.disable(logging.WARNING)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        base = write_base(Path(name, "base"), hybrid)
        gc.freeze()  # closing an engine collects garbage
        for seed in range(first, last):
            try:
                outcomes[try_folder(base, Path(name, "work"), seed, change)[1]] += 1
            except AssertionError as error:
                outcomes["failed"] += 1
                print(error)
    print(dict(outcomes))
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
