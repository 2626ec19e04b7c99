"""The search of `nanovllm tune`, with an injected clock and measurer: what it tries, finds and prints."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import write_rows

from nanovllm import demo_model_path
from nanovllm.jobs.errors import JobRefusedError, caught_signals
from nanovllm.jobs.main import parse_args
from nanovllm.tune.command import command_of, tune
from nanovllm.tune.halving import Failed, Measured, Outcome, Search
from nanovllm.tune.settings import Machine, Setting, changes_answers, least_rows, settings

CPU, GPUS = Machine("cpu", 0, 8, False), Machine("cuda", 4, 6, False)
Cost = Callable[[dict[str, Any]], float]  # seconds of a row by setting


class Bench:
    """A clock, and trials that take `loading` seconds and `cost` of their setting for each row."""

    def __init__(self, cost: Cost, loading: float = 5.0) -> None:
        self.now = 0.0
        self.cost, self.loading = cost, loading
        self.calls: list[tuple[Setting, int]] = []
        self.failing: dict[str, str] = {}  # reasons by option
        self.interrupt_at = -1

    def clock(self) -> float:
        return self.now

    def measure(self, setting: Setting, rows: int, limit: float) -> Outcome:
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        self.calls.append((setting, rows))
        for name, reason in self.failing.items():
            if name in dict(setting):
                self.now += self.loading
                return Failed(reason)
        seconds = rows * self.cost(dict(setting))
        if self.loading + seconds > limit:
            self.now += limit
            return Failed("not done", is_late=True)
        self.now += self.loading + seconds
        return Measured(rows, seconds, self.loading, 100 * rows, 5 * rows)


def cost(options: dict[str, Any]) -> float:
    """The best is max_num_seqs=32 with steps of 1,024 tokens, 1.5 times as fast as the job's own."""
    seqs = {8: 1.6, 32: 0.8, 128: 0.9}.get(options.get("max_num_seqs", 0), 1.0)
    return 0.1 * seqs * {256: 1.3, 1024: 0.83}.get(options.get("max_num_batched_tokens", 0), 1.0)


def search_of(bench: Bench, minutes: float, tried: list[Setting] | None = None, rows: int = 2048) -> Search:
    tried = settings(CPU, {}, False) if tried is None else tried
    return Search(tried, bench.measure, bench.clock, 60 * minutes, rows)


@pytest.mark.parametrize("minutes", [20, 60, 600])
def test_the_best_of_a_grid_is_found_in_time(minutes: float) -> None:
    bench = Bench(cost)
    search = search_of(bench, minutes)
    search.run()
    best = search.best()
    assert best is not None and dict(best) == {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    assert search.gain(best) == pytest.approx(1 / (0.8 * 0.83)) and len(search.left_out) == (
        2 if minutes == 20 else 0
    )
    assert bench.now <= 60 * minutes
    few, more, *rounds = [rows for setting, rows in bench.calls if setting == ()]
    falls = sum(after < before for before, after in pairwise(rounds))
    assert few < more and falls == (minutes == 20), "more rows for fewer settings; those left out begin anew"
    assert rounds[-3:] == [rounds[-1]] * 3, "the finalists run at least three times"
    assert all(rows >= least_rows(setting) for setting, rows in bench.calls[2:]), "as many as a setting needs"


def test_a_short_time_is_kept_too() -> None:
    """What does not fit is left out, those first that differ most from the job's own settings."""
    bench = Bench(cost)
    search = search_of(bench, 1)
    search.run()
    assert bench.now <= 60 and search.left_out
    assert search.left_out == [each for each in search.settings if each not in search.trials]
    assert max(map(len, search.trials)) <= 1 and () in search.trials
    assert all(rows >= least_rows(setting) for setting, rows in bench.calls if setting)


def test_no_time_for_a_second_trial_is_the_job_s_own() -> None:
    bench = Bench(cost, loading=29.0)
    search = search_of(bench, 1)
    search.run()
    assert search.best() == () and len(search.trials) == 1


def test_settings_are_compared_with_each_other_once_the_own_one_fails() -> None:
    """Its passes no longer count, as settings that run later have none beside them."""
    bench = Bench(lambda options: 0.1 if options else 0.5)
    tried: list[Setting] = [(), *((("max_num_seqs", number),) for number in (8, 32, 128))]
    number = 0

    def measure(setting: Setting, rows: int, limit: float) -> Outcome:
        nonlocal number
        number += not setting
        if not setting and number == 4:  # two probes and a pass
            return Failed("no memory")
        outcome = bench.measure(setting, rows, limit)
        assert isinstance(outcome, Measured)
        slower = 1.2 if setting == tried[1] else 1.0
        return replace(outcome, seconds=outcome.seconds * slower)

    search = Search(tried, measure, bench.clock, 3600, 64)
    search.run()
    assert not search.own_ran
    gains = [search.gain(each) for each in tried[1:]]
    assert gains == pytest.approx([10 / 1.2, 10, 10]) and search.best() in tried[2:]


def test_a_small_lead_may_be_chance() -> None:
    for lead, own in ((1.01, True), (1.05, False)):
        bench = Bench(lambda options, lead=lead: 0.1 if options else 0.1 * lead)  # type: ignore[misc]
        search = search_of(bench, 30)
        search.run()
        assert (search.best() == ()) == own


def test_settings_that_fail_are_rows_with_a_reason() -> None:
    bench = Bench(cost)
    bench.failing = {"max_num_seqs": "the KV cache needs 9 GB"}
    search = search_of(bench, 60)
    search.run()
    failed = {setting for setting, found in search.trials.items() if isinstance(found, Failed)}
    assert failed == {setting for setting in search.settings if "max_num_seqs" in dict(setting)}
    assert search.best() == (("max_num_batched_tokens", 1024),)
    assert max([setting for setting, _ in bench.calls].count(each) for each in failed) == 1, "tried once"


def test_the_job_s_own_settings_may_fail() -> None:
    """Then the fastest of the others is chosen."""
    tried = settings(CPU, {}, False)
    bench = Bench(cost)
    measure = bench.measure

    def fails(setting: Setting, rows: int, limit: float) -> Outcome:
        return measure(setting, rows, limit) if setting else Failed("out of memory")

    search = Search(tried, fails, bench.clock, 3600, 2048)
    search.run()
    best = search.best()
    assert best is not None and dict(best) == {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    nothing = Search(tried, lambda *given: Failed("no"), bench.clock, 3600, 2048)
    nothing.run()
    assert nothing.best() is None and len(nothing.trials) == len(tried)


def test_a_trial_that_is_far_slower_is_cut_off() -> None:
    bench = Bench(lambda options: 5.0 if options.get("max_num_seqs") == 8 else 0.05)
    search = search_of(bench, 60)
    search.run()
    slow = [found for setting, found in search.trials.items() if dict(setting).get("max_num_seqs") == 8]
    assert slow and all(isinstance(each, Failed) for each in slow) and bench.now <= 3600


def test_a_trial_that_the_end_of_the_time_cuts_off_has_not_failed() -> None:
    """A setting keeps what an earlier round found, or was not tried."""
    for minutes in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
        bench = Bench(cost)
        search = search_of(bench, minutes)
        measure = bench.measure

        def slower(
            setting: Setting, rows: int, limit: float, measure: Any = measure, bench: Bench = bench
        ) -> Outcome:
            bench.loading *= 1.3  # the machine becomes busy
            return measure(setting, rows, limit)

        search.measure = slower
        search.run()
        assert bench.now <= 60 * minutes and search.best() is not None
        assert not [each for each in search.trials.values() if isinstance(each, Failed)]
        assert not set(search.left_out) & set(search.trials)
        assert len(search.left_out) + len(search.trials) == len(search.settings)


def test_time_that_is_left_is_for_settings_that_were_left_out() -> None:
    """The first trials of a machine may be slow, as they compile kernels."""
    bench = Bench(cost)
    search = search_of(bench, 30)
    measure = bench.measure

    def slow_at_first(setting: Setting, rows: int, limit: float) -> Outcome:
        bench.loading = 60.0 if len(bench.calls) < 2 else 5.0
        return measure(setting, rows, limit)

    search.measure = slow_at_first
    search.run()
    first_pass = {setting for setting, _ in bench.calls[2:8]}
    best = search.best()
    assert best is not None and dict(best) == {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    assert best not in first_pass and len(search.left_out) <= 3 and bench.now <= 1800


def test_settings_are_compared_within_their_round() -> None:
    """The machine may be faster in a later one, with as many rows."""
    bench = Bench(lambda options: 1.0)
    search = search_of(bench, 30, rows=8)
    measure = bench.measure

    def faster(setting: Setting, rows: int, limit: float) -> Outcome:
        speed = 0.8 ** [each for each, _ in bench.calls].count(())
        bench.cost = lambda options: speed
        return measure(setting, rows, limit)

    search.measure = faster
    search.run()
    gains = [search.gain(each) for each in search.settings]
    assert all(each is not None and each <= 1.26 for each in gains) and len(set(gains)) <= 3


def test_all_that_fail_in_a_later_round() -> None:
    bench = Bench(cost)
    search = search_of(bench, 60)
    measure = bench.measure
    search.measure = lambda *given: measure(*given) if len(bench.calls) < 14 else Failed("gone")
    search.run()
    assert search.best() is not None or all(isinstance(each, Failed) for each in search.trials.values())


# -- which settings ----------------------------------------------------------------------------------------


def test_answers_change_only_when_asked() -> None:
    for machine in (CPU, GPUS):
        plain, all_of_them = settings(machine, {}, False), settings(machine, {}, True)
        assert not any(map(changes_answers, plain)) and any(map(changes_answers, all_of_them))
        assert set(plain) < set(all_of_them) and plain[0] == all_of_them[0] == ()
    quantised = settings(Machine("cpu", 0, 8, True), {}, True)
    assert not any(map(changes_answers, quantised)), "weights that are quantised stay so"


def test_replicas_against_ranks() -> None:
    """All GPUs, in groups of ranks that divide the K/V heads."""
    found = {tuple(pair for pair in each if "parallel" in pair[0]) for each in settings(GPUS, {}, False)}
    two = ("data_parallel_size", 2), ("tensor_parallel_size", 2)
    assert found == {(), (("data_parallel_size", 4),), two}, "4 ranks do not divide 6 heads"


def test_options_that_are_given_stay() -> None:
    given = {"max_num_seqs": 64, "tensor_parallel_size": 2}
    names = {name for each in settings(GPUS, given, True) for name, _ in each}
    assert names == {"max_num_batched_tokens", "kv_cache_dtype", "quantization"}


# -- command -----------------------------------------------------------------------------------------------


def tune_args(*argv: object) -> Any:
    return parse_args(["tune", demo_model_path(), *map(str, argv)])


def test_the_command_is_that_of_the_job(tmp_path: Path) -> None:
    args = tune_args(
        "a b.jsonl", "--chat", "--minutes", "3", "--sampling", "max_tokens=9", "--change-answers"
    )
    assert command_of(args, (("max_num_seqs", 32),)) == (
        f"nanovllm run 'a b.jsonl' -o OUTPUT.jsonl --model {demo_model_path()} --chat --sampling "
        "max_tokens=9 --max-num-seqs 32"
    )
    same = tune_args("x", "--system", "x", "--minutes=3")
    assert command_of(same, ()).endswith(f"--model {demo_model_path()} --system x")


def run_tune(tmp_path: Path, bench: Bench, *more: object, num_rows: int = 300) -> int:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{number}"} for number in range(num_rows)])
    return tune(tune_args(rows, "--device", "cpu", *more), bench.measure, bench.clock)


def test_the_table_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(cost)
    bench.failing = {"quantization": "there is not enough memory"}
    assert run_tune(tmp_path, bench, "--minutes", "60", "--change-answers") == 0
    out = capsys.readouterr().out
    table, _, command = out.rpartition("\n\n")
    head, first, *_ = table.splitlines()
    assert head.split()[:2] == ["setting", "rows"]
    assert first.startswith("--max-num-seqs 32 --max-num-batched-tokens 1024") and "1.51" in first
    assert "--quantization int8 (changes answers)" in table and "failed: there is not enough memory" in table
    assert "is the fastest: 1.51 times the job's own\n" in out
    assert command.strip().endswith("--device cpu --max-num-seqs 32 --max-num-batched-tokens 1024")


def test_a_choice_that_changes_answers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(lambda options: 0.05 if options.get("quantization") == "int4" else 0.1)
    assert run_tune(tmp_path, bench, "--minutes", "60", "--change-answers") == 0
    assert "its answers differ from those of the job's own" in capsys.readouterr().out


def test_ctrl_c_prints_the_best_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(cost)
    bench.interrupt_at = 14  # in the second round
    assert run_tune(tmp_path, bench, "--minutes", "60") == 130
    out, err = capsys.readouterr()
    assert (
        "stopped by Ctrl-C" in err and "nanovllm run" in out and "--max-num-seqs 32" in out.splitlines()[-1]
    )


@pytest.mark.parametrize(("trials", "said"), [(0, "nothing is known"), (1, "is the only setting that ran")])
def test_ctrl_c_before_settings_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trials: int, said: str
) -> None:
    bench = Bench(cost)
    bench.interrupt_at = trials
    assert run_tune(tmp_path, bench) == 130
    out, err = capsys.readouterr()
    assert "stopped by Ctrl-C" in err and said in (out if trials else err)
    assert not trials or "settings not tried, because of Ctrl-C\n" in out
    assert "the reasons are above" not in out and "the best here" not in out
    assert bool(out) == bool(trials)


def test_the_signal_that_ends_the_search_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(cost)
    bench.interrupt_at = 1
    with caught_signals() as signals:
        signals.seen.append(signal.SIGTERM)  # which interrupts
        assert run_tune(tmp_path, bench) == 143
    out, err = capsys.readouterr()
    assert "stopped by SIGTERM; the best so far" in err and "settings not tried, because of SIGTERM\n" in out


def test_a_second_ctrl_c_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    cleanup = tempfile.TemporaryDirectory.cleanup

    def interrupted(made: tempfile.TemporaryDirectory[str]) -> None:
        signal.raise_signal(signal.SIGINT)
        cleanup(made)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", interrupted)
    bench = Bench(cost)
    bench.interrupt_at = 1
    with caught_signals(), suppress(KeyboardInterrupt):
        assert run_tune(tmp_path, bench) == 130
    assert not [*folder.iterdir()]


def test_a_time_that_is_too_short_for_one_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tune(tmp_path, Bench(cost), "--minutes", "0.01") == 4
    out, err = capsys.readouterr()
    assert "--minutes 0.01 was over before the first trial ended" in err and not out


def test_the_job_s_own_settings_fail_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is compared with them, and a rate is not called a ratio."""
    bench = Bench(cost)
    measure = bench.measure
    monkeypatch.setattr(
        bench,
        "measure",
        lambda setting, *given: measure(setting, *given) if setting else Failed("it is full"),
    )
    assert run_tune(tmp_path, bench, "--minutes", "60") == 0
    table, _, rest = capsys.readouterr().out.partition("the job's own")
    assert "failed: it is full" in rest and "is the fastest of those that ran\n" in rest
    assert "times the job's own" not in rest
    assert {line.split()[-3] for line in table.splitlines()[1:] if line} == {"-"}


def test_few_rows_tell_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(cost)
    with pytest.raises(
        JobRefusedError, match=r"^31 rows that can be read would not tell .*; give 32 or more$"
    ):
        run_tune(tmp_path, bench, num_rows=31)
    assert not bench.calls
    assert run_tune(tmp_path, bench, num_rows=32) == 0 and bench.calls


def test_a_wrong_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, why in (("0", "minutes above 0"), ("soon", "minutes above 0")):
        with pytest.raises(SystemExit):
            tune_args("rows.jsonl", "--minutes", given)
        assert why in capsys.readouterr().err
