"""`nanovllm run` with the demo model: a job that is killed at any moment resumes and ends with the same
bytes.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import read_rows, run, write_rows
from killed_jobs import SLOW_STEPS, WAITING_FOR_A_FILE, fork_server, run_and_kill
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams, demo_model_path
from tools.bench_jobs import LoadedLLM

CUT = 12  # tokens of most answers
SAMPLING = f"temperature=0,max_tokens={CUT}"


@pytest.fixture(scope="module")
def engine() -> Iterator[LoadedLLM]:
    """One engine for all runs."""
    with LLM(demo_model_path(), device="cpu", max_num_seqs=4) as llm:
        yield LoadedLLM(llm)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def mixed_rows(count: int) -> list[Any]:
    """Greedy rows, rows with their own parameters, with and without seeds, conversations, and bad rows."""
    rows: list[Any] = []
    for index in range(count):
        text = f"What is {index} + {index}?"
        prompt = {"messages": chat(text)} if index % 2 else {"prompt": text}
        rows.append({"id": index, **prompt})
        if index % 5 == 2:
            rows[-1]["sampling_params"] = {"temperature": 1.0, "max_tokens": 1 + index % 9}
        if index % 7 == 3:
            rows[-1]["sampling_params"] = {"temperature": 0.8, "n": 2, "seed": index}
        if index % 11 == 5:
            rows[-1] = [b"{ broken\n", {"id": "empty", "prompt": ""}][index % 2]
    return rows


CHAT = ["--chat", "--system", "Be brief.", "--prompt-column", "prompt", "--columns", "id", "--n", "2"]
KINDS: dict[str, tuple[str, bool, list[str]]] = {  # the output, whether the input is standard input, flags
    "plain": ("out.jsonl", False, []),
    "ordered": ("out.jsonl", False, ["--ordered"]),
    "stdin to csv": ("out.csv", True, []),
    "parquet": ("out.parquet", False, []),
    "gzip": ("out.jsonl.gz", False, []),
    "retry errors": ("out.jsonl", False, ["--retry-errors"]),
    "several inputs, filled in": (
        "out.jsonl.zst",
        False,
        ["--template", "Answer: {prompt}", "--columns", "all", "--limit", "22", "--seed", "3"],
    ),
    "chats of a shard": ("out.jsonl", False, [*CHAT, "--shard", "2/2"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
def test_a_job_killed_at_ten_random_moments_ends_with_the_same_bytes(tmp_path: Path, kind: str) -> None:
    """After a kill no answer is lost; after the end each row is there once, and no other file."""
    rng = random.Random(kind)
    name, is_stdin, more = KINDS[kind]
    rows, inputs = mixed_rows(24), [write_rows(tmp_path / "in.jsonl", mixed_rows(24))]
    if kind.startswith("several"):
        inputs = [write_rows(tmp_path / "a.jsonl", rows[:14]), tmp_path / "b*.gz"]
        with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
            file.write(write_rows(tmp_path / "rest", rows[14:]).read_bytes())
    sampling = SAMPLING.replace("=0", "=0.9") if "--n" in more else SAMPLING
    count = 22 if "--limit" in more else 12 if "--shard" in more else 24
    killed, whole, begin = tmp_path / "killed", tmp_path / "whole", tmp_path / "begin"

    def run_in(folder: Path, *more: str, **kill: Any) -> int | None:
        argv = [*(["-"] if is_stdin else inputs), "-o", folder / name, "--sampling", sampling, *more]
        return run_and_kill(argv, inputs[0], **kill)

    with fork_server():
        whole.mkdir()
        same_bytes = kind in ("ordered", "retry errors")  # as without these flags
        assert run_in(whole, *([] if same_bytes else more)) == 1
        expected = contents(whole / name)
        lines = whole / next(each for each in expected if each.endswith(".jsonl"))
        assert len({row["index"] for row in read_rows(lines)}) == len(read_rows(lines)) == count
        shutil.copytree(whole, begin) if more == ["--retry-errors"] else begin.mkdir()
        shutil.copytree(begin, killed)
        kills = 0
        while kills < 10:
            before = answered(killed / lines.name)
            # A job without kills changes files about 35 times, and once for each line.
            kill = [{"seconds": rng.random()}, {"change": rng.randrange(count + 35 - len(before))}][kills % 2]
            code = run_in(killed, *more, **kill)
            assert code in (-9, 1) and before <= answered(killed / lines.name)
            kills += code == -9
            if code == 1:
                assert contents(killed / name) == expected
                shutil.rmtree(killed)
                shutil.copytree(begin, killed)
        assert run_in(killed, *more) == 1 and contents(killed / name) == expected


def answered(lines: Path) -> set[int]:
    """The rows that have an answer; a last line without an end counts for nothing."""
    found = lines.read_bytes().split(b"\n")[:-1] if lines.exists() else []
    indexes = [row["index"] for row in map(json.loads, found) if row["error"] is None]
    assert len(indexes) == len(set(indexes))
    return set(indexes)


def contents(output: Path) -> dict[str, bytes]:
    """The files of a job that has ended, without its journal."""
    files = {path.name: path.read_bytes() for path in output.parent.iterdir()}
    assert json.loads(files.pop(f"{output.name}.job.json"))["state"] == "finished"
    assert files.keys() - {f"{output.name}.rows.jsonl"} == {output.name}
    return files


def peak_memory(out: Path, *argv: object) -> int:
    """Run a job as a process of its own; the most bytes that it has in memory after its first answer."""
    command = [sys.executable, "-m", "nanovllm", "run", "-o", *map(str, (out, *argv))]
    peak = 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            if out.exists() and out.stat().st_size:
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                peak = max(peak, pages * resource.getpagesize())
            time.sleep(0.02)
    assert process.returncode == 1, "some rows have errors"
    return peak


def test_100_000_rows_with_bad_ones_in_flat_memory(tmp_path: Path) -> None:
    """On a model of one tiny layer: every row once, in its place, with its own answer."""

    def rows(count: int) -> Iterator[Any]:
        for index in range(count):
            yield b'{"prompt": \n' if index % 100 == 7 else {"id": index, "prompt": f"row {index}"}

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 512}
    model = write_tiny_model(tmp_path / "model", **shape)
    params = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
    more = ["--sampling", json.dumps(params), "--model", model, "--tokenizer", demo_model_path()]
    more += ["--device", "cpu", "--num-kvcache-blocks", 600]
    peaks = []
    for count in (10_000, 100_000):
        source, out = write_rows(tmp_path / "in.jsonl", rows(count)), tmp_path / f"out{count}.jsonl"
        peaks.append(peak_memory(out, source, *more))
    some = range(0, 100_000, 1000)
    with LLM(model, tokenizer=demo_model_path(), device="cpu") as llm:
        expected = llm.generate([f"row {index}" for index in some], SamplingParams(**params), use_tqdm=False)
    with out.open("rb") as file:
        for index, line in enumerate(file):
            row = json.loads(line)
            assert row["index"] == index and (row["error"] is not None) == (index % 100 == 7)
            assert row["id"] == (None if index % 100 == 7 else index)
            assert index not in some or row["text"] == expected[index // 1000]["text"]
    assert index == 99_999
    assert peaks[1] < peaks[0] + 24 * 2**20


def start(code: str, source: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """Start the job as a process that runs `code`."""
    argv = [sys.executable, "-c", code, "run", str(source), "-o", str(out), "--sampling", SAMPLING]
    argv += ["--model", demo_model_path(), "--device", "cpu", "--max-num-seqs", "4", *more]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)


def wait_for_lines(process: subprocess.Popen[str], out: Path, count: int) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        if out.exists() and out.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    raise AssertionError(f"the job ended with code {process.poll()}, or is too slow")


def test_kill_ctrl_c_and_sigterm(tmp_path: Path, engine: LoadedLLM) -> None:
    rows = [{"id": index, "prompt": f"What is {index} + {index}?"} for index in range(240)]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert run(source, "-o", undisturbed, "--sampling", SAMPLING, make_llm=engine) == 0
    lines, slow = 0, SLOW_STEPS.format(quick=40, seconds=0.2)  # 40 steps answer a dozen rows
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with start(slow, source, out) as process:
            wait_for_lines(process, out, lines + 5)
            if number is signal.SIGKILL:
                # The output is locked.
                assert run(source, "-o", out, "--sampling", SAMPLING, make_llm=engine) == 2
            process.send_signal(number)
            _, printed = process.communicate(timeout=120)
        assert process.returncode == code, printed
        state = json.loads((tmp_path / "out.jsonl.job.json").read_text())["state"]
        assert state.startswith("running" if code == -9 else "stopped by ")
        found = out.read_bytes().count(b"\n")
        assert lines + 5 <= found < 240
        lines = found
    assert run(source, "-o", out, "--sampling", SAMPLING, make_llm=engine) == 0
    assert out.read_bytes() == undisturbed.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {
        "in.jsonl",
        *("out.jsonl", "out.jsonl.job.json", "undisturbed.jsonl", "undisturbed.jsonl.job.json"),
    }


def test_a_job_goes_on_when_a_replica_is_killed(tmp_path: Path, engine: LoadedLLM) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", mixed_rows(300)), tmp_path / "out.jsonl"
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert run(source, "-o", undisturbed, "--sampling", SAMPLING, make_llm=engine) == 1
    killed = tmp_path / "killed"
    waiting = WAITING_FOR_A_FILE.format(rows=60, path=str(killed))
    with start(waiting, source, out, "--data-parallel-size", "2") as process:
        wait_for_lines(process, out, 40)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        replicas = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(replicas) == 2
        os.kill(int(replicas[0]), signal.SIGKILL)
        killed.touch()
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    assert "was killed by SIGKILL" in printed and "it is started again" in printed
    assert out.read_bytes() == undisturbed.read_bytes()


def test_answers_are_those_of_generate(tmp_path: Path, engine: LoadedLLM) -> None:
    """Also for sampled answers: each row has the seed that a new engine gives to the prompt at its index."""
    prompts = [f"What is {index} + 3?" for index in range(30)]
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    for sampling in ({"temperature": 0}, {"temperature": 1.0}):
        out = tmp_path / f"out{sampling['temperature']}.jsonl"
        values = sampling | {"max_tokens": 8, "logprobs": 0}
        assert run(source, "-o", out, "--sampling", json.dumps(values), make_llm=engine) == 0
        with LLM(demo_model_path(), device="cpu") as llm:
            expected = llm.generate(prompts, SamplingParams(**values), use_tqdm=False)
        for row, output_ in zip(read_rows(out), expected, strict=True):
            assert row["text"] == output_["text"] and row["finish_reason"] == output_["finish_reason"]
            assert row["prompt_tokens"] == len(output_.prompt_token_ids)
            assert [each[0]["token_id"] for each in row["logprobs"][0]] == output_["token_ids"]


def test_an_openai_batch(tmp_path: Path, engine: LoadedLLM) -> None:
    def request(index: int, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": f"r{index}", "method": "POST", "url": url, "body": {"model": "m", **body}}

    rows = [
        request(0, "/v1/chat/completions", messages=chat("What is 2 + 3?"), temperature=0),
        request(1, "/v1/completions", prompt="What is 2 + 3?", max_tokens=5, temperature=0, logprobs=1),
        request(
            2, "/v1/chat/completions", messages=chat("Spell AB."), n=2, seed=1, temperature=1, max_tokens=4
        ),
        request(3, "/v1/chat/completions", messages=[]),
        request(4, "/v1/completions", prompt="a " * 2000),
        request(5, "/v1/chat/completions", messages=chat("x"), response_format={"type": "json_schema"}),
        request(6, "/v1/completions", prompt="a", stop_token_ids=[10**6]),
        request(7, "/v1/completions", prompt="What is 2 + 3?", max_tokens=5, temperature=0, logprobs=1),
        request(8, "/v1/embeddings", input="What is 2 + 3?"),
        request(9, "/v1/embeddings", input=["a b", [5, 6, 7]]),
        request(10, "/v1/embeddings", input=["a", "a " * 2000]),
        request(11, "/v1/completions", prompt="Spell AB.", max_tokens=1),
    ]
    source, out = write_rows(tmp_path / "batch.jsonl", rows), tmp_path / "answers.jsonl"
    assert run(source, "-o", out, make_llm=engine) == 1
    found = read_rows(out)
    assert [row["custom_id"] for row in found] == [f"r{index}" for index in range(12)]
    first, second, third = (row["response"]["body"]["choices"] for row in found[:3])
    greedy = SamplingParams(temperature=0, max_tokens=None)
    [expected] = engine.chat(chat("What is 2 + 3?"), greedy, use_tqdm=False)
    assert first[0]["message"]["content"] == expected["text"] and first[0]["finish_reason"] == "stop"
    assert len(second[0]["logprobs"]["tokens"]) == 5
    assert [choice["index"] for choice in third] == [0, 1]
    errors = [
        "must be a list of messages",
        "the prompt: the prompt has",
        "response_format must have",
        "stop_token_ids: token id",
    ]
    for line, row, error in zip(range(4, 8), found[3:7], errors, strict=True):
        assert row["response"] is None and error in row["error"]["message"]
        assert row["error"]["message"].startswith(f"batch.jsonl: line {line}: ")
    assert found[7]["response"]["body"]["choices"][0]["text"] == second[0]["text"]
    embeddings = engine.embed(["What is 2 + 3?", "a b", [5, 6, 7]], use_tqdm=False)
    for row, several in ((found[8], embeddings[:1]), (found[9], embeddings[1:])):
        data = row["response"]["body"]["data"]
        assert [each["index"] for each in data] == list(range(len(several)))
        for each, expected in zip(data, several, strict=True):
            assert each["embedding"] == pytest.approx(expected.outputs.embedding, abs=1e-4)
    assert found[10]["error"]["message"].startswith("batch.jsonl: line 11: the input: the prompt has")
    assert found[11]["response"]["body"]["usage"]["completion_tokens"] == 1


def test_what_is_wrong_with_a_conversation_names_no_other_row(tmp_path: Path, engine: LoadedLLM) -> None:
    bad = b'{"id": 1e400, "messages": [{"role": "\\ud800", "content": "a"}]}\n'
    source = write_rows(tmp_path / "in.jsonl", [{"messages": chat("Hi")}, bad])
    assert run(source, "-o", tmp_path / "out.jsonl", "--sampling", SAMPLING, make_llm=engine) == 1
    row = read_rows(tmp_path / "out.jsonl")[1]
    assert row["error"].startswith("in.jsonl: line 2: the conversation has a lone surrogate")
    assert row["id"] is None


def test_a_report_has_charts_and_the_rows_without_answers(tmp_path: Path, engine: LoadedLLM) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "What is 1 + 2?"}, *[b"{ broken\n"] * 205])
    page = tmp_path / "report.html"
    asked = [tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--sampling", SAMPLING, "--report", page]
    assert run(*asked, make_llm=engine) == 1
    text = page.read_text()
    assert "<svg" in text and "it is not JSON" in text and "Error rows" in text
    assert "<b>205</b><span>errors</span>" in text and "And 5 more." in text
    page.unlink()
    assert run(*asked, make_llm=engine) == 1, "nothing is left to run"
    assert not page.exists()
    assert run(*asked[:-1], tmp_path / "no folder" / "report.html", make_llm=engine) == 2
