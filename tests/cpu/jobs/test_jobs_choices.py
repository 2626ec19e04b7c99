"""`--choice`: labels and their scores, as a user runs them, against the scores of `LLM.score`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Lent, no_model, read_rows, run, write_rows
from report_pages import parse, pictures, words

from nanovllm import LLM, demo_model_path
from nanovllm.jobs.choices import Choices, log_of_sum, parse_choices, shares
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.progress import JobProgress
from nanovllm.text.prompts import Prompt

NUMBERS = [17, 20, 35, 42, 56, 63]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), dtype="float32") as llm:
        yield llm


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [{"id": f"r{each}", "number": each} for each in NUMBERS]
    return write_rows(tmp_path / "rows.jsonl", rows)


ASKED = ("--chat", "--template", "Is {number} even or odd?")


def test_labels_are_right_and_scores_add_up_to_one(tmp_path: Path, questions: Path, llm: LLM) -> None:
    out = tmp_path / "out.jsonl"
    assert run(questions, "-o", out, *ASKED, "--choice", "odd,even", make_llm=Lent(llm)) == 0
    rows = read_rows(out)
    assert [row["text"] for row in rows] == ["odd" if each % 2 else "even" for each in NUMBERS]
    for row in rows:
        assert list(row["choice_scores"]) == ["odd", "even"] and row["number"] in NUMBERS
        assert sum(row["choice_scores"].values()) == pytest.approx(1, abs=1e-5)
        assert row["choice_scores"][row["text"]] > 0.9
        parts = shares(list(row["choice_logprobs"].values()))
        assert list(row["choice_scores"].values()) == pytest.approx(parts, abs=1e-5)
        assert (row["finish_reason"], row["error"]) == ("stop", None)
        assert row["prompt_tokens"] > row["completion_tokens"] > 0


def score_of(llm: LLM, prompt: str, choice: str) -> float:
    [output] = llm.score(prompt, [choice], use_tqdm=False)
    return sum(output.logprobs)


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        ("Is 17 even or odd?", [" odd", " even"]),  # one token each
        ("What is 17 + 3?", ["\n20", "\n21", "\n17 + 3", " no"]),  # three share their first tokens
        ("Write 20 in words.", [f"\n{number}" for number in range(10, 99)]),
    ],
)
def test_a_score_is_that_of_all_tokens(llm: LLM, prompt: str, choices: list[str]) -> None:
    """Also where choices share their first token; and each token that they share is asked for once."""
    [plan] = planned(llm, choices, [Prompt(prompt, None)])
    assert scores_of(llm, choices, plan) == pytest.approx(
        [score_of(llm, prompt, each) for each in choices], abs=2e-4
    )
    asked = [tuple(each.token_ids) for each in plan.queries]
    assert len(asked) == len(set(asked))


def planned(llm: LLM, texts: list[str], prompts: list[Prompt], ends: Any = (0,)) -> list[Any]:
    assert llm.tokenizer is not None
    return Choices(texts, llm.tokenizer, lambda: ends).plans(prompts)


def scores_of(llm: LLM, texts: list[str], plan: Any) -> list[float]:
    assert llm.tokenizer is not None
    choices = Choices(texts, llm.tokenizer, lambda: [])
    outputs = [
        llm.generate([{"prompt_token_ids": each.token_ids}], choices.params(each), use_tqdm=False)[0]
        for each in plan.queries
    ]
    scores: list[float] = plan.logprobs(outputs)
    return scores


def test_more_first_tokens_than_one_request_has_logprobs_of(llm: LLM) -> None:
    """They are asked for in two parts."""
    assert llm.tokenizer is not None
    tokens = [llm.tokenizer.decode([each]) for each in range(3, 400)]
    choices = [each for each in dict.fromkeys(tokens) if each.isalnum() and each.isascii()][:200]
    assert len(choices) > 140
    [plan] = planned(llm, choices, [Prompt("A\n", None)])
    roots = [each for each in plan.queries if each.token_ids == plan.queries[0].token_ids]
    assert [len(each.asked) for each in roots[:2]] == [128, len({t for e in roots for t in e.asked}) - 128]


def test_a_choice_that_begins_another_one_counts_its_end(llm: LLM) -> None:
    """Else "2" could never lose against "20". The end is any token that ends an answer."""
    prompt, choices, ends = "What is 17 + 3?\n", ["2", "20"], (0, 2)
    [plan] = planned(llm, choices, [Prompt(prompt, None)], ends)
    found = scores_of(llm, choices, plan)
    for choice, score in zip(choices, found, strict=True):
        whole = llm.get_tokenizer().encode(prompt + choice)
        each = [llm.score(whole, [[end]], use_tqdm=False)[0].logprobs[0] for end in ends]
        assert score == pytest.approx(score_of(llm, prompt, choice) + log_of_sum(each), abs=2e-4)
    [without] = planned(llm, ["2", "30"], [Prompt(prompt, None)], ends)
    assert [len(steps) for steps in without.steps] == [1, 2]
    [error] = planned(llm, choices, [Prompt(prompt, None)], ())
    assert "the tokens of one choice begin another one" in str(error)


def test_a_token_may_span_the_prompt_and_a_choice(llm: LLM) -> None:
    """Then all choices are scored from there on: a token that only some of them lose would not be fair."""
    prompt = "Is 17 even or odd? "
    before = llm.get_tokenizer().encode(prompt)
    spanned = [llm.get_tokenizer().encode(prompt + each)[: len(before)] != before for each in ("odd", "1")]
    assert spanned == [True, False]
    choices = ["odd", "1"]
    [plan] = planned(llm, choices, [Prompt(prompt, None)])
    found = scores_of(llm, choices, plan)
    shorter = prompt.rstrip(" ")
    expected = [score_of(llm, shorter, f" {each}") for each in choices]
    assert found == pytest.approx(expected, abs=2e-4)
    assert {each.token_ids[: len(before) - 1] == before[:-1] for each in plan.queries} == {True}


def test_the_end_of_a_prompt_is_tokenised_once_and_as_within_it(llm: LLM) -> None:
    texts = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in ("a", "b c")]
    assert llm.tokenizer is not None
    special = llm.tokenizer.all_special_tokens
    assert any(each in texts[0] for each in special), special
    plans = planned(llm, ["odd", "even 2"], [Prompt(each, None, add_special_tokens=False) for each in texts])
    for text, plan in zip(texts, plans, strict=True):
        for choice, steps in zip(("odd", "even 2"), plan.steps, strict=True):
            whole = llm.tokenizer.encode(text + choice, add_special_tokens=False)
            first = len(plan.queries[steps[0][0][0]].token_ids)
            assert [token for [(_, token)] in steps] == whole[first:]


def test_a_prompt_that_opens_the_thinking_is_refused(llm: LLM) -> None:
    prompts = [Prompt("<|im_start|>assistant\n<think>\n", None, add_special_tokens=False)] * 2
    for error in planned(llm, ["a", "b"], prompts):
        assert "the model would think first" in str(error) and "enable_thinking" in str(error)
    [plan] = planned(llm, ["a", "b"], [Prompt("<|im_start|>assistant\n<think>\n\n</think>\n\n", None)])
    assert not isinstance(plan, Exception)


def test_bad_rows_are_error_rows(tmp_path: Path, llm: LLM) -> None:
    rows: list[Any] = [
        {"prompt": "Is 3 even or odd?"},
        {"prompt": ""},
        {"prompt": "a", "sampling_params": {"seed": 1}},
        {"prompt": [5] * 5000},
        {"prompt": [57, 321]},
        b"{",
    ]
    out = tmp_path / "out.jsonl"
    code = run(write_rows(tmp_path / "rows.jsonl", rows), "-o", out, "--choice", "a,b", make_llm=Lent(llm))
    good, *bad, of_ids, broken = read_rows(out)
    assert code == 1 and good["text"] in "ab" and of_ids["text"] in "ab"
    empty, own, long = (row["error"] for row in bad)
    assert "is empty" in empty and "with --choice nothing is drawn" in own and "5000 tokens" in long
    assert broken["finish_reason"] == "error"


def test_what_cannot_be_chosen_from_is_refused(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, why in [
        ("yes", "there are 2 to 1,000 choices, not 1"),
        ("yes,", "choice 2 is '', which says nothing; leave it out"),
        ("yes, ,no", "choice 2 is ' ', which says nothing"),
        ("yes,no,yes", "the choice 'yes' comes twice; name it once"),
        ('["a", 3]', "a JSON list of strings"),
        ('["a"', "is no JSON list of choices"),
    ]:
        with pytest.raises(ValueError, match=why):
            parse_choices(given)
        with pytest.raises(SystemExit):
            parse_args(["run", "a.jsonl", "-o", "b.jsonl", "--model", "m", "--choice", given])
        assert why in capsys.readouterr().err
    assert parse_choices('["a, b", " c"]') == ["a, b", " c"] and parse_choices("a, b") == ["a", " b"]
    out = tmp_path / "out.jsonl"
    for more, why in [
        (("--sampling", "temperature=1"), "sets how tokens are drawn"),
        (("--n", "2"), "sets how tokens are drawn"),
        (("--reasoning-parser", "think"), "--reasoning-parser parts answers"),
        (("--skip-tokenizer-init",), "--choice needs a tokenizer"),
        (("--logprobs-mode", "raw_logits"), "--choice needs --logprobs-mode raw_logprobs"),
    ]:
        assert run(questions, "-o", out, *ASKED, "--choice", "a,b", *more, make_llm=no_model) == 2
        assert why in capsys.readouterr().out and not out.exists()
    batch = [{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}]
    source = write_rows(tmp_path / "batch.jsonl", batch)
    assert run(source, "-o", out, "--choice", "a,b", make_llm=no_model) == 2
    assert "which has no --choice" in capsys.readouterr().out


def test_a_resumed_job_has_the_same_bytes_and_no_other_choices(
    tmp_path: Path, questions: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    command = (questions, "-o", out, *ASKED, "--choice")
    assert run(*command, "odd,even", make_llm=Lent(llm)) == 0
    whole = out.read_bytes()
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert run(*command, "odd,even,other", make_llm=no_model) == 2
    assert "choice" in capsys.readouterr().out
    assert run(*command, "odd,even", make_llm=Lent(llm)) == 0
    assert out.read_bytes() == whole


def test_a_table_has_scores_as_json(tmp_path: Path, questions: Path, llm: LLM) -> None:
    out = tmp_path / "out.csv"
    assert run(questions, "-o", out, *ASKED, "--choice", "odd,even", make_llm=Lent(llm)) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows[:2]] == ["odd", "even"]
    assert set(json.loads(rows[0]["choice_scores"])) == {"odd", "even"}


def test_choices_that_the_model_would_not_write_are_noted(
    tmp_path: Path, questions: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    for choices, noted in (("odd,even", False), ("Yes sir,Oh no", True)):
        out = tmp_path / f"{noted}.jsonl"
        assert run(questions, "-o", out, *ASKED, "--choice", choices, make_llm=Lent(llm)) == 0
        assert ("of the probability on average" in capsys.readouterr().err) == noted


def test_sums_of_probabilities() -> None:
    assert log_of_sum([math.log(0.25), math.log(0.5)]) == pytest.approx(math.log(0.75))
    assert log_of_sum([-math.inf, -math.inf]) == -math.inf and shares([-math.inf, -2.0]) == [0.0, 1.0]
    assert shares([-2000.0, -2000.0]) == pytest.approx([0.5, 0.5])
    with pytest.raises(ValueError, match="probability 0"):
        shares([-math.inf, -math.inf])


def test_the_report_shows_what_the_model_read_and_how_often_each_choice_came(
    tmp_path: Path, questions: Path, llm: LLM
) -> None:
    """The template is applied, and nothing is escaped. Choices have no lengths."""
    page = tmp_path / "report.html"
    command = (questions, "-o", tmp_path / "out.jsonl", *ASKED, "--choice", "odd,even", "--report", page)
    assert run(*command, make_llm=Lent(llm)) == 0
    found = parse(page.read_text())
    bars = [words(each) for each in found.findall(".//table[@class='bars']")]
    assert "even 3 (50.0%)odd 3 (50.0%)" in bars and "Answer lengths" not in pictures(found)
    prompts = [each.text for each in found.iter("pre") if each.get("class") == "prompt"]
    expected = [
        llm.get_tokenizer().apply_chat_template(
            [{"role": "user", "content": f"Is {number} even or odd?"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for number in NUMBERS[:3]
    ]
    assert prompts == expected, "the first rows, and none twice"


@pytest.mark.parametrize("more", [("--choice", "odd,even"), ("--sampling", "max_tokens=1,temperature=0")])
def test_the_first_prompts_are_counted_with_their_template(
    tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, more: tuple[str, str]
) -> None:
    """Before any row has ended, so the time left follows from the first step on."""
    source = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"Is {each} even or odd?"} for each in range(16)]
    )
    seen: list[tuple[int, float, int]] = []
    monkeypatch.setattr(
        JobProgress, "counted", lambda self, size, tokens: seen.append((self.finished, size, tokens))
    )
    out = tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--chat", "--window", "16", *more, make_llm=Lent(llm)) == 0
    rows = read_rows(out)
    characters = sum(len(row["input_prompt"] if "input_prompt" in row else row["prompt"]) for row in rows)
    assert seen == [(0, characters / 4, sum(row["prompt_tokens"] for row in rows))]
