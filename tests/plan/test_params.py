"""Options and sampling parameters: every mistake gives an error that names the field and the value."""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from nanovllm.batch import SAMPLING_PARAMETERS
from nanovllm.config import Config
from nanovllm.extras.columns import has_filters
from nanovllm.extras.logits_processors import takes_prompt
from nanovllm.extras.structured_outputs import StructuredOutputsParams
from nanovllm.plan.sequence import SamplingTable, Sequence
from nanovllm.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -0.1}, ValueError),
        ({"temperature": math.nan}, ValueError),
        ({"temperature": math.inf}, ValueError),
        ({"temperature": "hot"}, TypeError),
        ({"top_p": 0.0}, ValueError),
        ({"top_p": 1.1}, ValueError),
        ({"top_p": math.nan}, ValueError),
        ({"min_p": -0.1}, ValueError),
        ({"min_p": 1.5}, ValueError),
        ({"top_k": -2}, ValueError),
        ({"top_k": 2.5}, TypeError),
        ({"max_tokens": 0}, ValueError),
        ({"max_tokens": -3}, ValueError),
        ({"max_tokens": 2.0}, TypeError),
        ({"max_tokens": True}, TypeError),
        ({"n": 0}, ValueError),
        ({"n": 2.0}, TypeError),
        ({"n": True}, TypeError),
        ({"n": 16_385}, ValueError),
        ({"n": 2, "temperature": 0}, ValueError),
        ({"seed": 1.5}, TypeError),
        ({"seed": -1.0}, TypeError),
        ({"seed": 2**64}, ValueError),
        ({"ignore_eos": 1}, TypeError),
        ({"include_stop_str_in_output": 1}, TypeError),
        ({"detokenize": None}, TypeError),
        ({"skip_special_tokens": "no"}, TypeError),
        ({"stop": "ab", "detokenize": False}, ValueError),
        ({"stop": 5}, TypeError),
        ({"stop": ["a", 5]}, TypeError),
        ({"stop": b"a"}, TypeError),
        ({"stop": ""}, ValueError),
        ({"stop": ["", "a"]}, ValueError),
        ({"stop_token_ids": 5}, TypeError),
        ({"stop_token_ids": "ab"}, TypeError),
        ({"stop_token_ids": [-1]}, ValueError),
        ({"stop_token_ids": ["a"]}, TypeError),
        ({"min_tokens": -1}, ValueError),
        ({"min_tokens": 1.5}, TypeError),
        ({"min_tokens": 65}, ValueError),
        ({"min_tokens": 6, "max_tokens": 5}, ValueError),
        ({"allowed_token_ids": []}, ValueError),
        ({"allowed_token_ids": [-2]}, ValueError),
        ({"allowed_token_ids": 7}, TypeError),
        ({"bad_words": "damn"}, TypeError),
        ({"bad_words": [3]}, TypeError),
        ({"bad_words": ["", "a"]}, ValueError),
        ({"structured_outputs": {"json": {}}}, TypeError),
        ({"structured_outputs": "json"}, TypeError),
        ({"repetition_penalty": 0.0}, ValueError),
        ({"repetition_penalty": -1.0}, ValueError),
        ({"repetition_penalty": math.nan}, ValueError),
        ({"repetition_penalty": math.inf}, ValueError),
        ({"repetition_penalty": "1"}, TypeError),
        ({"frequency_penalty": 2.1}, ValueError),
        ({"frequency_penalty": -2.1}, ValueError),
        ({"frequency_penalty": math.nan}, ValueError),
        ({"frequency_penalty": True}, TypeError),
        ({"presence_penalty": 3}, ValueError),
        ({"presence_penalty": -math.inf}, ValueError),
        ({"presence_penalty": None}, TypeError),
        ({"logprobs": -2}, ValueError),
        ({"logprobs": 1.5}, TypeError),
        ({"logprobs": False}, TypeError),
        ({"prompt_logprobs": -2}, ValueError),
        ({"prompt_logprobs": "all"}, TypeError),
        ({"max_tokens": -1, "prompt_logprobs": 0}, ValueError),
        ({"logit_bias": 5}, TypeError),
        ({"logits_processors": 5}, TypeError),
        ({"logits_processors": "5"}, TypeError),
        ({"logits_processors": [5]}, TypeError),
    ],
    ids=str,
)
def test_wrong_sampling_params(options: dict[str, Any], error: type[Exception]) -> None:
    (name, value) = next(iter(options.items()))
    shown = value[0] if isinstance(value, list) and value else value
    with pytest.raises(error) as caught:
        SamplingParams(**options)
    assert name in str(caught.value) and str(shown) in str(caught.value)


@pytest.mark.parametrize(
    ("bias", "error", "named"),
    [
        ([5], TypeError, "must be a dict of token ids and numbers, not [5]"),
        ({"a": 1.0}, TypeError, "a token id of logit_bias must be an integer of at least 0, not 'a'"),
        ({1.5: 1.0}, TypeError, "a token id of logit_bias must be an integer of at least 0, not 1.5"),
        ({True: 1.0}, TypeError, "not True"),
        ({-1: 1.0}, ValueError, "a token id of logit_bias must be an integer of at least 0, not -1"),
        ({5: "x"}, TypeError, "logit_bias[5] must be a number, finite, or -inf, not 'x'"),
        ({5: math.nan}, ValueError, "logit_bias[5] must be"),
        ({5: math.inf}, ValueError, "logit_bias[5] must be finite, or -inf"),
        ({5: 1e39}, ValueError, "not 1e+39"),
    ],
    ids=str,
)
def test_wrong_logit_bias(bias: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error) as caught:
        SamplingParams(logit_bias=bias)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [lambda logits: logits, lambda a, b, c, d: d, dict, max],
    ids=["one", "four", "class", "built_in"],
)
def test_functions_that_cannot_process_logits(function: Any) -> None:
    with pytest.raises(TypeError, match=r"logits_processors must take \(output ids, logits\) or"):
        SamplingParams(logits_processors=[function])


def test_functions_that_can() -> None:
    functions = [lambda ids, logits: logits, lambda *all: all, lambda prompt, ids, logits: logits]
    assert SamplingParams(logits_processors=functions).logits_processors == functions
    assert [takes_prompt(function) for function in functions] == [False, False, True]


def test_right_biases_and_penalties() -> None:
    assert SamplingParams(logit_bias={"7": 2, np.int64(3): -math.inf}).logit_bias == {7: 2.0, 3: -math.inf}
    assert SamplingParams(logit_bias=None).logit_bias == SamplingParams(logit_bias={}).logit_bias == {}
    params = SamplingParams(frequency_penalty=-2, presence_penalty=2, repetition_penalty=0.01)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (-2, 2, 0.01)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert SamplingParams(logprobs=-1, prompt_logprobs=10**9).prompt_logprobs == 10**9


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_are_of_characters(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*, without lone surrogates, not 'a\\ud800'"):
        SamplingParams(**{name: ["b", "a\ud800"]})


def test_right_sampling_params() -> None:
    params = SamplingParams(temperature=0, top_k=np.int64(5), top_p=1, min_p=0, seed=-2, stop_token_ids={3})
    assert params.stop_token_ids == [3] and params.seed == -2
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert [SamplingParams(stop=stop).stop for stop in (None, "ab", ("a", "b"))] == [[], ["ab"], ["a", "b"]]
    assert SamplingParams(n=None).n == 1
    assert SamplingParams(seed=-1).seed is SamplingParams(seed=np.int64(-1)).seed is None
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert params.logprobs == params.prompt_logprobs == 1 and type(params.logprobs) is int
    assert SamplingParams(min_tokens=None).min_tokens == 0
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    assert SamplingParams(allowed_token_ids=np.array([4, 2])).allowed_token_ids == [4, 2]
    assert SamplingParams(bad_words=("a", "b")).bad_words == ["a", "b"]


class Answer(BaseModel):
    year: int


@pytest.mark.parametrize(
    "schema", [Answer.model_json_schema(), json.dumps(Answer.model_json_schema()), Answer]
)
def test_schemas_are_kept_as_texts(schema: Any) -> None:
    params = StructuredOutputsParams(json=schema)
    assert isinstance(params.json, str) and json.loads(params.json) == Answer.model_json_schema()
    assert {params: 1}[StructuredOutputsParams(json=Answer)] == 1
    assert SamplingParams(structured_outputs=params).clone().structured_outputs == params


TAG = {"structures": [{"begin": "<f", "schema": {}, "end": "f>"}], "triggers": ["<"]}


def test_one_constraint() -> None:
    assert json.loads(str(StructuredOutputsParams(structural_tag=TAG).structural_tag)) == TAG
    assert StructuredOutputsParams(choice=["b", "a"]).choice == ("b", "a")
    assert StructuredOutputsParams(json_object=True, whitespace_pattern=" ?").json is None
    assert StructuredOutputsParams(json={}, json_object=False).json == "{}"


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({}, ValueError, "not none"),
        ({"json_object": False}, ValueError, "not none"),
        ({"json": {}, "regex": "a"}, ValueError, "json and regex"),
        ({"choice": ["a"], "json_object": True}, ValueError, "choice and json_object"),
        ({"json": "{'a': 1}"}, ValueError, "{'a': 1}"),
        ({"json": "[1]"}, ValueError, "[1]"),
        ({"json": 5}, TypeError, "5"),
        ({"json": {"const": {1}}}, TypeError, "{1}"),
        ({"json": {"const": math.nan}}, ValueError, "nan"),
        ({"json_object": "yes"}, TypeError, "yes"),
        ({"regex": 5}, TypeError, "5"),
        ({"regex": ""}, ValueError, "regex"),
        ({"choice": "yes"}, TypeError, "yes"),
        ({"choice": ["a", 5]}, TypeError, "5"),
        ({"choice": []}, ValueError, "choice"),
        ({"choice": ["a", ""]}, ValueError, "choice 2 is '', which says nothing; leave it out"),
        ({"choice": ["a", "b", "a"]}, ValueError, "the choice 'a' comes twice; name it once"),
        ({"choice": ["a", "\ud800"]}, ValueError, "choice 2 has a lone surrogate"),
        ({"grammar": b"a"}, TypeError, "grammar"),
        ({"structural_tag": 5}, TypeError, "5"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, ValueError, "structures"),
        (
            {"structural_tag": {"structures": [{"begin": "<f", "end": ""}], "triggers": ["<"]}},
            ValueError,
            "schema",
        ),
        ({"structural_tag": TAG | {"triggers": ["<g"]}}, ValueError, "'<f' begins with none"),
        ({"structural_tag": TAG | {"triggers": [""]}}, ValueError, "triggers"),
        ({"json": {}, "disable_any_whitespace": 1}, TypeError, "disable_any_whitespace"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, ValueError, "contradicts"),
    ],
    ids=str,
)
def test_wrong_constraints(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error) as caught:
        StructuredOutputsParams(**options)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_num_seqs": 0}, ValueError),
        ({"max_num_seqs": 1.5}, TypeError),
        ({"max_num_batched_tokens": -1}, ValueError),
        ({"max_model_len": "4096"}, TypeError),
        ({"tensor_parallel_size": 0}, ValueError),
        ({"kvcache_block_size": 0}, ValueError),
        ({"num_kvcache_blocks": True}, TypeError),
        ({"num_threads": 0}, ValueError),
        ({"num_threads": 1.5}, TypeError),
        ({"gpu_memory_utilization": 0}, ValueError),
        ({"gpu_memory_utilization": 1.01}, ValueError),
        ({"gpu_memory_utilization": "0.9"}, TypeError),
        ({"enforce_eager": "yes"}, TypeError),
        ({"async_scheduling": 1}, TypeError),
        ({"deterministic": 1}, TypeError),
        ({"deterministic": True, "attention_backend": "flash_attn"}, ValueError),
        ({"deterministic": True, "attention_backend": "reference"}, ValueError),
        ({"deterministic": True, "tensor_parallel_size": 2}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"load_format": "gguf"}, ValueError),
        ({"attention_backend": "xformers"}, ValueError),
        ({"device": "tpu"}, ValueError),
        ({"device": "cuda:x"}, ValueError),
        ({"device": "cpu:1"}, ValueError),
        ({"seed": -1}, ValueError),
        ({"tokenizer": 5}, TypeError),
        ({"tokenizer": "other", "skip_tokenizer_init": True}, ValueError),
        ({"revision": 5}, TypeError),
        ({"tokenizer_revision": ["main"]}, TypeError),
        ({"trust_remote_code": "yes"}, TypeError),
        ({"hf_overrides": ["rope_theta"]}, TypeError),
        ({"override_generation_config": "top_p"}, TypeError),
        ({"download_dir": 5}, TypeError),
        ({"kv_cache_memory_bytes": 0}, ValueError),
        ({"kv_cache_memory_bytes": 2**30, "num_kvcache_blocks": 5}, ValueError),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Config.from_kwargs("model", **options)
    for name, value in options.items():
        assert name in str(caught.value) and str(value) in str(caught.value)


def test_numbers_of_numpy() -> None:
    config = Config.from_kwargs(
        "model", max_model_len=np.int64(5), gpu_memory_utilization=np.float64(0.5), enforce_eager=np.True_
    )
    assert config == Config("model", max_model_len=5, gpu_memory_utilization=0.5, enforce_eager=True)
    assert type(config.max_model_len) is int and type(config.enforce_eager) is bool


def test_unknown_options_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="'max_seqs'; did you mean 'max_num_seqs'"):
        Config.from_kwargs("model", max_seqs=3)
    with pytest.raises(TypeError, match="'zzz'; it knows: model, tensor_parallel_size"):
        Config.from_kwargs("model", zzz=3)
    with pytest.raises(TypeError, match=r"LLM\(\) got 'temperature'; pass it to generate\(\) as SamplingPar"):
        Config.from_kwargs("model", temperature=0.5)
    with pytest.raises(ValueError, match="model must be a folder"):
        Config.from_kwargs("")


def test_sampling_columns_of_greedy_rows_are_neutral() -> None:
    table = SamplingTable(6)
    params = [
        SamplingParams(temperature=0, top_k=7, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.2),
    ]
    for slot, (param, seed) in enumerate(zip(params, (1, 2, 3, -4), strict=True)):
        seq = Sequence(slot, array("i", [5]), param, seed)
        seq.slot = slot
        table.set(seq)
    positions = np.array([7, 8, 9])
    plain = table.take(np.array([1, 0]), positions[:2])
    assert plain.temperature.tolist() == [0.5, 0] and plain.seeds.tolist() == [2, 1]
    assert plain.positions.tolist() == [7, 8] and not has_filters(plain)
    assert plain.top_k.tolist() == plain.min_p.tolist() == [0, 0]
    assert plain.top_p.tolist() == [1, 1]
    mixed = table.take(np.array([3, 2, 0]), positions)
    assert mixed.top_k.tolist() == [0, 3, 0] and mixed.seeds.tolist() == [-4, 3, 1]
    assert np.allclose(mixed.top_p, [0.9, 1, 1]) and np.allclose(mixed.min_p, [0.2, 0, 0])
    assert has_filters(mixed) and has_filters(table.take(np.array([2]), positions[:1]))
    for name, column in SAMPLING_PARAMETERS.items():
        assert name == "temperature" or getattr(SamplingParams(), name) == column.neutral


@pytest.mark.parametrize("top_k", [-1, 0, 5, 2**31, 10**400])
def test_a_top_k_of_any_size_fits_its_column(top_k: int) -> None:
    table, seq = SamplingTable(1), Sequence(0, array("i", [5]), SamplingParams(temperature=1, top_k=top_k), 1)
    seq.slot = 0
    table.set(seq)
    columns = table.take(np.array([0]), np.array([3]))
    assert columns.top_k.tolist() == [min(max(top_k, 0), 2**31 - 1)]
    assert has_filters(columns) == (top_k > 0)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


# Python 3.13 reads deeper JSON than the other versions
TOO_DEEP = "json (is nested too deeply; it may have 100 levels|has 101 levels, and may have 100)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"choice": ["a"] * 200_000}, "choice has 200,000 strings, and may have 10,000"),
        (lambda: {"choice": ["a" * 2**20, "b"]}, "choice has 1,048,577 characters, and may have 1,048,576"),
        (lambda: {"json": nested(3000)}, TOO_DEEP),
        (lambda: {"json": nested(60)}, "json has 101 levels, and may have 100"),
        (lambda: {"json": '{"a":' * 3000 + "1" + "}" * 3000}, TOO_DEEP),
        (
            lambda: {"json": {"properties": {str(key): {} for key in range(1001)}}},
            "1,001 properties of one",
        ),
        (lambda: {"regex": "(" * 101 + "a" + ")" * 101}, "regex has 101 nested brackets, and may have 100"),
        (lambda: {"grammar": "start: " + "[" * 101}, "grammar has 101 nested brackets"),
        (lambda: {"regex": "a" * (2**20 + 1)}, "regex has 1,048,577 characters"),
        (
            lambda: {
                "structural_tag": {
                    "structures": [{"begin": "[f", "schema": {}, "end": ""}] * 3000,
                    "triggers": ["[f"],
                }
            },
            "structural_tag has 3,000 structures x triggers, and may have 1,000",
        ),
    ],
)
def test_constraints_have_limits(make: Any, message: str) -> None:
    """Nothing is compiled: these are checks of the parameters alone."""
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**make())
    assert StructuredOutputsParams(regex=r"\(" * 200).regex


def test_stop_strings_and_bad_words_have_limits() -> None:
    with pytest.raises(ValueError, match="stop has 100,000 strings, and may have 1,000; pass fewer"):
        SamplingParams(stop=["a"] * 100_000)
    with pytest.raises(ValueError, match="bad_words has 50,000 strings, and may have 5,000; pass fewer"):
        SamplingParams(bad_words=["a"] * 50_000)
    with pytest.raises(ValueError, match="stop has 70,000 characters, and may have 65,536; pass less"):
        SamplingParams(stop=["a" * 70_000])
    with pytest.raises(ValueError, match="bad_words has 300,000 characters, and may have 262,144; pass less"):
        SamplingParams(bad_words=["a" * 100, "b" * 299_900])
