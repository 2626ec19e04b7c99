"""JSON schemas that people use: each is enforced, refused by name, or enforced with a word of warning."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, SecretStr
from transformers import AutoTokenizer

from nanovllm import StructuredOutputsParams, demo_model_path
from nanovllm.extras.json_schemas import warn_once
from nanovllm.extras.structured import GrammarCompiler

TOKENIZER = AutoTokenizer.from_pretrained(demo_model_path())
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id])
EOS = TOKENIZER.eos_token_id


def answers(schema: Any, count: int = 30, max_tokens: int = 80) -> list[str]:
    """Random answers that reached their end. AssertionError if one cannot be continued."""
    constraint = COMPILER.constraint(StructuredOutputsParams(json=schema))
    found = []
    for seed in range(count):
        matcher, rng, token_ids = constraint.new(), random.Random(seed), []
        while len(token_ids) < max_tokens:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            may = np.flatnonzero(bits)
            assert not matcher.is_error() and len(may), (schema, TOKENIZER.decode(token_ids))
            if EOS in may and (len(may) == 1 or rng.random() < 0.5):
                found.append(TOKENIZER.decode(token_ids))
                break
            token_ids.append(rng.choice([int(each) for each in may if each != EOS]))
            matcher.consume_token(token_ids[-1])
    return found


def refused(schema: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        COMPILER.constraint(StructuredOutputsParams(json=schema))


@pytest.fixture(autouse=True)
def _new_warnings() -> None:
    warn_once.cache_clear()
    COMPILER.constraint.cache_clear()


# -- numbers ------------------------------------------------------------------------------------------------

BIG = 2**53


@pytest.mark.parametrize("number", [BIG, -BIG, BIG + 2, 2**60, 2**63 - 1, -(2**63) + 1024, 10**19, 0, -2.5])
def test_constants_that_are_kept(number: int | float) -> None:
    for schema in ({"const": number}, {"enum": [number]}):
        assert {json.loads(text) for text in answers(schema, 3)} == {number}


def test_zero_has_no_sign() -> None:
    for schema in ({"const": -0.0}, {"enum": [-0.0]}, {"type": "number", "minimum": -0.0, "maximum": 0.0}):
        assert set(answers(schema, 5)) == {"0"}


@pytest.mark.parametrize("number", [BIG + 1, -BIG - 1, 2**60 + 1, 2**63 - 2, -(2**63), 2**64 - 1, 10**30 + 1])
@pytest.mark.parametrize("name", ["const", "enum"])
def test_constants_that_would_be_changed_are_refused(name: str, number: int) -> None:
    """Wherever they stand in the schema."""
    value = number if name == "const" else [1, number]
    for schema in (
        {name: value},
        {name: {"a": [value]} if name == "const" else [{"a": [value]}]},
        {"$defs": {"x": {"properties": {"a": {name: value}}}}, "$ref": "#/$defs/x"},
    ):
        refused(
            schema, f"json: {name} {number} cannot be enforced, because llguidance reads numbers as float64"
        )
    assert answers({"type": "null", "default": number, "examples": [number]}, 1) == ["null"]


@pytest.mark.parametrize("name", ["integer", "number", None])
@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ({"minimum": BIG - 1}, {"maximum": BIG + 3}),
        ({"minimum": BIG + 1}, {"maximum": BIG + 4}),
        ({"exclusiveMinimum": BIG}, {"exclusiveMaximum": BIG + 3}),
        ({"minimum": BIG, "exclusiveMinimum": True}, {"maximum": BIG + 3, "exclusiveMaximum": True}),
        ({"minimum": -BIG - 5}, {"maximum": -BIG - 1}),
        ({"minimum": 2**60 + 1}, {"maximum": 2**60 + 5000}),
        ({"minimum": 2**62}, {"maximum": 2**64}),
        ({"minimum": -(2**63)}, {"exclusiveMaximum": -(2**62) - 1}),
    ],
    ids=str,
)
def test_answers_keep_big_limits(name: str | None, lower: Any, upper: Any) -> None:
    schema = {**lower, **upper} | ({} if name is None else {"type": name})
    found = [json.loads(text) for text in answers(schema, 20)]
    numbers = [each for each in found if isinstance(each, (int, float)) and not isinstance(each, bool)]
    least = max(value + (key != "minimum") for key, value in lower.items() if value is not True)
    most = min(value - (key != "maximum") for key, value in upper.items() if value is not True)
    least, most = least + (True in lower.values()), most - (True in upper.values())
    assert numbers or name is None
    assert all(least <= each <= most for each in numbers), (least, most, numbers)


def test_limits_that_are_moved_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for title in ("a", "b"):
        assert answers({"title": title, "type": "integer", "minimum": BIG + 1}, 3)
    assert [each.message for each in caplog.records] == [
        f"structured_outputs, minimum {BIG + 1}: enforced as {BIG + 2}, because llguidance reads numbers as "
        "float64"
    ]


@pytest.mark.parametrize("name", ["integer", "number"])
def test_limits_without_a_number_between_them_are_refused(name: str) -> None:
    limits = {"minimum": BIG + 1, "maximum": BIG + 1}
    refused({"type": name, **limits}, f"none within minimum {BIG + 1}, maximum {BIG + 1}; use strings")
    refused(
        {"type": name, "exclusiveMinimum": BIG, "exclusiveMaximum": BIG + 2}, "none within exclusiveMinimum"
    )
    refused({"type": name, "minimum": 2**64}, f"minimum {2**64} cannot be enforced")
    refused({"type": name, "maximum": -(2**64)}, f"maximum {-(2**64)} cannot be enforced")


def test_choices_that_json_escapes() -> None:
    choices = ['a"b', "a\\b", "a\nb", "größe"]
    assert {json.loads(text) for text in answers({"enum": choices}, 60)} == {*choices}
    for choice in choices:
        [text] = {*answers({"enum": [choice]}, 5)}
        assert json.loads(text) == choice


# -- what is enforced with a word ---------------------------------------------------------------------------


def test_one_of(caplog: pytest.LogCaptureFixture) -> None:
    """As anyOf, with a warning; without one where at most one schema can match."""
    for kinds in (["integer", "string"], ["null", "boolean"]):
        assert answers({"oneOf": [{"type": kind} for kind in kinds]})
    assert caplog.text == ""
    tagged = [
        {
            "type": "object",
            "required": [key],
            "properties": {key: {"const": 1}},
            "additionalProperties": False,
        }
        for key in "ab"
    ]
    assert set(answers({"oneOf": tagged})) == {'{"a":1}', '{"b":1}'}
    assert answers({"oneOf": [{"type": "integer"}, {"type": "number"}]})
    assert [each.message for each in caplog.records] == [
        "structured_outputs, json: oneOf not fully supported, falling back to anyOf. This may cause "
        "validation errors in some cases."
    ]


class Record(BaseModel):
    path: Path
    password: SecretStr
    data: bytes


def test_formats_that_are_not_known(caplog: pytest.LogCaptureFixture) -> None:
    """Each one's warning comes once; a number's format, or a pattern beside one, is as without."""
    caplog.set_level(logging.WARNING, "nanovllm")
    for _ in range(2):
        COMPILER.constraint.cache_clear()
        for text in answers(Record.model_json_schema(), 10, 300):
            assert Record.model_validate_json(text)
    named = [each.message.split("'")[1] for each in caplog.records]
    assert sorted(named) == ["binary", "password", "path"]
    assert set(answers({"type": "integer", "format": "int32", "minimum": 1, "maximum": 2})) == {"1", "2"}
    assert len(caplog.records) == 3
    assert set(answers({"type": "string", "format": "x", "pattern": "^[ab]$"})) == {'"a"', '"b"'}
    assert len(caplog.records) == 4


FORMATS: dict[str, Callable[[str], Any]] = {
    "date": date.fromisoformat,
    "time": lambda text: time.fromisoformat(_plain(text)),
    "date-time": lambda text: datetime.fromisoformat(_plain(text)),
}


def _plain(text: str) -> str:
    """A time as Python 3.10 reads it."""
    whole, dot, rest = text.upper().replace("Z", "+00:00").partition(".")
    digits = rest[: len(rest) - 6]
    return whole + dot + (digits + "000000")[:6] + rest[-6:] if dot else whole


@pytest.mark.parametrize("name", FORMATS)
def test_dates_and_times_are_those_of_the_calendar(name: str) -> None:
    for text in answers({"type": "string", "format": name}, 300):
        FORMATS[name](json.loads(text))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            "2024-02-29 2000-02-29 0004-02-29 2021-02-28 9999-12-31",
            "2021-02-29 1900-02-29 0000-01-01",
        ),
        ("time", "23:59:59Z 00:00:00.5+01:00", "23:59:60Z 24:00:00Z 10:00:00"),
        ("date-time", "2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z 2024-02-29T23:59:60Z"),
    ],
)
def test_days_and_seconds(name: str, good: str, bad: str) -> None:
    for extra in ({}, {"pattern": "."}, {"allOf": [{"minLength": 1}]}):
        constraint = COMPILER.constraint(
            StructuredOutputsParams(json={"type": "string", "format": name, **extra})
        )
        for text in (*good.split(), *bad.split()):
            ids = TOKENIZER.encode(json.dumps(text), add_special_tokens=False)
            matcher = constraint.new()
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken == (text in good.split()), text


# -- dead ends ----------------------------------------------------------------------------------------------


def _object(patterns: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "patternProperties": patterns, **others}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (_object({"^a$": {"type": "integer"}}, properties={"a": {"const": 1}}, required=["a"]), {'{"a":1}'}),
        (_object({"^a$": {"const": 2}}, properties={"a": {"enum": [1, 2]}}, required=["a"]), {'{"a":2}'}),
        (_object({"^(ab|ac)$": {"const": 2}}, required=["ac", "ab"]), {'{"ac":2,"ab":2}'}),
        (_object({'^é"$': {"const": 2}}, required=['é"']), {'{"é\\"":2}'}),
        (_object({"^a$": {"const": 1}, "^b$": {"const": 2}}, required=["a"]), {'{"a":1}', '{"a":1,"b":2}'}),
        (
            {"items": _object({"^a$": False}, properties={"a": True}), "type": "array", "maxItems": 1},
            {"[]", "[{}]"},
        ),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # alike in all processes
)
def test_patterns_that_match_named_properties_only(schema: Any, expected: set[str]) -> None:
    """No comma is allowed after which no name fits, and the patterns' schemas are still enforced."""
    found = set(answers(schema, 40))
    assert found >= expected and all(found)
    for text in found:
        jsonschema.validate(json.loads(text), schema)


def test_patterns_that_match_other_names_too() -> None:
    schema = _object({"^[ab]$": {"const": 2}}, properties={"a": {"enum": [1, 2]}}, required=["a"])
    found = answers(schema, 40)
    assert {'{"a":2}', '{"a":2,"b":2}'} <= set(found)
    for text in found:
        jsonschema.validate(json.loads(text), schema)


def test_a_name_cannot_be_written_in_another_way() -> None:
    r"""With \u escapes llguidance takes a property's name for an additional one."""
    schema: Any = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for each in (schema, {"type": "object", "patternProperties": {".*": {"const": 1}}}):
        matcher = COMPILER.constraint(StructuredOutputsParams(json=each)).new()
        ids = TOKENIZER.encode('{"a":1,"\\u0061":2', add_special_tokens=False)
        assert TOKENIZER.decode(ids[: matcher.try_consume_tokens(ids)]) == '{"a":1,"\\'
    for text in ("\x01", "\x7f", "\x1b[0m", "\n\t"):
        assert {json.loads(each) for each in answers({"const": text}, 2)} == {text}
        assert {
            json.loads(each)[text]
            for each in answers(
                {
                    **schema,
                    "properties": {text: schema["properties"]["a"]},
                    "required": [text],
                    "additionalProperties": False,
                },
                2,
            )
        } == {1}


@pytest.mark.parametrize("place", ["alone", "late", "tag"])
def test_a_pattern_that_is_too_complex_is_refused_before_the_run(place: str) -> None:
    words = {"type": "string", "maxLength": 5000, "pattern": r"^(?:\S+\s+){0,99}\S+$"}
    late = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "text": words},
        "required": ["title"],
    }
    match = (
        r"the string \{.*cannot be followed after '\".*: llguidance fails: lexer error: too many .* simpler"
    )
    if place == "tag":
        tag = {"structures": [{"begin": "<f", "schema": late, "end": ""}], "triggers": ["<f"]}
        with pytest.raises(ValueError, match=f"structural_tag: {match}"):
            COMPILER.constraint(StructuredOutputsParams(structural_tag=tag))
    else:
        refused(words if place == "alone" else late, f"json: {match}")


def test_a_grammar_that_leads_nowhere_is_refused_before_the_run() -> None:
    for grammar in ('start: "abab" /[^\\s\\S]/ "c"', "start: /[a-z]{2}/ x\nx: /[^\\s\\S]/"):
        with pytest.raises(
            ValueError, match=r"grammar: .*cannot be followed after '[a-z]+': no token may follow"
        ):
            COMPILER.constraint(StructuredOutputsParams(grammar=grammar))
