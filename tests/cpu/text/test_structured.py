"""Structured outputs, bad words and the other token rules, from SamplingParams to texts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel
from random_schemas import random_schema
from test_texts import KINDS, TOKENIZERS
from transformers import AutoTokenizer

from nanovllm import SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.checks import raise_first
from nanovllm.extras import texts as texts_module
from nanovllm.extras.structured import CACHE_SIZE, COPIES, ORIGINALS, Constraint, GrammarCompiler
from nanovllm.extras.token_rules import RuledRow, make_rules, restrict_all
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Request, parse_prompts, parse_sampling_params

TOKENIZER = AutoTokenizer.from_pretrained(demo_model_path())
V = 540  # more logits than tokens, like models with padded embeddings
EOS = 2
PROCESSOR = Processor(TOKENIZER, V, [EOS])


def requests(params: Sequence[SamplingParams], processor: Processor = PROCESSOR) -> list[Request]:
    prompts = parse_prompts([[5]] * len(params))
    made = processor.make_requests(prompts, parse_sampling_params(list(params), len(params)), 0)
    raise_first(made)
    return made


def draw(made: Sequence[Request], seed: int = 0) -> list[list[int]]:
    """Random outputs that follow the rules of each request. Tokens that end a text are likely."""
    rng = np.random.default_rng(seed)
    ends = np.array(TOKENIZER.convert_tokens_to_ids(['"', "}", "]", ",", "]"]))
    logits = np.zeros(V)
    logits[[*ends, EOS]] = 6
    rules = [make_rules(request) for request in made]
    outputs: list[list[int]] = [[] for _ in made]
    running = list(range(len(made)))
    bits = np.empty((len(made), -(-V // 32)), np.int32)
    while running:
        restrict_all([RuledRow(row, rules[row], outputs[row], 0) for row in running], bits)
        for row in list(running):
            may = np.unpackbits(bits[row].view(np.uint8), bitorder="little")[:V].astype(bool)
            assert may.any(), made[row]
            drawn = np.where(may, logits + rng.gumbel(size=V), -np.inf).argmax()
            outputs[row].append(int(drawn))
            if drawn in made[row].stop_token_ids or len(outputs[row]) == made[row].params.max_tokens:
                running.remove(row)
    return outputs


def texts(made: Sequence[Request], seed: int = 0) -> list[str | None]:
    """The texts of `draw`; None for an output that reached max_tokens."""
    return [
        TOKENIZER.decode(ids[:-1]) if ids[-1] in request.stop_token_ids else None
        for request, ids in zip(made, draw(made, seed), strict=True)
    ]


def params_of(max_tokens: int = 100, **constraint: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), max_tokens=max_tokens)


class City(BaseModel):
    name: str
    founded: int


@pytest.mark.parametrize("batch", range(4))
def test_answers_to_random_schemas_are_valid(batch: int) -> None:
    schemas = [random_schema(seed) for seed in range(50 * batch, 50 * batch + 50)]
    made = requests([params_of(200, json=schema) for schema in schemas])
    answers = texts(made, batch)
    complete = [(schema, text) for schema, text in zip(schemas, answers, strict=True) if text is not None]
    assert len(complete) > 40
    for schema, text in complete:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(text), schema, format_checker=checker)


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-c]{2,4}-[0-9]+"}, "[a-c]{2,4}-[0-9]+"),
    ({"regex": "^(yes|no)$"}, "yes|no"),
    ({"choice": ["positive", "negative", "pos(itive)? "]}, r"positive|negative|pos\(itive\)\? "),
    ({"choice": [" a", "日本", '"\\']}, r' a|日本|"\\'),
    ({"grammar": 'start: "[" item ("," item)* "]"\nitem: /[0-9]{1,2}/ | start'}, r"\[[\[\],0-9]*\]"),
    ({"grammar": 'root ::= ("a" | "b" root "c")'}, "(b*)a(c*)"),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 12}}, "[3-9]|1[0-2]"),
    ({"json": '{"const": {"a": [1, " "]}}'}, r'\{"a":\[1," "\]\}'),
    ({"json": '{"const": {"a": 1}}', "disable_any_whitespace": True}, r'\{"a":1\}'),
    ({"json": {"const": {"a": 1}}, "disable_any_whitespace": False}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ({"json": {"const": [1, 2]}, "whitespace_pattern": "_"}, r"\[_*1_*,_*2_*\]"),
]


@pytest.mark.parametrize(("constraint", "pattern"), CONSTRAINTS, ids=str)
def test_each_kind_of_constraint(constraint: dict[str, Any], pattern: str) -> None:
    answers = texts(requests([params_of(60, **constraint)] * 30))
    complete = [text for text in answers if text is not None]
    assert len(complete) >= 15
    for text in complete:
        assert re.fullmatch(pattern, text), text


def test_json_object_and_pydantic_models() -> None:
    made = requests([params_of(json_object=True), params_of(json=City)] * 20)
    for index, text in enumerate(texts(made)):
        if text is not None:
            value = json.loads(text)
            assert City.model_validate(value) if index % 2 else isinstance(value, dict)


def test_additional_properties() -> None:
    """The schema's own `additionalProperties` is kept, and names and data that look like schemas do not
    change.
    """
    nested = {"type": "object", "properties": {"properties": {"enum": [1, 2]}, "b": {"type": "null"}}}
    schema = {
        "type": "object",
        "properties": {"a": nested, "c": {"const": {"properties": {}}}},
        "required": ["a", "c"],
    }
    made = requests([params_of(json=schema, disable_additional_properties=True)] * 30)
    complete = [json.loads(text) for text in texts(made) if text is not None]
    assert len(complete) > 20
    for value in complete:
        assert value["c"] == {"properties": {}} and value.keys() == {"a", "c"}
        assert value["a"].keys() <= {"properties", "b"}
        jsonschema.validate(value, schema)


def test_structural_tags() -> None:
    """Any text is allowed, but after a trigger it must follow the structure."""
    structures = [
        {"begin": "<f=a>", "schema": {"enum": [1, 20]}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ]

    def following(text: str) -> set[str]:
        return allowed_after(text, structural_tag={"structures": structures, "triggers": ["<f="]})

    for free in ("", "Well, <", "<f=a>20</f>", "x <f=b>true</f> and "):
        assert {"EOS", "a", "<", "{"} <= following(free)
    assert following("Well, <f=") == {"a", "b"}
    assert following("<f=a>1</f> <f=a>") == {"1", "2"}
    assert following("<f=a>x") == set()


def allowed_after(text: str, **constraint: Any) -> set[str]:
    """The letters and ends that may follow a text."""
    [request] = requests([params_of(**constraint)])
    bits = np.empty((1, -(-V // 32)), np.int32)
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    restrict_all([RuledRow(0, make_rules(request), token_ids, 0)], bits)
    ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return {"EOS" if id_ == EOS else TOKENIZER.decode([int(id_)]) for id_ in ids}


WHITE = {" ", "\n", "\t", "  "}


@pytest.mark.parametrize("name", ["json", "json_object", "structural_tag"])
def test_whitespace_in_json_is_an_option(name: str) -> None:
    """Without it no text can go on with white space for ever. A space within a string is allowed."""
    schema = {
        "$defs": {"o": {"type": "object", "properties": {"a b": {"type": "string"}}}},
        "$ref": "#/$defs/o",
    }
    tag = {"structures": [{"begin": "[f]", "schema": schema, "end": "[/f]"}], "triggers": ["[f"]}
    value: Any = {"json": schema, "json_object": True, "structural_tag": tag}[name]
    begin = "[f]" * (name == "structural_tag")
    places = ["", "{", '{"a b"', '{"a b":', '{"a b":"x"']
    for place in places:
        compact = allowed_after(begin + place, **{name: value})
        assert compact and not compact & WHITE, place
        spaced = allowed_after(begin + place, **{name: value}, disable_any_whitespace=False)
        assert spaced & WHITE or not place
        chosen = allowed_after(begin + place, **{name: value}, whitespace_pattern="\\n")
        assert chosen & WHITE <= {"\n"}
    assert " " in allowed_after(begin + '{"a b":"', **{name: value})


DIGITS = set("0123456789")
INTEGER = {"type": "integer"}
LONGEST = str(2**63 - 1)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (INTEGER, LONGEST),
        (INTEGER, str(-(2**63) + 1024)),
        ({"type": ["null", "integer"], "minimum": 1}, LONGEST),
        ({"type": "integer", "exclusiveMaximum": 5}, str(-(2**63) + 1024)),
        ({"type": "array", "items": INTEGER}, f"[1,{LONGEST}"),
        ({"anyOf": [INTEGER, {"type": "string"}]}, LONGEST),
        ({"$ref": "#/$defs/i", "$defs": {"i": INTEGER}}, LONGEST),
        ({"properties": {"minimum": INTEGER}, "type": "object"}, f'{{"minimum":{LONGEST}'),
    ],
    ids=str,
)
def test_integers_end_within_64_bits(schema: dict[str, Any], text: str) -> None:
    """The longest one is allowed, and no digit after it, unless the option says so."""
    assert not allowed_after(text, json=schema) & DIGITS
    assert allowed_after(text, json=schema) & {"EOS", ",", "]", "}"}
    assert allowed_after(text, json=schema, disable_big_integers=False) >= DIGITS


@pytest.mark.parametrize("schema", [{"type": "number"}, {"anyOf": [INTEGER, {"const": 1e25}]}], ids=str)
def test_numbers_that_may_be_beyond_64_bits(schema: dict[str, Any]) -> None:
    assert allowed_after("1" * 30, json=schema) >= DIGITS | {"EOS"}


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": {"dependentSchemas": {}}}, "dependentSchemas"),
        ({"json": {"type": "object"}, "whitespace_pattern": "(("}, "unclosed group"),
        ({"grammar": "start: foo"}, "foo"),
        (
            {"grammar": 'start: start "a"'},
            r"no text satisfies 'start: start \"a\"', for no token may come first",
        ),
        ({"regex": "a[^\\s\\S]"}, "no text satisfies"),
        (
            {"grammar": 'root ::= "a" root'},
            r"'root ::= \"a\" root' cannot be followed after 'a{56}\.\.\.: llguidance fails",
        ),
        ({"grammar": "just words"}, "GBNF"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<f", "schema": {"type": "x"}, "end": ""}],
                    "triggers": ["<"],
                }
            },
            "Invalid type: x",
        ),
    ],
    ids=str,
)
def test_wrong_constraints_name_the_prompt_and_the_cause(constraint: dict[str, Any], words: str) -> None:
    good = params_of(regex="a")
    with pytest.raises(
        ValueError, match=rf"(?s)prompts\[1\]: structured_outputs: {next(iter(constraint))}: .*{words}"
    ):
        requests([good, params_of(**constraint), good])


def test_where_a_text_ends() -> None:
    """After a complete text, exactly the tokens that end the output are allowed."""
    [other] = TOKENIZER.encode("x", add_special_tokens=False)
    structured = StructuredOutputsParams(regex="ab?")
    made = requests(
        [
            SamplingParams(structured_outputs=structured),
            SamplingParams(structured_outputs=structured, ignore_eos=True),
            SamplingParams(structured_outputs=structured, stop_token_ids=[other]),
            SamplingParams(structured_outputs=structured, min_tokens=20),
            SamplingParams(structured_outputs=structured, allowed_token_ids=[EOS + 1]),
        ]
        * 20
    )
    assert [request.stop_token_ids for request in made[:3]] == [{EOS}, {EOS}, {EOS, other}]
    ended = {row: set() for row in range(4)}
    outputs = draw([request for row, request in enumerate(made) if row % 5 < 4])
    for row, ids in enumerate(outputs):
        assert TOKENIZER.decode(ids[:-1]) in ("a", "ab")
        ended[row % 4].add(ids[-1])
    assert ended[0] == ended[1] == ended[3] == {EOS} and ended[2] <= {EOS, other}
    assert all(TOKENIZER.decode(ids[:-1]) == "ab" for ids in outputs[3::4])
    with pytest.raises(AssertionError):  # no token is left
        draw(made[4:5])
    completion = PROCESSOR.completion(made[1], 0, outputs[1], "stop", EOS)
    assert completion.stop_reason is None and completion.text in ("a", "ab")


def test_each_sequence_has_rules_of_its_own() -> None:
    made = requests([params_of(choice=["ab", "cd"])])
    assert {text for seed in range(12) for text in texts(made * 3, seed)} == {"ab", "cd"}


def test_equal_constraints_are_compiled_once() -> None:
    compiler = GrammarCompiler(TOKENIZER, V, [EOS])
    for _ in range(2):
        for seed in range(30):
            compiler.constraint(StructuredOutputsParams(json=random_schema(seed)))
    assert compiler.constraint.cache_info()[:4] == (30, 30, CACHE_SIZE, 30)


class Original:
    copies = 0

    def deep_copy(self) -> None:
        self.copies += 1


def test_few_originals_share_the_copies_in_turn() -> None:
    """After an error, new originals are made. The matcher that replaces a failed one is never copied."""
    originals = [Original()]

    def make() -> Original:
        originals.append(Original())
        return originals[-1]

    constraint: Any = Constraint(originals[0], make, None, EOS)
    for _ in range(2 * ORIGINALS * COPIES - 1):
        constraint.new()
    assert [each.copies for each in originals] == [*[2 * COPIES] * (ORIGINALS - 1), 2 * COPIES - 1]
    assert constraint.alone() is originals[ORIGINALS]
    for _ in range(ORIGINALS * COPIES):
        constraint.new()
    assert [each.copies for each in originals[ORIGINALS:]] == [0, *[COPIES] * ORIGINALS]


def test_another_tokenizer_compiles_anew() -> None:
    processor = Processor(TOKENIZER, V, [EOS])
    first = requests([params_of(regex="a")], processor)[0].constraint
    processor.tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    second = requests([params_of(regex="a")], processor)[0].constraint
    assert first is not None and second is not None and first is not second


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: bad_words=\['x'\] needs a tokenizer"):
        requests([SamplingParams(bad_words=["x"])], Processor(None, V, [EOS]))
    with pytest.raises(ValueError, match=r"prompts\[0\]: structured_outputs=.* needs a tokenizer"):
        requests([params_of(regex="a")], Processor(None, V, [EOS]))
    endless = AutoTokenizer.from_pretrained(demo_model_path(), eos_token=None)
    with pytest.raises(ValueError, match="eos_token_id"):
        requests([params_of(regex="a")], Processor(endless, V, []))
    with pytest.raises(ValueError, match=r"allowed_token_ids: token id 540 is"):
        requests([SamplingParams(allowed_token_ids=[3, V])])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'nanovllm\[structured\]'"):
        requests([params_of(regex="a")], Processor(TOKENIZER, V, [EOS]))


def test_tokens_that_the_model_has_no_logits_of() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.add_tokens(["<extra>"])
    processor = Processor(tokenizer, 512, [EOS, 600])
    [request] = requests([params_of(regex="<extra>")], processor)
    assert request.stop_token_ids == {EOS}
    rules, bits, ids = make_rules(request), np.empty((1, 16), np.int32), []
    while EOS not in ids:
        restrict_all([RuledRow(0, rules, ids, 0)], bits)
        ids.append(int(np.unpackbits(bits[0].view(np.uint8), bitorder="little").argmax()))
    assert tokenizer.decode(ids[:-1]) == "<extra>"


@pytest.mark.parametrize("kind", KINDS)
def test_bad_words_are_not_drawn(kind: str) -> None:
    """A word stands for the tokens of its text, without and, if such a token exists, with a leading space."""
    tokenizer = TOKENIZERS[kind]
    processor = Processor(tokenizer, len(tokenizer), [])
    [request] = requests([SamplingParams(bad_words=["the", " the", "\n", "日本"])], processor)
    forms = [tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the", "\n", "日本")]
    assert request.bad_words[0] == tuple(forms[0])
    assert {tuple(forms[2]), tuple(forms[3])} <= set(request.bad_words)
    if len(forms[0]) == len(forms[1]) and forms[0][0] != forms[1][0]:
        assert tuple(forms[1]) in request.bad_words
    rules = make_rules(request)
    for word in request.bad_words:
        bits = np.empty((1, -(-len(tokenizer) // 32)), np.int32)
        restrict_all([RuledRow(0, rules, [9, *word[:-1]], 1)], bits)
        assert not bits[0, word[-1] // 32] >> (word[-1] % 32) & 1


def test_equal_bad_words_are_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of a job has a copy of its own. Another tokenizer splits them anew."""
    calls: list[Any] = []
    split = texts_module.bad_word_ids
    monkeypatch.setattr(texts_module, "bad_word_ids", lambda *given: calls.append(given) or split(*given))
    processor, words = Processor(TOKENIZER, V, [EOS]), [f"w{index}" for index in range(100)]
    made = requests([SamplingParams(bad_words=list(words), seed=seed) for seed in range(3)], processor)
    assert len(calls) == 1 and len({id(request.bad_words) for request in made}) == 1
    processor.tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    requests([SamplingParams(bad_words=words)], processor)
    assert len(calls) == 2
