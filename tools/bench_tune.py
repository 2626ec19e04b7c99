"""Whether `nanovllm tune` finds the fastest setting: its choice beside the whole grid, on four workloads.

    python -m tools.bench tune                                  # the demo model on idle CPU cores
    python -m tools.bench tune --only labels --minutes 6 --passes 5
    python -m tools.bench tune --model FOLDER --scale 8 -- --load-format dummy --tokenizer FOLDER   # of LLM

First the search runs as the command does, then every setting of its grid on all rows of the sample, in turn:
all in some passes; the fastest four, the job's own and the choice in more. The speed of a machine changes, so
that of a setting is the median of its passes beside the job's own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from nanovllm import demo_model_path
from nanovllm.jobs.job import engine_options
from nanovllm.jobs.main import parse_args
from nanovllm.tune.command import _machine, _name
from nanovllm.tune.halving import Measured, Outcome, Search
from nanovllm.tune.sample import job_arguments, write_sample
from nanovllm.tune.settings import Setting, settings
from nanovllm.tune.trial import Trials

_FAST = 4  # settings that run in the passes after those over the whole grid
_LIMIT = 600.0  # seconds of a trial


class Rows(NamedTuple):
    """A workload: how many rows, the tokens that all share, and ranges of each row's own and its answer's."""

    number: int
    shared: int
    own: tuple[int, int]
    written: tuple[int, int]


WORKLOADS = {
    "labels": Rows(1024, 200, (40, 100), (1, 4)),
    "chats": Rows(288, 0, (50, 250), (64, 192)),
    "long": Rows(128, 0, (500, 900), (8, 32)),
    "few": Rows(24, 0, (100, 300), (400, 600)),
}


def write_rows(rows: Rows, scale: int, vocab_size: int, path: Path) -> None:
    """Rows of token ids as JSON Lines. scale: multiplies their number."""
    rng = Random(7)
    shared = [rng.randrange(10, vocab_size) for _ in range(rows.shared)]
    with path.open("w") as file:
        for _ in range(rows.number * scale):
            own = [rng.randrange(10, vocab_size) for _ in range(rng.randint(*rows.own))]
            params = {"max_tokens": rng.randint(*rows.written), "ignore_eos": True, "temperature": 0.6}
            file.write(json.dumps({"prompt": shared + own, "sampling_params": params}) + "\n")


def search(args: argparse.Namespace, trials: Trials, tried: Sequence[Setting], rows: int) -> Search:
    """The search of the command, which prints what it chose."""

    def measure(setting: Setting, rows: int, limit: float) -> Outcome:
        outcome = trials.measure(setting, rows, limit)
        print(f"  {rows} rows, {_name(setting)}: {outcome}", flush=True)
        return outcome

    found = Search(tried, measure, time.monotonic, 60 * args.minutes, rows)
    began = time.monotonic()
    found.run()
    seconds, best = time.monotonic() - began, found.best()
    if best is None:
        raise SystemExit(f"no setting runs: {found.trials}")
    gain = found.gain(best) or 0.0
    loading = median(each.loading for each in found.trials.values() if isinstance(each, Measured))
    print(
        f"  chosen in {seconds:,.0f} s: {_name(best)}, {gain:.2f} times the job's own; a trial loads "
        f"{loading:.1f} s; not tried: {len(found.left_out)}",
        flush=True,
    )
    return found


def grid(
    trials: Trials, tried: Sequence[Setting], choice: Setting, rows: int, passes: int, whole: int
) -> dict[Setting, list[float]]:
    """The rows a second of each setting, in each pass in which it runs."""
    speeds: dict[Setting, list[float]] = {each: [] for each in tried}
    for number in range(passes):
        if number < whole:
            here = tried
        else:
            here = sorted(tried, key=lambda each: -max(speeds[each][:whole]))[:_FAST]
            here += [each for each in dict.fromkeys([tried[0], choice]) if each not in here]
        for setting in here:
            outcome = trials.measure(setting, rows, _LIMIT)
            speeds[setting].append(rows / outcome.seconds if isinstance(outcome, Measured) else 0.0)
            print(f"  pass {number + 1}: {_name(setting)}: {speeds[setting][-1]:,.1f} rows/s", flush=True)
    return speeds


def report(choice: Setting, speeds: dict[Setting, list[float]]) -> Iterator[str]:
    """The settings, the fastest first; how much slower the choice is than the best that ran in all passes."""
    own, most = next(iter(speeds.values())), max(map(len, speeds.values()))
    gains = {
        each: median(mine / other for mine, other in zip(found, own, strict=False))
        for each, found in speeds.items()
    }
    for setting in sorted(speeds, key=lambda each: -gains[each]):
        each = " ".join(f"{speed:,.1f}" for speed in speeds[setting])
        yield f"  {_name(setting):58} {gains[setting]:.3f} times the job's own, rows/s {each}"
    best = max(gain for each, gain in gains.items() if len(speeds[each]) == most)
    yield f"  the choice is {1 - gains[choice] / best:.1%} slower than the best of the grid"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], metavar="NAME")
    parser.add_argument("--minutes", type=float, default=6.0, help="of each search; 0: only the grid")
    parser.add_argument("--passes", type=int, default=7, help="of the grid")
    parser.add_argument("--whole", type=int, default=2, help="passes over all settings, of these")
    parser.add_argument("--scale", type=int, default=1, help="times as many rows")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="options of LLM, after --")
    args = parser.parse_args()
    vocab_size = json.loads(Path(args.model, "config.json").read_text())["vocab_size"]
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            path, sample = Path(folder, "rows.jsonl"), Path(folder, "sample.jsonl")
            write_rows(WORKLOADS[name], args.scale, vocab_size, path)
            job = parse_args(["tune", args.model, str(path), *args.options])
            rows, _ = write_sample(job, sample)
            machine = _machine(job)
            trials = Trials(job_arguments(job, sample, Path(folder, "out.jsonl")), machine.warms_up)
            tried = settings(machine, engine_options(job), change_answers=False)
            tried = [each for each in tried if dict(each).get("max_num_seqs", 0) < rows]
            print(f"{name}: {rows:,} rows, {len(tried)} settings", flush=True)
            best = search(args, trials, tried, rows).best() if args.minutes else ()
            assert best is not None, "some setting runs"
            for line in report(best, grid(trials, tried, best, rows, args.passes, args.whole)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
