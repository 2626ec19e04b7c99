"""Load many GGUF files with a mutated header: every one must load, or be refused by name, in seconds.

    python tools/fuzz_gguf.py                # seeds 0 to 4,999
    python tools/fuzz_gguf.py 12000 13000    # these seeds
    python tools/fuzz_gguf.py 0 1000 hybrid  # of a model with states

Prints what fails, with its seed, and exits with status 1 if anything does. The tests try the first 200 seeds.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from gguf_files import try_file, write_base


def main(first: int = 0, last: int = 5000, kind: str = "") -> int:
    """Try the files of these seeds; return the exit status."""
    logging.disable(logging.WARNING)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        base = write_base(Path(name), kind == "hybrid").read_bytes()
        gc.freeze()  # closing an engine collects garbage
        for seed in range(first, last):
            try:
                outcomes[try_file(base, Path(name, "mutated.gguf"), seed, not kind)[1]] += 1
            except AssertionError as error:
                outcomes["failed"] += 1
                print(error)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(dict(outcomes), f"peak of memory {peak:.2f} GiB")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
