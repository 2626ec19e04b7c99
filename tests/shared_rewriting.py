"""Workers rewrite the asserts of a part of the tests each, before they collect all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

try:
    from _pytest.assertion.rewrite import (
        PYC_TAIL,
        _read_pyc,
        _rewrite_test,
        _write_pyc,
        assertstate_key,
        get_cache_dir,
        try_makedirs,
    )
except ImportError:  # another version of pytest: each worker rewrites all
    assertstate_key = None


def rewrite_a_part(config: pytest.Config) -> None:
    """In worker 1 of 3 pytest rewrites each third file, and keeps it where the other workers look for it.

    All three begin at once with an empty cache, and would rewrite every file: 11 s each. A file that another
    one has not done yet is rewritten as ever.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or assertstate_key is None:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    state = config.stash[assertstate_key]
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        folder = get_cache_dir(file)
        kept = folder / (file.stem + PYC_TAIL)
        if _read_pyc(file, kept) is None and try_makedirs(folder):
            digest, code = _rewrite_test(file, config)
            _write_pyc(state, code, digest, kept)
