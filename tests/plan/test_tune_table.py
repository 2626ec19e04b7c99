"""The table of `nanovllm tune`: what it says of several passes."""

from __future__ import annotations

import io
from collections import Counter

from nanovllm import demo_model_path
from nanovllm.jobs.main import parse_args
from nanovllm.tune.command import print_found
from nanovllm.tune.halving import Measured, Outcome, Search
from nanovllm.tune.settings import Machine, Setting, settings


def test_the_table_has_the_medians_of_passes() -> None:
    """One pass of each setting but the job's own is disturbed: the second, or the third."""
    tried = settings(Machine("cpu", 0, 8, False), {}, False)
    passes: Counter[Setting] = Counter()

    def measure(setting: Setting, rows: int, limit: float) -> Outcome:
        passes[setting] += rows == 300
        is_disturbed = setting and passes[setting] == 2 + tried.index(setting) % 2
        seconds = rows * (0.2 if is_disturbed else 0.1)
        return Measured(rows, seconds, 5.0, 100 * rows, 5 * rows)

    search = Search(tried, measure, lambda: 0.0, 3600.0, 300)
    search.run()
    out = io.StringIO()
    print_found(search, parse_args(["tune", demo_model_path(), "rows.jsonl"]), out)
    rows = out.getvalue().partition("\n\n")[0].splitlines()[1:-1]
    assert len(rows) == len(search.settings) and 3 in passes.values()
    for row in rows:
        assert row.split()[-7:] == ["300", "10.0", "1.00k", "50.0", "1.00", "5.0", "s"], row
