"""The sampling parameters of a job's rows: which place gives them, and how to get one answer again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import llguidance
import pytest
from jobs import FakeLLM, read_rows, run, write_rows

from nanovllm import LLM, SamplingParams, demo_model_path
from tools.bench_jobs import LoadedLLM

DOCS = Path(__file__).parents[3] / "docs/jobs.md"
# The places of the table in docs/jobs.md, in its order, each with the max_tokens that the tests have it give.
PLACES: dict[str, int | None] = {"row": 5, "command line": 6, "format": None, "model": 8, "class": 64}


class Noting(FakeLLM):
    """Notes the parameters of its prompts. recommended: from generation_config.json."""

    def __init__(self, **recommended: Any) -> None:
        super().__init__()
        self.recommended = recommended
        self.params: list[SamplingParams] = []

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.recommended)

    def answer(self, index: int, prompt: dict[str, Any], params: SamplingParams) -> Any:
        self.params.append(params)
        return super().answer(index, prompt, params)


def params_of(folder: Path, row: dict[str, Any], *argv: str, **recommended: Any) -> SamplingParams:
    """The parameters of a job's only row."""
    llm = Noting(**recommended)
    source = write_rows(folder / "in.jsonl", [row])
    assert run(source, "-o", folder / "out.jsonl", *argv, make_llm=lambda *args, **options: llm) == 0
    [params] = llm.params
    return params


def test_the_table_has_these_places() -> None:
    rows = re.findall(r"^\| (\d) \| ([^|]*) \|", DOCS.read_text(), re.M)
    names = ["the row", "the command line", "the file format", "the model", "`SamplingParams`"]
    assert rows[:5] == [(str(number), name) for number, name in enumerate(names, 1)]


@pytest.mark.parametrize("kind", ["plain", "/v1/completions", "/v1/completions, max_completion_tokens"])
@pytest.mark.parametrize("given", combinations([*PLACES], 2), ids=" over ".join)
def test_the_first_place_gives_the_limit(tmp_path: Path, kind: str, given: tuple[str, str]) -> None:
    """Of every two places; that of the format and the class are always there."""
    is_batch = kind != "plain"
    name = "max_completion_tokens" if "completion_tokens" in kind else "max_tokens"
    own = {name: PLACES["row"] if "row" in given else None}
    row: dict[str, Any] = {"prompt": "a", "sampling_params": own}
    if is_batch:
        row = {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "a"} | own}
    argv = ["--sampling", f"max_tokens={PLACES['command line']}"] if "command line" in given else []
    recommended = {"max_tokens": PLACES["model"]} if "model" in given else {}
    there = {*given, "class"} - {"format"} | ({"format"} if is_batch else set())
    first = next(place for place in PLACES if place in there)
    assert params_of(tmp_path, row, *argv, **recommended).max_tokens == PLACES[first]


def test_each_parameter_comes_from_its_own_place(tmp_path: Path) -> None:
    body = {"prompt": "a", "temperature": 0.5, "top_p": None}
    row = {"custom_id": "r", "url": "/v1/completions", "body": body}
    params = params_of(tmp_path, row, "--sampling", "top_p=0.6,temperature=0.7", top_k=8, top_p=0.9)
    found = (params.temperature, params.top_p, params.top_k, params.max_tokens, params.min_p)
    assert found == (0.5, 0.6, 8, None, 0.0)


@pytest.mark.parametrize(
    ("argv", "body", "of_model", "expected"),
    [
        ([], {}, 0.0, 1.0),
        ([], {"temperature": 0.3}, 0.0, 0.3),
        (["--sampling", "temperature=0.7"], {}, 0.0, 0.7),
        (["--sampling", "top_p=0.5"], {}, 0.0, 1.0),
        ([], {"n": 1}, 0.0, 0.0),
        ([], {}, 0.6, 0.6),
    ],
)
def test_several_answers_of_a_model_that_is_greedy(
    tmp_path: Path, argv: list[str], body: dict[str, Any], of_model: float, expected: float
) -> None:
    """OpenAI's rows then have OpenAI's temperature, unless the row or the command line gives one."""
    row = {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "a", "n": 2, **body}}
    assert params_of(tmp_path, row, *argv, temperature=of_model).temperature == expected


def test_several_greedy_answers_are_an_error_row(tmp_path: Path, engine: LoadedLLM) -> None:
    batch = {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "Spell AB.", "n": 2}}
    zero = batch | {"body": {**batch["body"], "temperature": 0}}  # type: ignore[dict-item]
    plain = {"prompt": "Spell AB.", "sampling_params": {"n": 2}}
    for rows, argv in (([batch, zero], []), ([batch], ["--sampling", "temperature=0"]), ([plain], [])):
        source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / f"{len(argv)}{len(rows[0])}.jsonl"
        assert run(source, "-o", out, *argv, make_llm=engine) == 1
        found = read_rows(out)
        if len(rows) == 2:
            choices = found[0]["response"]["body"]["choices"]
            assert found[0]["error"] is None and [each["index"] for each in choices] == [0, 1]
        assert "n must be 1 with temperature=0, not 2" in str(found[-1]["error"])
        assert "set a temperature above 0" in str(found[-1]["error"])


def test_a_limit_of_the_command_line_ends_the_rows_of_a_batch(tmp_path: Path, engine: LoadedLLM) -> None:
    bodies: list[dict[str, Any]] = [{}, {"max_tokens": 2}, {"max_tokens": None}]
    rows = [
        {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "What is 2 + 3?", **body}}
        for body in bodies
    ]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    sampling = "max_tokens=3,ignore_eos=true,temperature=0"
    assert run(source, "-o", out, "--sampling", sampling, make_llm=engine) == 0
    usages = [row["response"]["body"]["usage"]["completion_tokens"] for row in read_rows(out)]
    assert usages == [3, 2, 3]


# -- seeds -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[LoadedLLM]:
    with LLM(demo_model_path(), device="cpu", max_num_seqs=4) as llm:
        yield LoadedLLM(llm)


def test_one_rows_answer_again(tmp_path: Path, engine: LoadedLLM) -> None:
    """As docs/jobs.md shows it; the engine has answered other prompts before."""
    rows = [{"prompt": f"What is {index} + 3?"} for index in range(18)]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--sampling", "temperature=1.0,max_tokens=32", make_llm=engine) == 0
    found = read_rows(out)[17]
    [code] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    head, call = code.split('LLM("path/to/Qwen3-0.6B")')
    names: dict[str, Any] = {"engine": engine}
    exec(f"{head}engine{call}", names)
    assert names["output"]["text"] == found["text"]


def test_a_seed_of_the_command_line_is_that_of_every_row(tmp_path: Path, engine: LoadedLLM) -> None:
    """As with LLM.generate; a row's own seed, or -1 for none, comes first."""
    prompts = ["What is 1 + 3?", "What is 2 + 3?", "What is 1 + 3?"]
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    rows += [{"prompt": prompts[0], "sampling_params": {"seed": seed}} for seed in (6, -1, None)]
    values = {"temperature": 1.0, "max_tokens": 12, "seed": 5}
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--sampling", json.dumps(values), make_llm=engine) == 0
    texts = [row["text"] for row in read_rows(out)]
    expected = engine.generate(prompts, SamplingParams(**values), use_tqdm=False)
    assert texts[:3] == [output["text"] for output in expected]
    own = engine.generate(prompts[0], SamplingParams(**values | {"seed": 6}), use_tqdm=False)[0]["text"]
    assert texts[3] == own and texts[5] == texts[0] == texts[2]
    with LLM(demo_model_path(), device="cpu") as llm:
        free = llm.generate([prompts[0]] * 6, SamplingParams(temperature=1.0, max_tokens=12), use_tqdm=False)
    assert texts[4] == free[4]["text"]


# -- constraints -------------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As that of llguidance's binding, which is no Exception."""


class Panicking:
    """llguidance's matcher, which panics for one grammar."""

    real = llguidance.LLMatcher
    grammar_from_json_schema = real.grammar_from_json_schema

    def __new__(cls, tokens: Any, grammar: str, **options: Any) -> Any:
        if "panic" in grammar:
            raise PanicException("index out of bounds")
        return cls.real(tokens, grammar, **options)


STRUCTURE = {"begin": "[f", "schema": {}, "end": ""}
TOO_DEEP = "json (is nested too deeply|has 101 levels)"  # the limit of Python's parser, or ours
REFUSED: list[tuple[dict[str, Any], str]] = [  # what a row asks for, and its error
    ({"structured_outputs": {"choice": ["a"] * 10_001}}, "choice has 10,001 strings, and may have 10,000"),
    ({"structured_outputs": {"regex": "a" * (2**20 + 1)}}, "regex has 1,048,577 characters"),
    (
        {"structured_outputs": {"json": '{"a":' * 200 + "1" + "}" * 200}},
        "json has 101 levels, and may have 100",
    ),
    ({"structured_outputs": {"json": '{"a":' * 3000 + "1" + "}" * 3000}}, TOO_DEEP),
    ({"structured_outputs": {"grammar": "start: " + "(" * 101}}, "grammar has 101 nested brackets"),
    (
        {"structured_outputs": {"structural_tag": {"structures": [STRUCTURE] * 3000, "triggers": ["[f"]}}},
        "structural_tag has 3,000 structures x triggers, and may have 1,000",
    ),
    ({"structured_outputs": {"regex": "(a"}}, "regex: "),
    ({"structured_outputs": {"json": {"type": "x"}}}, "json: "),
    (
        {"structured_outputs": {"grammar": 'start: "a" /[^\\s\\S]/'}},
        r"grammar: 'start: .* cannot be followed after 'a': no token may follow",
    ),
    (
        {"structured_outputs": {"regex": "panic+"}},
        r"regex: llguidance cannot compile it \(index out of bounds",
    ),
    ({"stop": ["a"] * 1001}, "stop has 1,001 strings, and may have 1,000"),
    ({"bad_words": ["a"] * 5001}, "bad_words has 5,001 strings, and may have 5,000"),
]


def test_rows_with_constraints_beyond_their_limits(
    tmp_path: Path, engine: LoadedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an error row that says why, also if llguidance panics; the rows between are answered."""
    monkeypatch.setattr(llguidance, "LLMatcher", Panicking)
    good = {"prompt": "a", "sampling_params": {"structured_outputs": {"choice": ["yes"]}}}
    rows = [row for params, _ in REFUSED for row in (good, {"prompt": "a", "sampling_params": params})]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(source, "-o", out, make_llm=engine) == 1
    found = sorted(read_rows(out), key=lambda row: row["index"])
    assert [row["text"] for row in found[::2]] == ["yes"] * len(REFUSED)
    for row, (_, error) in zip(found[1::2], REFUSED, strict=True):
        assert re.search(f"in.jsonl.* line {row['index'] + 1}.*{error}", row["error"]), row["error"]


# -- resuming ----------------------------------------------------------------------------------------------


def test_a_default_that_is_given_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an option of LLM, of a sampling parameter, and of the other arguments; given first or later."""
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    given = ["--seed", 0, "--no-deterministic", "--max-model-len", -1, "--tokenizer", demo_model_path()]
    given += ["--hf-overrides", "{}", "--generation-config", "auto", "--sampling", "max_tokens=64,top_p=1"]
    given += ["--chat-template-kwargs", "{}", "--format", "jsonl"]
    assert run(source, "-o", out) == 0
    assert run(source, "-o", out, *given) == 0
    assert run(source, "-o", out, "--dtype", "half") == 2
    assert 'its options.dtype is "auto", not "float16"' in capsys.readouterr().out
    out.unlink()
    assert run(source, "-o", out, *given, "--dtype", "half") == 0
    assert run(source, "-o", out, "--dtype", "float16") == 0
    for more in (["--seed", 1], ["--sampling", "max_tokens=63"], ["--sampling", "seed=0"]):
        assert run(source, "-o", out, "--dtype", "float16", *more) == 2
    printed = capsys.readouterr().out
    assert "its options.seed is 0, not 1" in printed and "its sampling.max_tokens is 64, not 63" in printed
    assert "its sampling.seed is null, not 0" in printed


@pytest.mark.full
def test_a_resume_with_another_longest_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would cut answers, and refuse rows that fit before; or the other way round."""
    asks = {"max_tokens": None, "ignore_eos": True}
    rows = [{"prompt": "Count down from 20. " * (1 + 2 * (i % 3)), "sampling_params": asks} for i in range(6)]
    source, out, whole = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "b.jsonl", tmp_path / "a.jsonl"

    def job(path: Path, *argv: object) -> int:
        fixed = ("--sampling", "temperature=0", "--max-model-len", 64, "--kvcache-block-size", 16, *argv)
        return run(source, "-o", path, *fixed, make_llm=partial(LLM, device="cpu"))

    assert job(whole, "--num-kvcache-blocks", 24) == 0
    assert job(out, "--limit", 2) == 0
    before = out.read_bytes()
    assert job(out, "--num-kvcache-blocks", 3) == 2 and out.read_bytes() == before
    printed = capsys.readouterr().out
    assert "its answers had room for max_model_len=64 tokens" in printed
    assert (
        "here the KV cache has room for 48" in printed
        and "options of the first run: kvcache_block" in printed
    )
    assert job(out, "--num-kvcache-blocks", 4) == 0 and out.read_bytes() == whole.read_bytes()
    short = tmp_path / "short.jsonl"
    assert job(short, "--limit", 2, "--num-kvcache-blocks", 3) == 0
    assert job(short, "--num-kvcache-blocks", 24) == 2
    assert "max_model_len=48 tokens, prompt and answer together, and here" in capsys.readouterr().out
