"""The answers in a report: samples, finish reasons, histograms; all that others wrote is text."""

from __future__ import annotations

import random
import re
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest
from checked_llm import CheckedLLM
from report_pages import SVG, parse, pictures, preempted_llm, rows, ticks, words

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.report import Answers, Sample, make_report, write_report
from nanovllm.report.answers import bin_edges, histogram

SCRIPT = "<script>document.title = 'x'</script><img src=x onerror=\"alert(1)\">&]]>\ud800\x00"


@pytest.fixture(scope="module")
def llm(model: Path) -> CheckedLLM:
    return preempted_llm(model)


def sample(index: int, tokens: int = 5, error: str | None = None, text: str = "a") -> Sample:
    return Sample(index, f"r{index}", {"prompt": text}, text, ("stop",), 2 * tokens, tokens, error)


def cards(page: Element) -> list[str]:
    return [words(each) for each in page.iter("div") if each.get("class") == "sample"]


def test_whatever_others_write_is_text(llm: CheckedLLM, tmp_path: Path) -> None:
    """In prompts, answers, errors, ids, finish reasons, names of columns, files and parameters."""
    answers = Answers()
    for index, error in enumerate((None, SCRIPT)):
        answers.add(Sample(index, SCRIPT, {SCRIPT: SCRIPT}, SCRIPT, (SCRIPT,), 3, 4, error))
        answers.add(Sample(index + 2, {SCRIPT: 1}, SCRIPT, SCRIPT, (SCRIPT,), 3, 4, error))
    facts, parameters = {SCRIPT: SCRIPT}, {SCRIPT: SCRIPT}
    more = {"facts": facts, "parameters": parameters, "errors": [(SCRIPT, SCRIPT)]}
    write_report(tmp_path / "report.html", llm, title=SCRIPT, answers=answers, **more)  # type: ignore[arg-type]
    text = (tmp_path / "report.html").read_text()
    page = parse(text)
    assert not {each.tag for each in page.iter()} & {"script", "img"} and "<script" not in text
    assert text.count("&lt;script&gt;document.title") >= 15
    assert all(set(each.attrib) <= {"class"} for each in page.iter("pre"))


def test_samples_do_not_depend_on_the_order_of_the_answers() -> None:
    """First, longest, shortest and errors; of equals the first, and no row twice."""
    rng = random.Random(0)
    all_of_them = [sample(index, rng.choice([1, 5, 5, 9]), text=f"a{index}") for index in range(200)]
    all_of_them += [sample(200 + index, error="why") for index in range(9)]
    found = []
    for _ in range(5):
        rng.shuffle(all_of_them)
        answers = Answers()
        for each in all_of_them:
            answers.add(each)
        found.append({kind: [each.index for each in kept] for kind, kept in answers.samples.items()})
    assert all(each == found[0] for each in found)
    lengths = {each.index: each.tokens for each in all_of_them if each.error is None}
    assert found[0]["First answers"] == [0, 1, 2] and found[0]["First errors"] == [200, 201, 202]
    for kind, tokens in (("Longest answers", 9), ("Shortest answers", 1)):
        others = [index for index in sorted(lengths) if lengths[index] == tokens and index > 2]
        assert found[0][kind] == others[:2]


def test_few_different_answers_have_bars_and_a_sample_each(llm: CheckedLLM) -> None:
    """In place of a histogram of their lengths; no row is shown twice."""
    answers = Answers()
    for index in range(40):
        answers.add(sample(index, text="yes" if index < 30 else "no" if index < 37 else "may be"))
    assert answers.texts == {"yes": 30, "no": 7, "may be": 3}
    page = parse(make_report(llm, answers=answers))
    assert words(page.findall(".//table[@class='bars']")[1]) == "yes 30 (75.0%)no 7 (17.5%)may be 3 (7.5%)"
    assert "Answer lengths" not in pictures(page) and "Prompt lengths" in pictures(page)
    names = [card.split(" ")[1].rstrip(",") for card in cards(page)]
    assert names == ["0", "1", "2", "30", "37"]


def test_bars_end_where_answers_are_many_or_long(llm: CheckedLLM) -> None:
    for texts, shown in (
        ([str(number) for number in range(30)] * 2, 30),
        ([str(number) for number in range(31)] * 2, 0),
        (["a"] * 9 + ["b" * 201], 0),
        (["a", "a", "b"], 0),  # less than twice on average
    ):
        answers = Answers()
        for index, text in enumerate(texts):
            answers.add(sample(index, tokens=1 + index % 2, text=text))
        assert len(answers.texts) == shown
        assert ("Answer lengths" in pictures(parse(make_report(llm, answers=answers)))) == (not shown)


def test_columns_are_shown_as_they_are(llm: CheckedLLM) -> None:
    """A line each, without the escapes of JSON."""
    answers = Answers()
    answers.add(Sample(0, None, {"body": 'He said "ä"\nand left', "stars": 3}, "x", ("stop",), 3, 4))
    [shown] = [
        each for each in parse(make_report(llm, answers=answers)).iter("pre") if each.get("class") == "prompt"
    ]
    assert shown.text == 'body: He said "ä"\nand left\nstars: 3'


def test_the_page_has_samples_reasons_and_histograms(llm: CheckedLLM) -> None:
    outputs = [
        RequestOutput("0", "Hi", [1] * 4, None, [CompletionOutput(0, "Hello", [1, 2], finish_reason="stop")]),
        RequestOutput(
            "1", "Ho", [1] * 9, None, [CompletionOutput(0, "x" * 9999, [1] * 99, finish_reason="length")]
        ),
        RequestOutput("2", "", [], None, [], error="prompts[2] is empty"),
    ]
    page = parse(make_report(llm, answers=Answers.of(outputs), parameters={"temperature": 0.5}))
    found = cards(page)
    assert (
        found[0] == "Row 0 4 tokens in, 2 out, stopHiHello"
        and "error" in found[-1]
        and "is empty" in found[-1]
    )
    assert "…" in found[1] and max(map(len, found)) < 2200
    reasons = words(page.findall(".//table[@class='bars']")[1])
    assert reasons == "stop 1 (33.3%)length 1 (33.3%)error 1 (33.3%)"
    assert rows(page, "parameters") == {"temperature": "0.5"}
    assert {"Prompt lengths", "Answer lengths"} <= set(pictures(page))
    assert cards(parse(make_report(llm))) == [], "without answers the page is as before"


def test_tokens_by_source(llm: CheckedLLM) -> None:
    stats = llm.stats()
    [table, *_] = parse(make_report(llm)).findall(".//table[@class='bars']")
    counts = [int(re.sub(r" \(.*|,", "", words(row[1]))) for row in table.iter("tr")]
    assert counts == [stats.num_computed_tokens, stats.num_cached_tokens, stats.num_output_tokens]


@pytest.mark.parametrize("spread", [1, 50, 10**5])
def test_histograms_count_every_length(spread: int) -> None:
    rng = random.Random(spread)
    for _ in range(200):
        least = rng.choice([0, 1, 7, 500])
        lengths = {least + int(rng.random() ** 3 * spread): rng.randrange(1, 9) for _ in range(30)}
        edges = bin_edges(lengths)
        assert edges[0] <= min(lengths) and max(lengths) < edges[-1] and edges == sorted(set(edges))
        assert 2 <= len(edges) <= 23
        svg = parse(histogram("Lengths", "answers", lengths))
        bars = [each for each in svg.iter(f"{SVG}rect") if each.get("class") == "bar"]
        (low, at), (high, top) = ticks(svg, "ytick")[0], ticks(svg, "ytick")[-1]
        scale = (high - low) / (at - top)
        assert sum(float(each.attrib["height"]) for each in bars) * scale == pytest.approx(
            sum(lengths.values()), rel=0.1
        )


def test_no_answers_are_a_page_too(llm: CheckedLLM) -> None:
    page = parse(make_report(llm, answers=Answers()))
    assert cards(page) == [] and "Prompt lengths" in pictures(page)
