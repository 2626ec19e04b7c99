"""Engines that separate thinking and tool calls: outputs, streams, chats. A logits processor writes them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_llm import CheckedLLM
from test_texts import make_tokenizer, model_for
from tokenizers import AddedToken

from nanovllm import LLM, SamplingParams
from nanovllm.extras import planned
from nanovllm.extras.structured_outputs import StructuredOutputsParams
from nanovllm.extras.token_rules import RuledRow, restrict_all
from nanovllm.sampling_params import RepetitionDetectionParams

TEMPLATE = """
{%- for m in messages %}<|turn|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function></tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|turn|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}{# <|im_start|> #}"""
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kvcache_blocks": 64, "device": "cpu"}
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer("byte_level")
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer.chat_template = TEMPLATE
    return model_for(tokenizer, tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with CheckedLLM(folder, reasoning_parser="auto", tool_parser="auto", **OPTIONS) as llm:
        yield llm


def says(llm: LLM, answer: str, **params: Any) -> SamplingParams:
    """Parameters by which an answer is just this text, and then the end."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def write(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[ids[len(output_ids)]] = 0
        return forced

    return SamplingParams(**{"temperature": 0, "max_tokens": len(ids), **params}, logits_processors=[write])


def test_thinking_is_no_text(llm: LLM) -> None:
    [out] = llm.generate(["Hello<think>\n"], says(llm, "the world</think>\n\nHello"), use_tqdm=False)
    [answer] = out.outputs
    assert (answer.reasoning, answer.text, answer.tool_calls) == ("the world", "Hello", [])
    assert out["text"] == "Hello" and answer.finish_reason == "stop" and answer.tool_call_errors == []
    ids = answer.token_ids
    assert llm.tokenizer is not None
    assert answer.num_reasoning_tokens == 1 + ids.index(llm.tokenizer.convert_tokens_to_ids("</think>"))


def test_an_answer_that_is_cut_off_within_its_thinking_has_no_text(llm: LLM) -> None:
    params = says(llm, "the world</think>Hello", max_tokens=3)
    [out] = llm.generate(["Hello<think>\n"], params, use_tqdm=False)
    [answer] = out.outputs
    assert answer.text == "" and "the world".startswith(answer.reasoning or "?")
    assert answer.finish_reason == "length" and answer.num_reasoning_tokens == 3


def test_stop_strings_count_behind_the_thinking(llm: LLM) -> None:
    for include in (False, True):
        params = says(
            llm, "the world</think>Hello the world", stop=["the"], include_stop_str_in_output=include
        )
        [out] = llm.generate(["Hello<think>\n"], params, use_tqdm=False)
        [answer] = out.outputs
        assert (answer.reasoning, answer.text) == ("the world", "Hello the" if include else "Hello ")
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "the")


CASES: list[tuple[str, str, dict[str, Any], tuple[str, str, str | None]]] = [
    ("  \n", "\n", {}, ("  ", "stop", "\n")),
    ("  \n", " ", {"include_stop_str_in_output": True}, (" ", "stop", " ")),
    ("  \n", " ", {"max_tokens": 2, "min_tokens": 1}, ("", "stop", " ")),
    ("  \n", "\n", {"max_tokens": 2}, ("  ", "length", None)),
    ("\n\n", "\n", {"repetition_detection": RepetitionDetectionParams(1, min_count=2)}, ("", "stop", "\n")),
]


def test_a_stop_string_may_be_what_could_have_begun_the_thinking(llm: LLM) -> None:
    """White space at the beginning is held back, and is text at the end of the answer."""
    for answer, stop, more, expected in CASES:
        params = says(llm, answer, stop=[stop], **more)
        [out] = llm.generate(["Hello"], params, use_tqdm=False)
        [ended] = out.outputs
        assert (ended.text, ended.finish_reason, ended.stop_reason) == expected
        parts = [part.outputs[0] for part in llm.stream(["Hello"], params, deltas=True)]
        assert "".join(part.text for part in parts) == ended.text
        assert [token_id for part in parts for token_id in part.token_ids] == ended.token_ids


def test_completions_of_a_prompt_have_ids_of_their_own(llm: LLM) -> None:
    params = says(llm, f"hm</think>{CALL}", n=2, temperature=1)
    [out] = llm.generate(["Hello<think>\n"], params, use_tqdm=False)
    assert [answer.reasoning for answer in out.outputs] == ["hm", "hm"]
    ids = [call["id"] for answer in out.outputs for call in answer.tool_calls or ()]
    [again] = llm.generate(["Hello<think>\n"], params, use_tqdm=False)
    assert len({*ids}) == 2 and ids == [
        call["id"] for each in again.outputs for call in each.tool_calls or ()
    ]


@pytest.mark.parametrize("stop", [None, ["wörld"]])
def test_a_stream_of_parts_is_the_whole(llm: LLM, stop: Any) -> None:
    answer = f"the world 日本語</think>\n\nHello the wörld\n{CALL}"
    params = says(llm, answer, stop=stop)
    [whole] = llm.generate(["Hello<think>\n"], params, use_tqdm=False)
    parts = [part.outputs[0] for part in llm.stream(["Hello<think>\n"], params, deltas=True)]
    [expected] = whole.outputs
    assert "".join(part.text for part in parts) == expected.text
    assert "".join(part.reasoning or "" for part in parts) == expected.reasoning == "the world 日本語"
    assert (
        len([part for part in parts if part.reasoning]) > 2 and len([part for part in parts if part.text]) > 2
    )
    assert [part.tool_calls for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].tool_calls == expected.tool_calls and parts[-1].finish_reason == expected.finish_reason
    assert len(expected.tool_calls or ()) == (stop is None)


def test_chats_have_calls_with_the_types_of_their_tools(llm: LLM) -> None:
    [out] = llm.chat([USER], says(llm, f"hm</think>\n\n{CALL}"), use_tqdm=False, tools=TOOLS)
    [answer] = out.outputs
    assert answer.reasoning == "hm" and answer.text == ""
    [call] = answer.tool_calls or ()
    assert call["type"] == "function" and call["function"] == {"name": "f", "arguments": '{"n": 12}'}
    [out] = llm.chat([USER], says(llm, f"hm</think>\n\n{CALL}"), use_tqdm=False)
    assert json.loads((out.outputs[0].tool_calls or [])[0]["function"]["arguments"]) == {
        "n": "12"
    }  # no schema
    # the answer goes back as it came, and its result behind it
    message = {
        "role": "assistant",
        "content": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [call],
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": "the world"}
    [out] = llm.chat([USER, message, result], says(llm, "</think>Hello"), use_tqdm=False, tools=TOOLS)
    assert out.prompt is not None
    assert '<think>hm</think><tool_call>\n<function=f>{"n": 12}</function></tool_call>' in out.prompt


def test_the_example_of_many_conversations_runs_on_an_engine(llm: LLM) -> None:
    """Each conversation calls a function, gets its result, and is answered; the calls are of all at once."""
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "tools.py"))
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    first = "hm</think><tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n"
    answers = [first + "</parameter>\n</function>\n</tool_call>", "so</think>Hello"]
    both = [
        [*tokenizer(each, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for each in answers
    ]

    def write(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        has_result = "<|turn|>tool" in tokenizer.decode(list(prompt_ids))
        forced = torch.full_like(logits, -torch.inf)
        forced[both[has_result][len(output_ids)]] = 0
        return forced

    conversations: list[Any] = [[{"role": "user", "content": f"Hello {number}"}] for number in range(5)]
    params = SamplingParams(temperature=0, max_tokens=200, logits_processors=[write])
    example["converse"](llm, conversations, params)
    for conversation in conversations:
        assert [each["role"] for each in conversation] == ["user", "assistant", "tool", "assistant"]
        _, call, result, answer = conversation
        assert call["reasoning"] == "hm" and result["tool_call_id"] == call["tool_calls"][0]["id"]
        assert (result["content"], answer["content"], answer["reasoning"]) == ("7", "Hello", "so")
    assert len({each[1]["tool_calls"][0]["id"] for each in conversations}) == 5


def test_a_chat_switches_thinking(llm: LLM) -> None:
    for on, prompt, answer in [
        (None, "<think>\n", ("Hello", "")),
        (True, "<think>\n", ("Hello", "")),
        (False, "<think>\n\n</think>\n\n", ("", "Hello")),
    ]:
        [out] = llm.chat([USER], says(llm, "Hello"), use_tqdm=False, enable_thinking=on)
        assert out.prompt is not None and out.prompt.endswith(f"assistant\n{prompt}")
        assert (out.outputs[0].reasoning, out.outputs[0].text) == answer
    llm.enqueue_chat([USER], says(llm, "Hello"), enable_thinking=False)
    [out] = llm.wait_for_completion(use_tqdm=False)
    assert (out.outputs[0].reasoning, out.outputs[0].text) == ("", "Hello")
    with pytest.raises(ValueError, match="reasoning_effort='low': the chat template reads no effort"):
        llm.chat([USER], reasoning_effort="low")
    with pytest.raises(ValueError, match=r"has enable_thinking=True \(bool\), and enable_thinking=False"):
        llm.chat([USER], chat_template_kwargs={"enable_thinking": True}, enable_thinking=False)
    with pytest.raises(TypeError, match="enable_thinking must be True, False or None, not 'yes'"):
        llm.chat([USER], enable_thinking="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reasoning_effort must be a word such as 'low', or None, not 1"):
        llm.chat([USER], reasoning_effort=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="conversation 0, message 1 has different texts in reasoning"):
        llm.chat([USER, {"role": "assistant", "content": "", "reasoning": "a", "thinking": "b"}, USER])


def test_a_new_tokenizer_has_its_own_marks(folder: Path) -> None:
    with CheckedLLM(folder, reasoning_parser="qwen3", **OPTIONS) as llm:
        tokenizer = make_tokenizer("byte_level")
        llm.tokenizer = tokenizer  # its marks are text
        [out] = llm.generate(["Hello<think>\n"], says(llm, "the</think>Hello"), use_tqdm=False)
        assert (out.outputs[0].reasoning, out.outputs[0].text) == ("the", "Hello")
        assert out.outputs[0].tool_calls is None


def test_without_parsers_the_text_has_all(folder: Path) -> None:
    with CheckedLLM(folder, **OPTIONS) as llm:
        [out] = llm.generate(["Hello<think>\n"], says(llm, "the</think>Hello"), use_tqdm=False)
        [answer] = out.outputs
        assert (answer.text, answer.reasoning, answer.tool_calls) == ("the</think>Hello", None, None)
        [*parts] = llm.stream(["Hello<think>\n"], says(llm, "the</think>Hello"), deltas=True)
        assert {part.outputs[0].reasoning for part in parts} == {None}


@pytest.mark.parametrize("name", ["reasoning_parser", "tool_parser"])
def test_wrong_parsers_are_refused_at_the_start(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{name}='qwen9' is not known; pass 'auto' or one of .*(qwen3|hermes)"
    ):
        LLM(folder, **{name: "qwen9"}, **OPTIONS)
    with pytest.raises(TypeError, match=f"{name} must be a string that is not empty, not 3"):
        LLM(folder, **{name: 3}, **OPTIONS)
    with pytest.raises(ValueError, match=f"{name} reads text, and skip_tokenizer_init=True"):
        LLM(folder, **{name: "auto"}, skip_tokenizer_init=True, **OPTIONS)
    plain = model_for(make_tokenizer("byte_level"), tmp_path / "plain")
    with pytest.raises(
        ValueError, match=f"{name}='auto' reads the model's chat template, and this model has none"
    ):
        LLM(plain, **{name: "auto"}, **OPTIONS)


# -- budgets and constraints ---------------------------------------------------------------------------------

CLOSED = "\n</think>\n\n"


def test_a_budget_closes_the_thinking_and_the_answer_follows(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    end = tokenizer.convert_tokens_to_ids("</think>")
    prompts = ["Hello<think>\n", "the world<think>\n", "I say: Hello"]
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = llm.generate(prompts, free, use_tqdm=False)
    for budget in (0, 1, 5, 20):
        params = free.clone()
        params.thinking_token_budget = budget
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, out, other in zip(prompts, outputs, plain, strict=True):
            ids, free_ids = out.outputs[0].token_ids, other.outputs[0].token_ids
            if "<think>" not in prompt:
                continue
            own = free_ids.index(end) if end in free_ids else len(free_ids)
            kept = min(budget, own)
            assert ids[:kept] == free_ids[:kept]
            if own > budget:
                assert tokenizer.decode(ids[budget : budget + 3]).startswith(CLOSED[:-2])
                assert ids.index(end) <= budget + 1
                assert out.outputs[0].num_reasoning_tokens <= budget + 2


def test_budgets_are_the_same_one_step_ahead_after_preemption_and_beside_other_rules(folder: Path) -> None:
    prompts = ["Hello<think>\n", "the world<think>\n", "I say: Hello"] * 3
    free = SamplingParams(temperature=1, seed=3, max_tokens=70, ignore_eos=True)
    params = [free.clone() for _ in prompts]
    with CheckedLLM(folder, **OPTIONS) as llm:
        start = llm.get_tokenizer().convert_tokens_to_ids("<think>")
    for row, each in enumerate(params):
        each.logit_bias = {start: 3.0} if row % 2 else None  # which opens blocks when nothing is left
        each.thinking_token_budget = (None, 0, 3, 7, 16)[row % 5]
        each.bad_words = ["the"] if row % 4 == 3 else []
        each.min_tokens = 5 * (row % 3)
    small = {"attention_backend": "reference", "kvcache_block_size": 16}
    found = []
    ahead = {"async_scheduling": True}
    for more in ({}, ahead, {**ahead, "max_num_seqs": 2}, {**ahead, "num_kvcache_blocks": 7}):
        with CheckedLLM(folder, reasoning_parser="auto", **{**OPTIONS, **small, **more}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([out.outputs[0].token_ids for out in outputs])
            assert ("num_kvcache_blocks" in more) is (llm.stats().num_preemptions > 0)
    assert found == found[:1] * 4


@pytest.mark.full
def test_replicas_separate_as_one_engine_does(folder: Path) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=12, ignore_eos=True, thinking_token_budget=4)
    found = []
    for count in (1, 2):
        with LLM(folder, reasoning_parser="auto", data_parallel_size=count, **OPTIONS) as llm:
            outputs = llm.generate(["Hello<think>\n"] * 4, params, use_tqdm=False)
            parts = list(llm.stream(["Hello<think>\n"], params, deltas=True))
            found.append([output.outputs for output in outputs])
            assert "".join(part.outputs[0].reasoning or "" for part in parts) == found[0][0][0].reasoning
    assert found[0] == found[1]


def test_a_budget_with_room_runs_as_plain_steps_do(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows need a mask only where the thinking is closed."""
    masked: list[int] = []  # places of tokens that are drawn with a mask

    def restrict(rows: list[RuledRow], bits: np.ndarray) -> None:
        masked.extend(len(row.token_ids) for row in rows)
        restrict_all(rows, bits)

    monkeypatch.setattr(planned, "restrict_all", restrict)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, thinking_token_budget=20)
    [out] = llm.generate(["Hello<think>\n"], params, use_tqdm=False)
    assert llm.tokenizer is not None
    end = llm.tokenizer.convert_tokens_to_ids("</think>")
    first = out.outputs[0].token_ids.index(end) - 1
    closed = len(llm.tokenizer(CLOSED, add_special_tokens=False)["input_ids"])
    assert first == 20 and masked == [*range(20, 20 + closed)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_constraint_begins_behind_the_thinking(folder: Path, ahead: bool) -> None:
    """The answer has text whatever the model would do: no end of the answer is drawn within the thinking."""
    pytest.importorskip("llguidance")
    choices = ["Hello", "the world"]
    with CheckedLLM(folder, reasoning_parser="auto", async_scheduling=ahead, **OPTIONS) as llm:
        params = SamplingParams(temperature=1, seed=0, max_tokens=60)
        params.structured_outputs = StructuredOutputsParams(choice=choices)
        for budget in (0, 6):
            params.thinking_token_budget = budget
            for prompt in ("Hello<think>\n", "Hello<think>\n\n</think>\n\n", "Hello"):
                [out] = llm.generate([prompt], params, use_tqdm=False)
                [answer] = out.outputs
                assert answer.text in choices and answer.finish_reason == "stop", answer
                assert answer.num_reasoning_tokens <= budget + 3
        params.thinking_token_budget = None
        [out] = llm.generate(["Hello<think>\n"], params, use_tqdm=False)
        [answer] = out.outputs  # it may think to the end
        assert answer.text in choices or (answer.finish_reason == "length" and answer.text == "")


def test_a_constraint_lets_a_family_begin_its_thinking_as_it_does(folder: Path) -> None:
    """GLM-4.5 writes a newline first: then the start mark must follow, whatever the model would do."""
    pytest.importorskip("llguidance")
    with CheckedLLM(folder, reasoning_parser="glm45", **OPTIONS) as llm:
        assert llm.tokenizer is not None
        newline, start = (llm.tokenizer.convert_tokens_to_ids(each) for each in ("Ċ", "<think>"))
        params = SamplingParams(temperature=1, seed=0, max_tokens=60, thinking_token_budget=4)
        params.structured_outputs = StructuredOutputsParams(choice=["Hello", "the world"])
        for bias, first in (({newline: 100.0}, [newline, start]), ({newline: -100.0, start: -100.0}, None)):
            params.logit_bias = bias
            [out] = llm.generate(["I say: "], params, use_tqdm=False)
            [answer] = out.outputs
            assert answer.text in ("Hello", "the world") and answer.finish_reason == "stop"
            assert (answer.token_ids[:2] == first) is (answer.num_reasoning_tokens > 0) is (first is not None)


def test_wrong_budgets_are_refused(folder: Path, llm: LLM) -> None:
    for value in (-2, 1.5, "many"):
        with pytest.raises((TypeError, ValueError), match="thinking_token_budget must be an integer"):
            SamplingParams(thinking_token_budget=value)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with (
        CheckedLLM(folder, **OPTIONS) as plain,
        pytest.raises(
            ValueError, match="thinking_token_budget=5 needs the marks of the thinking; pass reasoning"
        ),
    ):
        plain.generate(["Hello"], SamplingParams(thinking_token_budget=5), use_tqdm=False)
    with (
        CheckedLLM(folder, reasoning_parser="mistral", **OPTIONS) as other,
        pytest.raises(ValueError, match=r"needs an end mark that is one token, and .* no token '\[/THINK\]'"),
    ):
        other.generate(["Hello"], SamplingParams(thinking_token_budget=5), use_tqdm=False)
