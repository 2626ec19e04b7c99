"""`nanovllm tune`: from arguments to a table of trials and the command line to use.

Loads no model in this process; each trial has its own.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from nanovllm.config import Config
from nanovllm.engine.startup import find_model, read_generation_config, read_model_config
from nanovllm.errors import NanoVLLMError
from nanovllm.jobs.errors import ANSWERED, FAILED, JobRefusedError, caught_signals, refusing
from nanovllm.jobs.job import engine_options
from nanovllm.jobs.labels import check_arguments
from nanovllm.quantization.config import QuantConfig
from nanovllm.report.gpu import devices_of
from nanovllm.stats.summary import counted, short
from nanovllm.tune.halving import Failed, Measure, Measured, Search
from nanovllm.tune.sample import job_arguments, write_sample
from nanovllm.tune.settings import LEAST_ROWS, Machine, Setting, changes_answers, flags_of, settings
from nanovllm.tune.trial import Trials

_HEAD = ("setting", "rows", "rows/s", "tok/s read", "written", "against own", "loading")


def tune(
    args: argparse.Namespace, measure: Measure | None = None, clock: Callable[[], float] | None = None
) -> int:
    """Search, and print the table and the command; return the exit code. JobRefusedError if nothing can be
    tried. measure, clock: instead of trials in processes and of the time."""
    given = engine_options(args)
    check_arguments(args.choice, args.sampling, given)
    machine = _machine(args)
    tried = settings(machine, given, args.change_answers)
    clock = time.monotonic if clock is None else clock
    began = clock()
    with tempfile.TemporaryDirectory(prefix="nanovllm-tune-") as folder:
        sample = Path(folder, "sample.jsonl")
        num_kept, num_rows = write_sample(args, sample)
        if num_kept < LEAST_ROWS:
            raise JobRefusedError(
                f"{counted(num_kept, 'row')} that can be read would not tell which setting is faster; give "
                f"{LEAST_ROWS} or more"
            )
        trials = Trials(job_arguments(args, sample, Path(folder, "out.jsonl")), machine.warms_up)
        run = trials.measure if measure is None else measure
        # As many sequences as rows, or more, are what the job's own setting has.
        tried = [each for each in tried if dict(each).get("max_num_seqs", 0) < num_kept]
        _say(
            f"{counted(num_rows, 'row')}, of which {num_kept:,} are the sample; {len(tried)} settings; "
            f"{args.minutes:g} minutes at most"
        )
        search = Search(tried, run, clock, 60 * args.minutes - (clock() - began), num_kept, _started)
        code, stopped = ANSWERED, ""
        with caught_signals() as signals:
            try:
                search.run()
            except KeyboardInterrupt:
                code, stopped = signals.end
            signals.hold()  # what is left is short
    if not search.trials:
        why = f"stopped by {stopped}" if stopped else f"--minutes {args.minutes:g} was over"
        _say(f"{why} before the first trial ended, so nothing is known")
    else:
        if stopped:
            _say(f"stopped by {stopped}; the best so far:")
        print_found(search, args, sys.stdout, stopped)
    return FAILED if search.best() is None and not stopped else code


def _machine(args: argparse.Namespace) -> Machine:
    """What decides which settings are of use. JobRefusedError if the model or an option is wrong."""
    with refusing():
        config = Config.from_kwargs(args.model, **engine_options(args))
        device = devices_of(config)[0]
        try:
            path = find_model(config)
            generation = read_generation_config(config.generation_config, path)
            model = read_model_config(config, path, generation, device)
        except (NanoVLLMError, OSError) as error:
            raise ValueError(str(error)) from None
    kind = "cuda" if device.is_cuda else "cpu"
    num_gpus = len(device.all()) - 1 - (device.torch.index or 0) if device.is_cuda else 0
    quantised = type(model.quant) is not QuantConfig
    return Machine(kind, num_gpus, model.num_kv_heads, quantised)


def print_found(search: Search, args: argparse.Namespace, out: TextIO, stopped: str = "") -> None:
    """Print the table, the fastest first, and the command line to use. stopped: the signal that ended the
    search early."""
    ranked = sorted(search.trials, key=lambda each: -(search.gain(each) or 0.0))
    rows = [_HEAD, *(_row(search, each) for each in ranked)]
    widths = [max(len(row[place]) for row in rows if len(row) > 2) for place in range(len(_HEAD))]
    for row in rows:
        cells = [each.ljust(width) for each, width in zip(row, widths, strict=False)]
        print(
            "  ".join([*cells, *row[len(cells) :]] if len(row) > 2 else [cells[0], row[1]]).rstrip(), file=out
        )
    if search.left_out:
        why = f"of {stopped}" if stopped else "there was no time; a larger --minutes has it"
        print(f"{counted(len(search.left_out), 'setting')} not tried, because {why}", file=out)
    best = search.best()
    if best is None:
        print("no setting ran; the reasons are above", file=out)
        return
    print(f"{_verdict(search, best)}\n\n{command_of(args, best)}", file=out)


def _verdict(search: Search, best: Setting) -> str:
    """What the trials say of the best setting."""
    note = "; its answers differ from those of the job's own" if changes_answers(best) else ""
    if sum(isinstance(each, Measured) for each in search.trials.values()) == 1:
        return f"{_name(best)} is the only setting that ran, so it is compared with none{note}"
    if best == search.settings[0]:
        return "the job's own settings are the best here: no other one is faster by 2 % or more"
    if not search.own_ran:
        return f"{_name(best)} is the fastest of those that ran{note}"
    return f"{_name(best)} is the fastest: {search.gain(best):.2f} times the job's own{note}"


def _row(search: Search, setting: Setting) -> tuple[str, ...]:
    """The cells of a setting; of one that failed its name and the reason."""
    name = _name(setting) + (" (changes answers)" if changes_answers(setting) else "")
    outcome = search.trials[setting]
    if isinstance(outcome, Failed):
        return name, f"failed: {outcome.reason}"
    gain = f"{search.gain(setting):.2f}" if search.own_ran else "-"
    seconds = outcome.rows * search.seconds_per_row(setting)
    rates = (outcome.rows, outcome.read, outcome.written)
    first, *others = (short(each / seconds) for each in rates)
    return name, f"{outcome.rows:,}", first, *others, gain, f"{outcome.loading:.1f} s"


def _name(setting: Setting) -> str:
    return " ".join(flags_of(setting)) or "the job's own"


def command_of(args: argparse.Namespace, setting: Setting) -> str:
    """The command line of the job with a setting: what was given to `tune`, as `run` has it."""
    words = list(args.given)[1:]
    for positional in (args.model, *args.inputs):
        found = [place for place, word in enumerate(words) if word == positional]
        # The value of a flag may be the same text.
        plain = [place for place in found if not place or not words[place - 1].startswith("--")]
        del words[(plain or found)[0]]
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--minutes":
            next(rest)
        elif word != "--change-answers" and not word.startswith("--minutes="):
            kept.append(word)
    start = ["nanovllm", "run", *args.inputs, "-o", "OUTPUT.jsonl", "--model", args.model]
    return shlex.join([*start, *kept, *flags_of(setting)])


def _started(setting: Setting, rows: int) -> None:
    _say(f"{counted(rows, 'row')} with {_name(setting)}")


def _say(text: str) -> None:
    print(f"nanovllm tune: {text}", file=sys.stderr, flush=True)
