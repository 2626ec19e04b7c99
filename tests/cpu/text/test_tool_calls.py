"""Tool calls of each family become OpenAI's form, whole and at the end of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.reasoning.tool_calls import ToolCallStream, parse_tool_calls
from nanovllm.reasoning.tool_formats import TOOL_CALLS
from nanovllm.reasoning.values import typed

CITY = {"city": "São Paulo", "days": 3}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "code": {"type": "string"},
    "note": {"type": ["null", "string"]},
    "tags": {"type": "array"},
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"properties": PROPERTIES}}}]


def json_block(open_: str, close: str) -> Any:
    def write(name: str, arguments: dict[str, Any]) -> str:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"{open_}\n{body}\n{close}"

    return write


def value(each: Any) -> str:
    return each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)


def function_tags(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={key}>\n{value(each)}\n</parameter>\n" for key, each in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def seed_tags(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={key}>{value(each)}</parameter>\n" for key, each in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"


def glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{value(each)}</arg_value>\n" for key, each in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def minimax(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f'<parameter name="{key}">{value(each)}</parameter>\n' for key, each in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'


def deepseek(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps(arguments, ensure_ascii=False)
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def kimi(name: str, arguments: dict[str, Any]) -> str:
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    call = f"{head}{json.dumps(arguments)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def openai(name: str, arguments: dict[str, Any]) -> str:
    return f"<|channel|>commentary to=functions.{name}<|message|>{json.dumps(arguments)}<|call|>"


def muse(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(
        f'<atem:parameter name="{key}">{value(each)}</atem:parameter>\n' for key, each in arguments.items()
    )
    block = f'<atem:invoke name="{name}">\n{inner}</atem:invoke>\n'
    head = f"<|start|>assistant to={name}<|message|>"
    return f"{head}<atem:function_calls>\n{block}</atem:function_calls><|eom|>"


def gemma_value(each: Any) -> str:
    if isinstance(each, str):
        return f'<|"|>{each}<|"|>'
    if isinstance(each, dict):
        return "{" + ",".join(f"{key}:{gemma_value(inner)}" for key, inner in each.items()) + "}"
    if isinstance(each, list):
        return "[" + ",".join(map(gemma_value, each)) + "]"
    return json.dumps(each)


def gemma(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>"


WRITERS: dict[str, Any] = {
    "hermes": json_block("<tool_call>", "</tool_call>"),
    "granite4": json_block("<tool_call>", "</tool_call>"),
    "qwen3_coder": function_tags,
    "seed_oss": seed_tags,
    "glm45": glm,
    "minimax_m2": minimax,
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek_v31,
    "kimi_k2": kimi,
    "openai": openai,
    "gemma4": gemma,
    "muse_glimmer": muse,
}
TAGGED = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "muse_glimmer")  # values without types


def parsed(name: str, text: str, tools: Any = TOOLS) -> tuple[str, list[tuple[str, Any]], int]:
    """The text, the calls and the number of errors; the same by a stream of letters and of every two
    parts."""
    found = parse_tool_calls(text, TOOL_CALLS[name], tools)
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in [*cuts, list(text)]:
        stream = ToolCallStream(TOOL_CALLS[name], tools)
        parts = [stream.append(piece) for piece in pieces]
        end = stream.finish()
        assert ("".join(parts) + end.text, *end[1:]) == found, pieces
    for call in found.calls:
        assert call.keys() == {"id", "type", "function"} and call["type"] == "function" and call["id"]
        assert call["function"].keys() == {"name", "arguments"}
    functions = [call["function"] for call in found.calls]
    return (
        found.text,
        [(each["name"], json.loads(each["arguments"])) for each in functions],
        len(found.errors),
    )


def test_every_format_has_a_case() -> None:
    assert WRITERS.keys() == TOOL_CALLS.keys()


@pytest.mark.parametrize("name", WRITERS)
def test_one_call_and_several(name: str) -> None:
    write = WRITERS[name]
    one, other = write("get_weather", CITY), write("now", {})
    assert parsed(name, one) == ("", [("get_weather", CITY)], 0)
    assert parsed(name, f"I look.\n{one}\n") == ("I look.", [("get_weather", CITY)], 0)
    assert parsed(name, f"{one}\n{other}") == ("", [("get_weather", CITY), ("now", {})], 0)
    assert parsed(name, "No call < needed.\n") == ("No call < needed.\n", [], 0)
    assert parsed(name, "") == ("", [], 0)


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_stays_in_the_text(name: str) -> None:
    whole = WRITERS[name]("get_weather", CITY)
    last = whole.rindex("3")  # from here on the arguments may be whole
    for length in range(len(whole)):
        text, calls, _ = parsed_once(name, "Look: " + whole[:length])
        if length <= last:
            assert calls == [] and text == "Look: " + whole[:length]
        else:
            assert calls in ([], [("get_weather", CITY)])
            assert calls or text == "Look: " + whole[:length]


def parsed_once(name: str, text: str) -> tuple[str, list[tuple[str, Any]], int]:
    found = parse_tool_calls(text, TOOL_CALLS[name], TOOLS)
    functions = [call["function"] for call in found.calls]
    return (
        found.text,
        [(each["name"], json.loads(each["arguments"])) for each in functions],
        len(found.errors),
    )


@pytest.mark.parametrize("name", WRITERS)
def test_one_that_does_not_parse_is_reported_and_the_others_stand(name: str) -> None:
    write = WRITERS[name]
    good = write("get_weather", CITY)
    bad = good[: good.rindex("3")]
    text, calls, errors = parsed(name, f"{good}\n{bad}")
    assert calls == [("get_weather", CITY)] and text == bad and errors == 1


@pytest.mark.parametrize("name", WRITERS)
def test_marks_in_values(name: str) -> None:
    """A value may hold the very marks of its family, such as code that writes calls."""
    write = WRITERS[name]
    closes = {
        "qwen3_coder": "</parameter> </function>",
        "glm45": "</arg_value>",
        "minimax_m2": "</parameter>",
        "muse_glimmer": "</atem:parameter> </atem:invoke>",
    }
    closes |= {"hermes": "</tool_call>", "gemma4": "<tool_call|>}{:", "deepseek_v3": "```"}
    code = f'if a < b: x = "{closes.get(name, "<|end|>")}"\n    # {{}}'
    for each in (
        code,
        "a = '</tool_call>'",
        "  indented\n\n",
        '"quoted"',
        "a <parameter=b> <arg_key>c</arg_key>",
    ):
        arguments = {"code": each, "city": "x"}
        assert parsed(name, write("get_weather", arguments))[1:] == ([("get_weather", arguments)], 0)


@pytest.mark.parametrize("name", WRITERS)
def test_types(name: str) -> None:
    given = {"city": "12", "days": 12, "code": "true", "note": None, "tags": ["a", {"b": 1}]}
    assert parsed(name, WRITERS[name]("get_weather", given))[1] == [("get_weather", given)]
    if name in TAGGED:  # without a schema all is text
        expected = {key: value(each) for key, each in given.items()}
        assert parsed(name, WRITERS[name]("get_weather", given), None)[1] == [("get_weather", expected)]


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12),
        ("12.5", {"type": "integer"}, "12.5"),
        ("12", {"type": "number"}, 12),
        ("1e3", {"type": "number"}, 1000.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("None", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": ["null", "string"]}, None),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 7),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("[1]", {"type": "object"}, "[1]"),
        ("3", {"enum": [1, 3]}, 3),
        ("3", {"enum": ["3", 3]}, "3"),
        ("true", {}, "true"),
        ("true", None, "true"),
    ],
)
def test_untyped_values(text: str, schema: Any, expected: Any) -> None:
    found = typed(text, schema)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),  # no end mark
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
        ("qwen3_coder", "<function=f>\n</function>\n</tool_call>", [("f", {})]),  # no opening
        (
            "qwen3_coder",
            function_tags("f", {}) + "\n<function=g>\n</function>\n</tool_call>",
            [("f", {}), ("g", {})],
        ),
        ("glm45", "<tool_call>f</tool_call>", [("f", {})]),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
            [("f", {"a": "b"})],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n'
            '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            [("f", {}), ("g", {})],
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g"
            "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("f", {}), ("g", {})],
        ),
        (
            "gemma4",
            "<|tool_call>call:f{a:[],b:{c:-1.5}}<tool_call|><|tool_response>",
            [("f", {"a": [], "b": {"c": -1.5}})],
        ),
        (
            "gemma4",
            '<|tool_call>call:f{"a":"b, {c}",d:["e\\"", "]"]}<tool_call|>',  # as JSON has strings
            [("f", {"a": "b, {c}", "d": ['e"', "]"]})],
        ),
        ("openai", "<|channel|>commentary to=functions.f<|message|>{}", [("f", {})]),  # the
        (
            "muse_glimmer",
            '<|start|>assistant to=f<|message|>\n<atem:function_calls>\n<atem:invoke name="f">\n'
            '</atem:invoke>\n<atem:invoke name="g.h"></atem:invoke>',  # two in a message, which is cut off
            [("f", {}), ("g.h", {})],
        ),
        (  # of a tool without a namespace
            "muse_glimmer",
            muse("get_weather.get_weather", {}) + muse("other.get_weather", {}),
            [("get_weather", {}), ("other.get_weather", {})],
        ),
    ],
)
def test_forms(name: str, text: str, calls: Any) -> None:
    assert parsed(name, text) == ("", calls, 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>'),
        ("qwen3_coder", "<tool_call><function=f>x</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x</function></tool_call>"),
        ("qwen3_coder", "<tool_call>f(1)</tool_call>"),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>b}<tool_call|>'),
        ("gemma4", '<|tool_call>call:f{a:"b}<tool_call|>'),
        ("gemma4", "<|tool_call>call:f{" + "a:{" * 200),
        ("hermes", "<tool_call>" + '{"a":' * 100_000),
        ("muse_glimmer", "<|start|>assistant to=f<|message|>hm<|eom|>"),
    ],
)
def test_what_is_no_call_stays_text_with_an_error(name: str, text: str) -> None:
    assert parsed_once(name, text)[:2] == (text, []) and parsed_once(name, text)[2] >= 1


def test_calls_of_muse_glimmer_that_are_quoted() -> None:
    """Tags in a message to the user call nothing, also behind a call."""
    quoted = 'Write <atem:function_calls>\n<atem:invoke name="f">\n</atem:invoke>\n</atem:function_calls>.'
    assert parsed("muse_glimmer", quoted) == (quoted, [], 0)
    assert parsed("muse_glimmer", muse("f", {}) + quoted) == (quoted, [("f", {})], 0)


def test_ids() -> None:
    """Equal answers have equal ids, calls of one answer and answers with other salts have others."""
    text = gemma("f", {}) * 2
    ids = [
        [call["id"] for call in parse_tool_calls(text, TOOL_CALLS["gemma4"], salt=salt).calls]
        for salt in "aab"
    ]
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4
    own = parse_tool_calls(kimi("f", {}), TOOL_CALLS["kimi_k2"]).calls
    assert own[0]["id"] == "functions.f:0"


TEXTS = st.text(st.sampled_from('ab<>/{}[]":,\n| ='), max_size=20)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), st.dictionaries(st.sampled_from(["city", "code"]), TEXTS), TEXTS)
def test_any_strings(name: str, arguments: dict[str, str], before: str) -> None:
    text, calls, errors = parsed_once(name, before + WRITERS[name]("get_weather", arguments))
    assert (text, calls, errors) == (before.rstrip(), [("get_weather", arguments)], 0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_text_in_any_parts(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WRITERS)))
    form = TOOL_CALLS[name]
    parts = [
        *form.marks,
        WRITERS[name]("f", {"a": "b"}),
        "\n",
        " ",
        "a",
        "{",
        "}",
        '"',
        "call:f",
        "functions.f",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stream = ToolCallStream(form)
    new = [stream.append(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    end = stream.finish()
    assert ("".join(new) + end.text, *end[1:]) == parse_tool_calls(text, form)
