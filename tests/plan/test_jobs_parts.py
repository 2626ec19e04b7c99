"""The parts of a job that need no engine: order window, journal, output, progress and arguments."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import inside
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.jobs.errors import JobFailedError, JobRefusedError
from nanovllm.jobs.job import engine_options
from nanovllm.jobs.journal import Journal, locked
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.output import IndexSet, Output, put_in_order, to_line, to_text
from nanovllm.jobs.tasks import Task
from nanovllm.jobs.window import Window
from nanovllm.sampling_params import SamplingParams

# -- the order window --------------------------------------------------------------------------------------


def tasks_of(prompts: list[str], limits: list[int] | None = None) -> list[Task]:
    limits = limits or [64] * len(prompts)
    return [
        Task(index, None, prompt, SamplingParams(temperature=0, max_tokens=limit))
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def test_shared_prefixes_meet_and_long_outputs_come_first() -> None:
    rng = random.Random(0)
    owners = [rng.randrange(20) for _ in range(400)]
    tasks = tasks_of([f"{owner:02}" * 200 + str(rng.random()) for owner in owners])
    found = [owners[task.index] for task in Window(iter(tasks), 64)]
    assert sum(one != other for one, other in pairwise(found)) == 19
    tasks = tasks_of(["a", "b", "c" * 200 + "1", "c" * 200 + "2", "d"], [5, 50, 10, 20, 1])
    assert [task.index for task in Window(iter(tasks), 64)] == [1, 3, 2, 0, 4]


def test_long_answers_of_the_last_window_start_soon() -> None:
    """Rows behind the first window are read faster than rows run."""
    tasks = tasks_of([str(index) for index in range(80)], [10] * 79 + [5000])
    found = [task.index for task in Window(iter(tasks), 4, 64)]
    assert found.index(79) == 2, "16 rows are read while two run"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=60), st.integers(1, 20), st.integers(1, 9))
def test_the_window_keeps_every_task(prompts: list[str], rows: int, slots: int) -> None:
    read = 0

    def source() -> Iterator[Task]:
        nonlocal read
        for task in tasks_of(prompts):
            read += 1
            yield task

    found = []
    for task in Window(source(), slots, rows):
        found.append(task.index)
        assert read <= len(found) + 2 * rows
    assert sorted(found) == list(range(len(prompts)))
    assert found == [task.index for task in Window(iter(tasks_of(prompts)), slots, rows)]


# -- the journal and the lock ------------------------------------------------------------------------------

JOB = {"input": {"bytes": 1, "path": "a"}, "model": {"path": "m"}, "options": {}, "sampling": {"seed": 1}}
JOB |= {"prompt": {}, "format": "csv"}


def test_a_journal_takes_its_own_job_alone(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    journal = Journal(output, output)
    journal.begin(JOB)
    text = journal.path.read_text()
    assert json.loads(text)["state"] == "running" and "\n  " in text and "The same command resumes it" in text
    Journal(output, output).begin(JOB | {"format": "jsonl"})  # nothing is answered yet
    journal.begin(JOB)
    output.write_text("{}")
    moved = JOB | {"input": {"bytes": 1, "path": "b"}}
    Journal(output, output).begin(moved)
    assert json.loads(journal.path.read_text())["input"]["path"] == "b"
    other = JOB | {"sampling": {"seed": 2}, "options": {"dtype": "float16"}}
    with pytest.raises(JobRefusedError) as caught:
        Journal(output, output).begin(other)
    assert 'its options.dtype is null, not "float16"; its sampling.seed is 1, not 2.' in str(caught.value)
    journal.path.write_text("{")
    with pytest.raises(JobRefusedError, match="cannot be read as a journal"):
        Journal(output, output).begin(JOB)
    journal.path.unlink()
    with pytest.raises(JobRefusedError, match="exists and has no journal"):
        Journal(output, output).begin(JOB)
    assert output.read_text() == "{}"


def test_a_lock_is_one_process_s(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    code = (
        "import sys; from pathlib import Path; from nanovllm.jobs.journal import locked\n"
        "with locked(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        with (
            pytest.raises(JobRefusedError, match=f"is being written by process {process.pid}; wait"),
            locked(output),
        ):
            pass
        process.kill()
    with locked(output):  # of the dead process
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(JobRefusedError, match="cannot be written"), locked(tmp_path / "none" / "out.jsonl"):
        pass


# -- the output --------------------------------------------------------------------------------------------


def row(index: int, error: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": f"row {index}", "error": error}


def write_all(path: Path, *rows: dict[str, Any]) -> None:
    output = Output(path, range(4))
    for each in rows:
        output.write(each["index"], each)
    output.close()


@given(st.sets(st.integers(0, 5000)))
def test_index_sets(indexes: set[int]) -> None:
    found = IndexSet()
    for index in [*indexes, *indexes]:
        found.add(index)
    assert len(found) == len(indexes) and {index for index in range(9000) if index in found} == indexes


def test_an_output_is_taken_up_and_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_all(path, row(2), row(0))
    output = Output(path, range(4))
    assert [index in output.finished for index in range(4)] == [True, False, True, False]
    assert (output.num_errors, output.is_ordered) == (0, False)
    output.write(1, row(1, "bad"))
    assert output.num_errors == 1
    with pytest.raises(AssertionError, match="row 1 is answered twice"):
        output.write(1, row(1))
    output.close()
    put_in_order(path, range(3))
    assert path.read_bytes() == b"".join(map(to_line, [row(0), row(1, "bad"), row(2)]))
    output = Output(path, range(4))
    assert output.is_ordered and output.num_errors == 1
    output.close()
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    write_all(path, row(0), row(1))
    path.write_bytes(path.read_bytes()[:-cut])
    output = Output(path, range(4))
    assert output.num_dropped == 1 and path.read_bytes() == to_line(row(0))
    output.write(1, row(1))
    output.close()
    assert path.read_bytes() == to_line(row(0)) + to_line(row(1))


def test_damaged_lines_are_left_out_wherever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    good = [to_line(row(index)) for index in range(4)]
    path.write_bytes(
        good[0] + bytes(40) + b"\n" + good[1][:15] + b"\n" + good[2] + good[0] + good[3] + bytes(9)
    )
    with path.open("ab") as file:
        file.write(b"\n")
        file.writelines(to_line(row(0)).replace(b"0", b"%d" % index) for index in (4, 10**14, 10**30))
        file.write(b'{"index": %b}\n' % (b"9" * 5000))
    output = Output(path, range(4))
    assert output.num_dropped == 8 and path.read_bytes() == good[0] + good[2] + good[3]
    output.write(1, row(1))
    output.close()
    assert path.read_bytes() == good[0] + good[2] + good[3] + good[1]


def test_error_rows_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_all(path, row(0), row(1, "bad"), row(2), row(3, "bad"))
    output = Output(path, range(4), drop_errors=True)
    assert output.num_dropped == 2 and output.num_errors == 0 and 1 not in output.finished
    assert path.read_bytes() == to_line(row(0)) + to_line(row(2))
    output.close()


def test_no_room_to_drop_lines_leaves_the_output_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    write_all(path, row(0, "bad"), row(1))
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", Mock(side_effect=[None, OSError(28, "No space left on device")]))
        with pytest.raises(OSError, match="No space left"):
            Output(path, range(4), drop_errors=True)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_line_that_does_not_fit_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    output = Output(path, range(4))
    output.write(0, row(0))
    real = os.write
    writes: list[Callable[..., int]] = [lambda fd, data: real(fd, data[:7])]

    def write(descriptor: int, data: bytes) -> int:
        if writes:
            return writes.pop()(descriptor, data)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write)
        with pytest.raises(JobFailedError, match="No space left on device, after 1 row, all kept"):
            output.write(1, row(1))
    assert path.read_bytes() == to_line(row(0))
    output.write(1, row(1))
    output.close()
    assert path.read_bytes() == to_line(row(0)) + to_line(row(1))


def test_a_flush_that_begins_while_the_file_is_closed_ends(tmp_path: Path) -> None:
    output = Output(tmp_path / "out.jsonl", range(4))
    sync = inside.flushing(output)

    class ClosedMeanwhile(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            self.set()
            sync.dirty.set()
            return False

    thread = inside.end_flushing(output, ClosedMeanwhile())
    sync.dirty.set()
    thread.join(60)
    assert not thread.is_alive()
    output.close()


def test_what_is_no_character_is_escaped() -> None:
    assert to_line({"id": "é"}) == '{"id": "é"}\n'.encode()
    assert to_line({"id": "é\ud800"}) == '{"id": "é\\ud800"}\n'.encode()


def test_a_number_that_json_has_not_is_null() -> None:
    infinity = float("inf")
    record = {"id": {"a": [infinity, -infinity, float("nan"), 1.5, "é"]}, "error": "inf"}
    assert to_line(record) == '{"id": {"a": [null, null, null, 1.5, "é"]}, "error": "inf"}\n'.encode()
    columns = to_text({"a": float("inf"), "b": "é\ud800"})
    assert to_line({"id": 1}, columns) == '{"id": 1, "a": null, "b": "é\\ud800"}\n'.encode()
    assert to_text({}) == "" and to_line({"id": 1}, "") == b'{"id": 1}\n'


# -- arguments ---------------------------------------------------------------------------------------------

RUN = ["run", "in.jsonl", "-o", "out.jsonl", "--model", "m"]


def test_options_of_llm_are_flags() -> None:
    args = parse_args([*RUN, "--no-enable-prefix-caching", "--max-num-seqs", "8", "--max-model-len", "auto"])
    assert engine_options(args) == {
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_model_len": "auto",
    }
    args = parse_args([*RUN, "--gpu-memory-utilization", "0.5", "--seed", "3", "--enforce-eager"])
    assert engine_options(args) == {"gpu_memory_utilization": 0.5, "seed": 3, "enforce_eager": True}


def test_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbfOne {a}\r\ntwo")
    assert parse_args([*RUN, "--template", f"@{tmp_path}/t.txt"]).template == "One {a}\ntwo"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["run"], "the following arguments are required"),
        ([*RUN, "--sampling", "top_p=3"], r"top_p must be in \(0, 1\]"),
        ([*RUN, "--max-errors", "-1"], "must be a number of rows, 0 or more"),
        ([*RUN, "--window", "0"], "must be 1 or more"),
        ([*RUN, "--report", "out.jsonl"], "must end in .html, not 'out.jsonl'"),
        ([*RUN, "--prompt-column", "a", "--template", "{a}"], "not allowed with argument"),
        ([*RUN, "--template", "@/none"], "No such file"),
        (
            [*RUN, "--system", "@/none"],
            "the file '/none' cannot be read: No such file or directory; @ stands before the path of a file",
        ),
        ([*RUN, "--system", "@/bin/sh"], "the file '/bin/sh' cannot be read: 'utf-8' codec can't decode"),
        (
            [*RUN, "--sampling", "{top_p: 1}"],
            r"'{top_p: 1}' is no JSON object \(Expecting .*; write name=value,... or '{\"temperature\": 0}'",
        ),
        ([*RUN, "--chat-template-kwargs", "1"], "must be a JSON object"),
        ([*RUN, "--max-num-sqs", "1"], "unrecognized arguments: --max-num-sqs 1; did you mean --max-num-s"),
        (["sing"], "there is no command 'sing'; it knows: run, check, version, doctor"),
        (["runn"], "there is no command 'runn'; did you mean 'run'"),
    ],
)
def test_wrong_arguments(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert re.search(error, capsys.readouterr().err)


def test_the_parts_need_no_torch() -> None:
    code = "import sys, nanovllm.jobs.main, nanovllm.jobs.job, nanovllm.jobs.runner; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
