"""Prompts in every unambiguous form are accepted; all others are refused with index, value and fix."""

from __future__ import annotations

import array
import copy
import pickle
from collections import UserDict
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm import TextPrompt, TokensPrompt
from nanovllm.answers import CompletionOutput, Logprob, RequestOutput, changed, unlisted
from nanovllm.checks import pack_token_ids, raise_first
from nanovllm.extras.columns import LogprobColumns
from nanovllm.extras.logprobs import LogprobDicts
from nanovllm.extras.outputs import EmbeddingOutput, EmbeddingRequestOutput
from nanovllm.order.ids import Ids
from nanovllm.text import prompts as forms
from nanovllm.text.prompts import Prompt, parse_prompt
from nanovllm.vllm.arguments import PROMPT

LONG = 10**5000  # Python refuses to print it


class Tensor:
    """The part of torch.Tensor that prompts use."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values


class Table:
    """The part of pandas.DataFrame that prompts use."""

    def keys(self) -> list[str]:
        return ["question"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


def parse_prompts(prompts: Any) -> list[Prompt]:
    """The rows; raises the error of the first bad one."""
    rows = forms.parse_prompts(prompts)
    raise_first(rows)
    return rows


def ids(prompts: Any) -> list[list[int]]:
    return [list(prompt.token_ids) for prompt in parse_prompts(prompts)]


@pytest.mark.parametrize("wrap", [Tensor, np.array, lambda values: values], ids=["tensor", "array", "list"])
def test_arrays_and_tensors(wrap: Any) -> None:
    assert ids(wrap([5, 6, 7])) == [[5, 6, 7]]
    assert ids(wrap([[5, 6], [7, 8]])) == [[5, 6], [7, 8]]
    assert ids([wrap([5, 6]), wrap([7])]) == [[5, 6], [7]]
    assert ids({"prompt_token_ids": wrap([5])}) == [[5]]
    assert all(type(token_id) is int for token_id in ids(wrap([5, 6]))[0])


def test_iterables() -> None:
    assert ids(token_id for token_id in [5, 6]) == ids(range(5, 7)) == ids((5, 6)) == [[5, 6]]
    assert ids([i, i] for i in (5, 6)) == [[5, 5], [6, 6]]
    assert ids([(i for i in (5, 6)), array.array("l", [7])]) == [[5, 6], [7]]
    assert ids([np.int64(5), np.int32(6)]) == [[5, 6]]
    assert [prompt.text for prompt in parse_prompts(text for text in "ab")] == ["a", "b"]
    assert [prompt.text for prompt in parse_prompts({"x": "a", "y": "b"}.values())] == ["a", "b"]
    assert [prompt.text for prompt in parse_prompts(np.array(["a", "b"]))] == ["a", "b"]
    assert parse_prompts([]) == parse_prompts(iter([])) == []


def test_ids_of_a_narrow_type_among_others() -> None:
    assert ids([300, np.uint8(5)]) == [[300, 5]]
    assert ids([[2**31 - 1, 2**31 - 1, np.int32(5)], [6]]) == [[2**31 - 1, 2**31 - 1, 5], [6]]


def test_vllms_names_of_dictionaries() -> None:
    assert parse_prompts(TextPrompt(prompt="a")) == [Prompt("a", None)]
    prompts = [TokensPrompt(prompt_token_ids=[5]), TokensPrompt(prompt_token_ids=[6], prompt="b")]
    found = [(prompt.text, [*prompt.token_ids]) for prompt in parse_prompts(prompts)]
    assert found == [(None, [5]), ("b", [6])]


def test_vllms_other_keys_of_dictionaries() -> None:
    nothing = {name: absent.default for name, absent in PROMPT.items()}
    assert parse_prompts({"prompt": "a", "multi_modal_data": {}}) == [Prompt("a", None)]
    assert ids([{"prompt_token_ids": [5], **nothing}]) == [[5]]


@pytest.mark.parametrize("kind", [dict, UserDict], ids=["dict", "BatchEncoding"])
@pytest.mark.parametrize("wrap", [Tensor, np.array, lambda values: values], ids=["tensor", "array", "list"])
def test_what_a_tokenizer_returns(kind: Any, wrap: Any) -> None:
    one = kind({"input_ids": wrap([5, 6]), "attention_mask": wrap([1, 1]), "token_type_ids": wrap([0, 0])})
    assert ids(one) == ids([one]) == [[5, 6]]
    padded = {"input_ids": wrap([[0, 5, 6], [7, 8, 9]]), "attention_mask": wrap([[0, 1, 1], [1, 1, 1]])}
    assert ids(kind(padded)) == [[5, 6], [7, 8, 9]]
    row = kind({"input_ids": wrap([[5, 6]])})
    assert ids(row) == ids([row]) == [[5, 6]]
    assert list(parse_prompt(row, "the prompt").token_ids) == [5, 6]
    with pytest.raises(ValueError, match=r"prompts\[1\]\['input_ids'\] holds 2 prompts; pass the dictionary"):
        parse_prompts([[5], kind(padded)])


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (5, TypeError, "prompts must be a prompt or a list of prompts, not 5"),
        (None, TypeError, "prompts must be a prompt or a list of prompts, not None"),
        (b"abc", TypeError, "prompts must be .* not b'abc'"),
        ({5, 6}, TypeError, r"prompts must be .* not \{5, 6\}"),
        (np.int64(5), TypeError, "prompts must be .* not 5"),
        (np.array([]), ValueError, "the prompt is empty"),
        (np.array([1.5, 2]), TypeError, r"the prompt: token id at position 0 must be an integer, not 1\.5"),
        (np.array([True]), TypeError, "the prompt: token id at position 0 must be an integer, not True"),
        (np.array([[[5]]]), TypeError, r"prompts\[0\]: token id at position 0 must be an integer, not \[5\]"),
        (["a", 5], TypeError, r"prompts\[1\] must be a string, a list of token ids or a dictionary, not 5"),
        (["a", LONG], TypeError, r"prompts\[1\] must be a string, .* not (a value too long to print|1000)"),
        ([[5], {5, 6}], TypeError, r"prompts\[1\] must be a string, .* not \{5, 6\}"),
        (["a", "b\ud800c"], ValueError, r"prompts\[1\] has a lone surrogate, .* at position 1.*repair it"),
        ({"prompt": "\udc00"}, ValueError, r"the prompt\['prompt'\] has a lone surrogate"),
        ([{"prompt": None}], TypeError, r"prompts\[0\]\['prompt'\] must be a string, not None"),
        ({"text": "x"}, ValueError, r"the prompt must have the key 'prompt' or .* not \['text'\]"),
        ([{"role": "user", "content": "x"}], ValueError, "a conversation goes to chat"),
        (Table(), TypeError, "prompts must be a prompt or a list of prompts, not .*Table"),
        ({5: "x"}, ValueError, r"the prompt must have the key .* not \['5'\]"),
        ({}, ValueError, r"the prompt must have the key .* not \[\]"),
        ({"prompt": "a", 5: "x"}, TypeError, "unknown argument '5'; it knows: prompt, prompt_tok"),
        ({"prompt": "a", "prompt_ids": [5]}, TypeError, "argument 'prompt_ids'; did you mean 'prompt"),
        (["a", {"prompt": "a", "cache_salt": "x"}], ValueError, r"prompts\[1\]: cache_salt='x' is not supp"),
        ({"prompt": "a", "multi_modal_data": {"image": 5}}, ValueError, "multi_modal_data=.* only text is"),
        ({"input_ids": [5], "pixel_values": []}, ValueError, r"has 'input_ids'.*\['pixel_values'\]"),
        ({"input_ids": []}, ValueError, "row 0 is empty"),
        ({"input_ids": "ab"}, TypeError, r"the prompt\['input_ids'\] must be a list of token ids, not 'ab'"),
        (
            {"input_ids": [[5, 6]], "attention_mask": [[1]]},
            ValueError,
            "row 0 has 2 input_ids and 1 attention_mask",
        ),
    ],
)  # fmt: skip
def test_ambiguous_prompts(prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_prompts(prompts)


IDS = st.integers(0, 300) | st.sampled_from(
    [-1, -(2**31), -(2**31) - 1, 2**31 - 1, 2**31, 2**62, 2**63, 2**600]
)
OTHERS = st.sampled_from(
    [True, False, None, 5.0, "5", b"i", (5,), [], [5], {}, np.int64(5), IntEnum("Two", "A B").A]
)
ROWS = st.lists(st.lists(IDS | OTHERS, max_size=5) | st.lists(IDS, min_size=1, max_size=40), min_size=3)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1), min_size=3) | ROWS)
@example([[105] * 40, [0x5B], [0x69, 0x5B696969]])  # the kinds of marshal's values, as values
@example([[5, [6, 7]], [8], [9]])
@example([[5], [6], [5, 6.5]])
def test_lists_of_token_ids_are_packed_as_one_by_one(rows: list[list[Any]]) -> None:
    """The same prompts, of the same types, and the same errors; ids that fit are packed at once."""
    found, singly = forms.parse_prompts(rows), forms.parse_prompts(iter(rows))
    assert [*map(str, found)] == [*map(str, singly)] and len(found) == len(rows)
    assert [type(getattr(each, "token_ids", 0)) for each in found] == [
        type(getattr(each, "token_ids", 0)) for each in singly
    ]
    fit = all(row and all(type(each) is int and -(2**31) <= each < 2**31 for each in row) for row in rows)
    assert isinstance(found, Ids) is fit
    if isinstance(found, Ids):
        assert [list(each) for each in found.ids] == rows
        assert found.highest.tolist() == [max(each % 2**32 for each in row) for row in rows]


def test_many_token_ids_are_packed_in_portions() -> None:
    rows = [[row % 300] * (1 + row % 700) for row in range(500)] + [[7] * 100_000]
    found = forms.parse_prompts(rows)
    assert isinstance(found, Ids) and [list(each) for each in found.ids] == rows
    assert found[-1].where == "prompts[500]" and [each.token_ids for each in found[3:5]] == found.ids[3:5]
    rows[499][300] = 2**31
    assert isinstance(forms.parse_prompts(rows), list)


def test_a_token_id_that_cannot_be_printed_is_named_by_its_position() -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: token id .* at position 1 is outside"):
        pack_token_ids([5, LONG], 10, "prompts[0]")


# -- outputs -------------------------------------------------------------------------------------------------


def test_an_output_is_a_mapping() -> None:
    output = RequestOutput("0", "p", [1], None, [CompletionOutput(0, "text", [5, 6], finish_reason="length")])
    assert isinstance(output, Mapping) and len(output) == 3 and output
    assert output.finished is True and output.outputs[0].finished() is True
    assert "text" in output and "logprobs" not in output and None not in output
    assert list(output) == list(output.keys()) == ["text", "token_ids", "finish_reason"]
    assert dict(output) == {**output} == dict(output.items())
    assert list(output.values()) == ["text", [5, 6], "length"]
    assert output.get("text") == "text" and output.get("logprobs") is None and output.get("x", 5) == 5
    with pytest.raises(
        KeyError, match="'logprobs'; a RequestOutput has 'text', 'token_ids', 'finish_reason'"
    ):
        output["logprobs"]
    assert pickle.loads(pickle.dumps(output)) == output == copy.deepcopy(output)
    assert repr(output).startswith("RequestOutput(request_id='0', prompt='p'")


def test_the_list_of_an_outputs_prompt_is_made_when_it_is_first_read() -> None:
    ids = array.array("i", [5, 70_000])
    one, other = (RequestOutput("0", None, ids, None, []) for _ in range(2))
    assert len(unlisted(one, "prompt_token_ids")) == 2 and unlisted(one, "prompt_token_ids") is ids
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.prompt_token_ids == [5, 70_000] and type(one.prompt_token_ids) is list
    one.prompt_token_ids.append(6)
    assert one.prompt_token_ids == [5, 70_000, 6] and other.prompt_token_ids == ids.tolist() == [5, 70_000]


def test_outputs_are_made_and_changed_as_vllms() -> None:
    """Scripts create outputs for their own tests and add their own results."""
    logprobs = [{5: Logprob(-0.5, 1, " a")}]
    completion = CompletionOutput(0, " a", [5], -0.5, logprobs)
    assert (completion.cumulative_logprob, completion.logprobs) == (-0.5, logprobs)
    assert not completion.finished()
    output = RequestOutput("0", "p", [1], None, [completion], False)
    assert output.outputs == [completion] and output.finished is False
    completion.text, output.label = completion.text.strip(), "good"
    assert output["text"] == "a" and copy.deepcopy(output).label == "good"
    named = {"cumulative_logprob": None, "logprobs": None, "finish_reason": "length"}
    assert CompletionOutput(index=0, text="", token_ids=[], **named).finished()


def test_what_vllms_outputs_have_beside_is_none() -> None:
    more: dict[str, Any] = {"lora_request": object(), "a_name_of_a_later_version": 5}
    output = RequestOutput("0", "p", [1], None, [CompletionOutput(0, "a", [5])], False, None, **more)
    for name in ("lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params"):
        assert getattr(output, name) is None
    for name in ("routed_experts", "lora_request", "sampling_mask"):
        assert getattr(output.outputs[0], name) is None
    with pytest.raises(AttributeError, match="RequestOutput has no attribute 'a_name_of_a_later_version'"):
        _ = output.a_name_of_a_later_version


def test_logprobs_become_a_list_when_they_are_read() -> None:
    columns = LogprobColumns(np.full((2, 1), -0.5, np.float32), np.array([[5], [6]]), np.array([1, 2]))
    lazy = LogprobDicts(columns, None)
    completion = CompletionOutput(0, "a", [5, 6], -1.0, lazy)  # type: ignore[arg-type]
    copied = changed(completion, text="b")
    assert unlisted(copied, "logprobs") is lazy and copied.text == "b" and completion.text == "a"
    assert type(copied.logprobs) is list and copied.logprobs == [{5: Logprob(-0.5, 1)}, {6: Logprob(-0.5, 2)}]
    assert copied.logprobs is copied.logprobs and unlisted(completion, "logprobs") is lazy
    whole = pickle.loads(pickle.dumps(completion))
    assert whole == completion and type(whole.logprobs) is list


def test_an_embedding_is_shown_by_its_size() -> None:
    output = EmbeddingRequestOutput("0", EmbeddingOutput([0.5] * 128), [1, 2], 0, True)
    assert output.finished and output.outputs.hidden_size == 128
    assert "EmbeddingOutput(hidden_size=128)" in repr(output) and "0.5" not in repr(output)
