"""vLLM's arguments: neutral values are accepted, all others are refused by name."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.checks import attempt, checked
from nanovllm.config import Config
from nanovllm.sampling_params import SEED_LIMIT, RequestOutputKind, SamplingParams
from nanovllm.text.prompts import parse_sampling_params
from nanovllm.vllm import arguments as vllm_arguments
from nanovllm.vllm.arguments import BEAM_SEARCH, CHAT, EMBED, ENGINE, GENERATE, POOLING, PROMPT, SAMPLING

TABLES = {"engine": ENGINE, "sampling": SAMPLING, "chat": CHAT, "generate": GENERATE, "prompt": PROMPT}
TABLES |= {"embed": EMBED, "beam search": BEAM_SEARCH, "pooling": POOLING}


class DType:
    """Prints like torch's dtypes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


# -- LLM -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {name: None for name in ENGINE if ENGINE[name].neutral is None or None in ENGINE[name].neutral},
        {name: absent.default for name, absent in ENGINE.items()},
        {"tokenizer": "model", "swap_space": 4, "max_seq_len_to_capture": 8192, "max_lora_rank": 16},
        {"trust_remote_code": False, "enable_lora": False, "limit_mm_per_prompt": {}, "hf_overrides": {}},
        {"limit_mm_per_prompt": {"image": 0}, "disable_log_stats": False, "optimization_level": 2},
        {"tokenizer": Path("model"), "block_size": None, "num_gpu_blocks_override": None, "hf_token": None},
        {"max_model_len": None, "seed": None, "dtype": None, "device": None, "max_num_seqs": None},
        {"enable_prefix_caching": None, "max_num_batched_tokens": None, "max_model_len": -1},
        {"max_model_len": "auto", "load_format": "safetensors", "guided_decoding_backend": "xgrammar"},
        {"structured_outputs_config": {"backend": "guidance"}},
        {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
        {"enable_chunked_prefill": False, "disable_custom_all_reduce": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_neutral_options_change_nothing(options: dict[str, Any]) -> None:
    assert Config.from_kwargs("model", **options) == Config("model")


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("quantization_config", {"bits": 4}, "quantization='fp8'"),
        ("tokenizer_mode", "slow", "as tokenizer"),
        ("limit_mm_per_prompt", {"image": 1}, "only text"),
        ("pipeline_parallel_size", 2, "data_parallel_size"),
        ("enable_lora", True, "merge"),
        ("cpu_offload_gb", 4, "smaller model"),
        ("speculative_model", "a/b", "pass speculative_config="),
        ("rope_theta", 1e6, r"use hf_overrides=\{'rope_theta': \.\.\.\}"),
        ("runner", "draft", "a model does what its files allow"),
        ("convert", "classify", "a model does what its files allow"),
        ("structured_outputs_config", {"enable_in_reasoning": True}, "each StructuredOutputsParams"),
        ("structured_outputs_config", {"disable_any_whitespace": 1}, "disable_any_whitespace"),
        ("nnodes", 2, "processes of this machine"),
        ("device_ids", [1], "CUDA_VISIBLE_DEVICES"),
        ("max_num_active_seqs", 4, "use max_num_seqs"),
        ("guided_decoding_disable_any_whitespace", True, "each StructuredOutputsParams"),
    ],
)
def test_options_of_unsupported_features(name: str, value: object, advice: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.* is not supported; .*{advice}") as caught:
        Config.from_kwargs("model", **{name: value})
    assert repr(value) in str(caught.value) and "did you mean" not in str(caught.value)


def test_other_spellings_of_a_value() -> None:
    for value, dtype in [
        ("half", "float16"),
        ("torch.bfloat16", "bfloat16"),
        ("float", "float32"),
        (DType("bfloat16"), "bfloat16"),
    ]:
        assert Config.from_kwargs("model", dtype=value).dtype == dtype
    assert Config.from_kwargs("model", kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    with pytest.raises(ValueError, match=r"dtype must be one of .* not 'int8'"):
        Config.from_kwargs("model", dtype=DType("int8"))


def test_vllms_names_of_our_options() -> None:
    for name, ours in (
        ("block_size", "kvcache_block_size"),
        ("num_gpu_blocks_override", "num_kvcache_blocks"),
    ):
        assert Config.from_kwargs("model", **{name: 16}) == Config("model", **{ours: 16})
        assert Config.from_kwargs("model", **{name: 16, ours: 16}) == Config("model", **{ours: 16})
        with pytest.raises(ValueError, match=f"{name}=16 and {ours}=32 are one option; pass one of them"):
            Config.from_kwargs("model", **{name: 16, ours: 32})
        with pytest.raises(ValueError, match=f"{ours} must be at least 1, not 0"):
            Config.from_kwargs("model", **{name: 0})
    assert "secret" not in repr(Config.from_kwargs("model", hf_token="secret"))


def test_a_typo_gets_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="'quantisation'; did you mean 'quantization'"):
        Config.from_kwargs("model", quantisation=None)
    with pytest.raises(TypeError, match="'tensor_paralel_size'; did you mean 'tensor_parallel_size'"):
        Config.from_kwargs("model", tensor_paralel_size=2)
    with pytest.raises(TypeError, match="'torch_dtype'; did you mean 'kv_cache_dtype' or 'dtype'"):
        Config.from_kwargs("model", torch_dtype="auto")


@pytest.mark.parametrize("model", [None, 5, ["a"], b"folder"])
def test_a_model_is_a_folder_or_an_id(model: Any) -> None:
    with pytest.raises(TypeError, match="model must be a folder or a Hugging Face hub id"):
        Config.from_kwargs(model)


# -- the tables ----------------------------------------------------------------------------------------------


def test_a_name_is_ours_or_in_the_table() -> None:
    assert not ENGINE.keys() & {field.name for field in fields(Config)}
    assert not SAMPLING.keys() & {field.name for field in fields(SamplingParams)}
    for table in TABLES.values():
        for name, absent in table.items():
            assert (absent.neutral is None) or absent.advice, f"{name} is refused without advice"


def test_values_of_any_kind_are_judged_without_comparing_arrays() -> None:
    absent = vllm_arguments.Absent((None, 0, []), "leave it out")
    assert absent.allows([]) and absent.allows(0.0)
    for value in (np.zeros(3), np.zeros(0), object(), [0], "0", math.nan):
        assert not absent.allows(value)


# -- SamplingParams ------------------------------------------------------------------------------------------


def test_neutral_parameters_change_nothing() -> None:
    default = SamplingParams()
    assert SamplingParams(**{name: absent.default for name, absent in SAMPLING.items()}) == default
    params = SamplingParams(
        n=1, best_of=None, stop=[], logprobs=None, min_tokens=0, presence_penalty=0, bad_words=[],
        output_kind=RequestOutputKind.CUMULATIVE, stop_token_ids=None, seed=None, detokenize=True,
    )  # fmt: skip
    assert params == default
    params.logprobs, params.best_of = None, 1
    assert params == default and params.logprobs is params.best_of is None and params.repetition_penalty == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 3),
        ("flat_logprobs", True),
        ("watermarking", True),
        ("guided_decoding", {"json": {}}),
        ("output_kind", RequestOutputKind.DELTA),
    ],
)
def test_parameters_of_unsupported_features(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.* is not supported; \w+"):
        SamplingParams(**{name: value})
    params = SamplingParams()
    with pytest.raises(ValueError, match=rf"{name}=.* is not supported; \w+"):
        setattr(params, name, value)
    assert params == SamplingParams()


def test_unknown_parameters() -> None:
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0)
    params = SamplingParams()
    with pytest.raises(AttributeError, match="'max_token'; did you mean 'max_tokens'"):
        params.max_token = 5
    with pytest.raises(AttributeError, match="max_token"):
        _ = params.max_token


@pytest.mark.parametrize(
    ("name", "field"),
    [("json_schema", "json"), *((f"guided_{name}", name) for name in ("json", "regex", "choice", "grammar"))],
)
def test_other_names_of_a_constraint(name: str, field: str) -> None:
    write = f"write SamplingParams(structured_outputs=StructuredOutputsParams({field}=...))"
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: None})
    assert str(caught.value).endswith(write)
    flag = vllm_arguments.ELSEWHERE[name].flag
    assert flag == f"""--sampling '{{"structured_outputs": {{"{field}": ...}}}}'"""


def test_keywords_only() -> None:
    """nano-vLLM begins with temperature and max_tokens, vLLM with n and presence_penalty."""
    message = r"keyword arguments only, not \(0\.6, 256\).*names, as in SamplingParams\(temperature=\.\.\.\)"
    with pytest.raises(TypeError, match=message):
        SamplingParams(0.6, 256)


def test_parameters_can_be_changed_until_they_are_used() -> None:
    params = SamplingParams(temperature=0)
    params.max_tokens, params.stop_token_ids = np.int64(7), {3}
    (used,) = parse_sampling_params(params, 1)
    params.max_tokens, params.temperature = 9, 2.0
    params.stop_token_ids.add(4)
    assert used == SamplingParams(temperature=0, max_tokens=7, stop_token_ids=[3])
    assert type(used.max_tokens) is int
    good = SamplingParams()
    params.temperature = -1
    first, second, third = parse_sampling_params([good, params, "hot"], 3)  # type: ignore[list-item]
    assert first == good and isinstance(second, ValueError) and isinstance(third, TypeError)
    assert re.match(r"sampling_params\[1\]: temperature must be .* not -1", str(second))
    assert str(third) == "sampling_params[2] must be SamplingParams, not 'hot' (str)"
    with pytest.raises(ValueError, match="sampling_params: temperature must be"):
        parse_sampling_params(params, 2)


def test_repeated_stops_and_words_count_once() -> None:
    params = SamplingParams(stop_token_ids=[7, 5, 7], bad_words=["a", "b", "a"], logprob_token_ids=[3, 3, 1])
    assert (params.stop_token_ids, params.bad_words, params.logprob_token_ids) == ([7, 5], ["a", "b"], [3, 1])


def test_one_object_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = inside.count_checks(monkeypatch)
    one, other = SamplingParams(), SamplingParams(seed=1)
    calls.clear()
    assert len({id(params) for params in parse_sampling_params(one, 10_000)}) == 1 == len(calls)
    used = parse_sampling_params([one, other] * 5_000, 10_000)
    assert used == [one, other] * 5_000 and len(calls) == 3


def test_equal_parameters_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = inside.count_checks(monkeypatch)
    many = [SamplingParams(seed=index % 3, stop=["a"], temperature=0.5) for index in range(300)]
    calls.clear()
    assert parse_sampling_params(many, 300) == many and len(calls) == 3


def test_parameters_share_a_check_only_if_equal_in_value_and_type() -> None:
    many = [SamplingParams(top_k=1, logprobs=1) for _ in range(6)]
    for params, value in zip(many, (1, 1.5, np.int64(1), np.float64(5e-324), True, "1"), strict=True):
        params.top_k = value  # 5e-324 has the bytes of the 64-bit integer 1
    first, *others = parse_sampling_params(many, 6)
    assert isinstance(first, SamplingParams)
    for index, (params, found) in enumerate(zip(many[1:], others, strict=True), 1):
        alone = attempt(checked, params)
        if isinstance(alone, Exception):
            assert str(found) == f"sampling_params[{index}]: {alone}"
        else:
            assert found == alone
    assert sum(isinstance(found, Exception) for found in others) >= 3
    arrays = [SamplingParams(), SamplingParams()]
    arrays[0].stop_token_ids, arrays[1].stop_token_ids = np.array([1, 0], np.int32), np.array([1], np.int64)
    assert [params.stop_token_ids for params in parse_sampling_params(arrays, 2)] == [[1, 0], [1]]
    arrays[0].logits_processors = np.array([1, 2])
    first, second = parse_sampling_params(arrays, 2)
    assert isinstance(first, TypeError) and isinstance(second, SamplingParams)
    processors = [SamplingParams(logits_processors=[lambda token_ids, logits: logits]) for _ in range(2)]
    used = parse_sampling_params(processors, 2)
    assert used == processors and used[0].logits_processors != used[1].logits_processors


def test_copies() -> None:
    params = SamplingParams(temperature=0.5, stop_token_ids=[1, 2], stop="a", n=1)
    copies = [params.clone(), copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))]
    assert all(other == params and other is not params for other in copies)
    copies[0].stop_token_ids.append(3)
    copies[0].stop.append("b")
    assert params.stop_token_ids == [1, 2] and params.stop == ["a"]
    assert SamplingParams(seed=1) != params
    assert repr(params).startswith("SamplingParams(temperature=0.5, top_k=0")


# -- numbers -------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(0, 1e-37),
    st.floats(0, 1),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.longdouble),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 2**64 - 1).map(np.uint64),
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@given(value=NUMBERS)
@example(1e-46)
@example(1e39)
@example(10**400)
@example(10**5000)
@example(-(10**400))
@example(math.nan)
@example(1e-45)
@example(np.longdouble("1e-400"))
@example(np.float64(3.5e38))
@example(np.uint64(2**64 - 1))
def test_what_float32_cannot_hold_is_refused(name: str, value: Any) -> None:
    try:
        used = getattr(checked(SamplingParams(**{name: value})), name)
    except ValueError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert message.startswith(f"{name} must be ") and "not " in message and len(message) < 200
        return
    narrow = np.float32(used)
    assert type(used) is float and np.isfinite(narrow) and (narrow == 0) == (used == 0) == (value == 0)
    assert narrow >= 0 and (name == "temperature" or narrow <= 1) and (name != "top_p" or narrow > 0)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("top_p", 1e-46, "1e-46"), ("temperature", 1e39, r"1e\+39"), ("temperature", 10**400, "1000000")],
)
def test_the_message_says_what_float32_can_hold(name: str, value: float, shown: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{name} must be .*float32: at (least 1\.4e-45|most 3.*), not {shown}"
    ):
        SamplingParams(**{name: value})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["top_k", "max_tokens", "seed"])
@given(value=NUMBERS.filter(lambda value: isinstance(value, (int, np.integer))))
@example(10**400)
@example(-1)
def test_integers_of_any_size(name: str, value: Any) -> None:
    least = {"top_k": -1, "max_tokens": 1, "seed": -SEED_LIMIT}[name]
    fits = int(value) >= least and (name != "seed" or int(value) < SEED_LIMIT)
    if fits:
        used = getattr(SamplingParams(**{name: value}), name)
        assert (name, value, used) == ("seed", -1, None) or (type(used) is int and used == int(value))
    else:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            SamplingParams(**{name: value})


def test_the_message_says_how_large_a_seed_may_be() -> None:
    with pytest.raises(ValueError, match=r"seed must be .* -2\*\*63 to 2\*\*63 - 1, not 9223372036854775808"):
        SamplingParams(seed=2**63)
