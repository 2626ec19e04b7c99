"""The calls of `LLM` that scripts for vLLM make, apart from generate and chat."""

from __future__ import annotations

import gc
import os
import random
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
import torch
from checked_llm import BLOCK, make_tiny
from invariants import check_scheduler
from tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM

import nanovllm
from nanovllm import (
    LLM,
    BeamSearchParams,
    EngineClosedError,
    ModelLoadError,
    SamplingParams,
    StructuredOutputsParams,
    demo_model_path,
)
from nanovllm.jobs.main import parse_args, parse_sampling
from nanovllm.jobs.openai_batch import read_body
from nanovllm.vllm.arguments import ELSEWHERE, EMBED, GENERATE

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_the_tokenizer() -> None:
    with LLM(demo_model_path(), device="cpu") as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is llm.tokenizer is llm.llm_engine.get_tokenizer()
        ids = tokenizer("Hello")["input_ids"]
        [by_text, by_ids] = llm.generate(["Hello", ids], GREEDY, use_tqdm=False)
        assert by_text.prompt_token_ids == ids and by_text["token_ids"] == by_ids["token_ids"]


def test_what_a_caller_hands_over_stays_as_it_is() -> None:
    """Options, prompts, parameters, conversations, tools and weights; outputs share no list with them; the
    process keeps its random state, threads and environment."""
    options: dict[str, Any] = {
        "hf_overrides": {"rope_theta": 1e4},
        "override_generation_config": {"top_k": 5},
    }
    ids, params = (
        [5, 6, 7],
        SamplingParams(max_tokens=3, stop=["z"], logit_bias={5: 1.0}, bad_words=["q"], n=2),
    )
    prompts: list[Any] = [ids, {"prompt_token_ids": ids}, "Spell AB.", {"prompt": "A"}]
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Spell AB."}], "tool_calls": []},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
    ]
    variables, tools = {"enable_thinking": False}, [{"type": "function", "function": {"name": "f"}}]
    pairs = [("Spell", " AB"), (ids, [8])]
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    weights = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).state_dict()
    handed = (options, ids, params, prompts, chat, variables, tools, pairs, beams)
    before, own = deepcopy(handed), {name: weight.clone() for name, weight in weights.items()}

    def state() -> tuple[Any, ...]:
        numbers = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        return (
            *numbers,
            dict(os.environ),
            torch.get_num_threads(),
            gc.get_threshold(),
            torch.get_default_dtype(),
        )

    process = state()
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=100, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.prompt_token_ids is not ids for output in outputs)
        one, other = outputs[0].outputs
        assert one.token_ids is not other.token_ids
        llm.get_default_sampling_params().top_k = 9
        assert llm.get_default_sampling_params().top_k == 5
        template = "{{ messages[0]['content'] }}"
        llm.chat(chat, params, False, chat_template=template, chat_template_kwargs=variables, tools=tools)
        list(llm.stream(prompts, params))
        llm.score_pairs(pairs, False)
        llm.embed(prompts, False)
        llm.beam_search([ids], beams)
        llm.update_weights(weights)
        places = {weight.data_ptr() for weight in weights.values()}
        assert not any(weight.data_ptr() in places for weight in inside.model(llm).parameters())
        llm.sleep(level=2)
    assert handed == before and all(torch.equal(weights[name], own[name]) for name in own)
    assert state() == process


def test_the_tokenizers_end_of_sequence_token_ends_an_answer_too(tmp_path: Path) -> None:
    """As in vLLM and nano-vLLM: in many fine-tuned models, config.json still has the EOS token of the base
    model.
    """
    params = SamplingParams(temperature=0, max_tokens=40)
    (tmp_path / "generation_config.json").write_text("{}")
    options: dict[str, Any] = {"hf_overrides": {"eos_token_id": 511}, "generation_config": str(tmp_path)}
    with LLM(demo_model_path(), device="cpu", **options) as llm:
        eos = llm.get_tokenizer().eos_token_id
        assert eos not in llm.model_config.eos_token_ids
        [output] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
        assert output["token_ids"][-1] == eos and eos not in output["token_ids"][:-1]
        assert (output["finish_reason"], output.outputs[0].stop_reason) == ("stop", None)
        params.ignore_eos = True
        [output] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
        assert eos in output["token_ids"][:-1] and output["finish_reason"] == "length"
        [beams] = llm.beam_search("What is 2 + 3?", BeamSearchParams(beam_width=2, max_tokens=14))
        assert beams.sequences[0].stop_reason == eos
        whole = BeamSearchParams(beam_width=2, max_tokens=14, include_stop_str_in_output=True)
        [included] = llm.beam_search("What is 2 + 3?", whole)
        stop = llm.get_tokenizer().decode([eos])
        assert included.sequences[0].text == f"{beams.sequences[0].text}{stop}"


def test_without_a_tokenizer(model: Path) -> None:
    with make_tiny(model) as llm, pytest.raises(ValueError, match="because of skip_tokenizer_init"):
        llm.get_tokenizer()


def test_dummy_weights_need_a_tokenizer_too(model: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer .* pass skip_tokenizer_init=True"):
        LLM(str(model), device="cpu", load_format="dummy")


def test_facts_that_scripts_read(model: Path) -> None:
    with make_tiny(model, max_model_len=40) as llm:
        config = llm.llm_engine.model_config
        assert (config.max_model_len, config.vocab_size, config.dtype) == (40, VOCAB_SIZE, "float32")
    with make_tiny(model, max_model_len=40, num_kvcache_blocks=3) as llm:
        longest = llm.llm_engine.model_config.max_model_len
        assert longest == 3 * BLOCK, "what the KV cache holds"
        assert len(llm.generate([5] * (longest - 1), GREEDY, use_tqdm=False)[0]["token_ids"]) == 1
        with pytest.raises(ValueError, match="at most 23 leave room"):
            llm.generate([5] * longest, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_reset_prefix_cache(model: Path, run_ahead: bool) -> None:
    prompt = [7] * (2 * BLOCK + 3)
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        [first] = llm.generate(prompt, GREEDY, use_tqdm=False)
        [again] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(prompt) - 1)
        assert llm.reset_prefix_cache() is True
        check_scheduler(inside.scheduler(llm))
        [reset] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert reset.num_cached_tokens == 0
        llm.add_request(prompt, GREEDY)
        llm.step()
        assert llm.reset_prefix_cache() is False
        [again] = [output for _ in range(8) for output in llm.step()]
        assert again.num_cached_tokens == len(prompt) - 1, "nothing was done"
        assert llm.reset_prefix_cache() is True
        assert first["token_ids"] == again["token_ids"] == reset["token_ids"]


ATTRIBUTES = ("get_stats",)  # of LLM
COMMANDS = ("serve", "chat")
CLASSES = [name for name in ELSEWHERE if name[0].isupper()]
ARGUMENTS = set(ELSEWHERE) - {*ATTRIBUTES, *COMMANDS, *CLASSES, "__call__", "from_pretrained", "text"}
JOB = ["run", "in.jsonl", "-o", "out.jsonl", "--model", "m"]


def refusal(call: Callable[[], object]) -> str:
    errors = TypeError, ValueError, AttributeError, ImportError, ArgumentTypeError
    with pytest.raises(errors) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with make_tiny(model) as llm:
        yield llm


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments_of_other_libraries_say_what_to_write(name: str, llm: LLM) -> None:
    given: dict[str, Any] = {name: 1}
    for call in (
        lambda: SamplingParams(**given),
        lambda: setattr(SamplingParams(), name, 1),
        lambda: BeamSearchParams(beam_width=2, max_tokens=2, **given),
        lambda: StructuredOutputsParams(**given),
        lambda: LLM("model", **given),
        lambda: llm.generate([[5]], **given),
        lambda: llm.chat([{"role": "user", "content": "a"}], **given),
        lambda: llm.stream([[5]], **given),
        lambda: llm.score([5], [[6]], **given),
        lambda: llm.score_pairs([([5], [6])], **given),
        lambda: llm.embed([[5]], **given),
        lambda: llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=2), **given),
        lambda: llm.add_request([5], **given),
        lambda: llm.update_weights({}, **given),
        lambda: parse_sampling(f"{name}=1"),
    ):
        assert refusal(call).endswith(ELSEWHERE[name].write)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_a_flag_of_another_library_says_what_to_write(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name not in ARGUMENTS:
        return
    flag = "--" + name.replace("_", "-")
    for given in (["run", flag, "5"], [*JOB, f"{flag}=5"], ["check", "in.jsonl", flag]):
        with pytest.raises(SystemExit):
            parse_args(given)
        known = ELSEWHERE[name]
        said = capsys.readouterr().err
        assert f"unrecognized argument: {flag}" in said
        assert said.endswith(f"that name is from {known.origin}; write {known.flag or known.write}\n")


def test_other_names_of_other_libraries_say_what_to_write(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {name: refusal(lambda name=name: getattr(llm, name)) for name in ATTRIBUTES}  # type: ignore[misc]
    said["__call__"] = refusal(lambda: llm("hi"))
    said["from_pretrained"] = refusal(lambda: LLM.from_pretrained("folder"))
    [output] = llm.generate(prompt_token_ids=[[5]], sampling_params=GREEDY, use_tqdm=False)
    said["text"] = refusal(lambda: output.text)  # type: ignore[attr-defined]
    body = {"stop_sequences": ["a"]}
    assert refusal(lambda: read_body("/v1/completions", body)).endswith(ELSEWHERE["stop_sequences"].write)
    for name in CLASSES:
        said[name] = refusal(lambda name=name: getattr(nanovllm, name))  # type: ignore[misc]
        with pytest.raises(ImportError, match=re.escape(ELSEWHERE[name].write)):
            exec(f"from nanovllm.sampling_params import {name}")
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            parse_args([name, "model"])
        said[name] = capsys.readouterr().err.rstrip()
    assert said.keys() | ARGUMENTS == set(ELSEWHERE), "the whole table"
    for name, line in said.items():
        assert line.endswith(ELSEWHERE[name].write), name
    assert not hasattr(nanovllm, "encode") and not hasattr(nanovllm.sampling_params, "Params2")


def test_arguments_that_a_call_does_not_have(llm: LLM) -> None:
    """They are named, with the nearest name or where the value goes; internal classes are not."""
    any_llm: Any = llm
    made: Any = BeamSearchParams
    wrong: dict[str, Callable[[], object]] = {
        "LLM.stream() got 'top_k'; pass it as SamplingParams(top_k=": lambda: any_llm.stream([[5]], top_k=1),
        "LLM.stream() got an unknown argument 'delta'; did you mean": lambda: any_llm.stream([], delta=1),
        "LLM.embed() got an unknown argument 'top_k'; it knows": lambda: llm.embed([[5]], top_k=0),
        "LLM.sleep() got an unknown argument 'depth'; it knows: level": lambda: any_llm.sleep(depth=1),
        "LLM.step() takes 1 positional argument": lambda: any_llm.step(1),
        "LLM.close() takes 1 positional argument": lambda: any_llm.close(1),
        "LLM() got 'tokenizer' behind the model": lambda: LLM("model", "tokenizer"),  # type: ignore[call-arg]
        "LLM has no attribute 'statz'; did you mean 'stats'": lambda: any_llm.statz,
        "LLM.chat() got an unknown argument 'documents'; it knows: ": lambda: llm.chat([], documents=1),
        "LLM.chat() got an unknown argument 'thinking'; did you mean 'enable_": lambda: llm.chat(
            [], thinking=1
        ),
        "BeamSearchParams() got an unknown argument 'beam_with'; did": lambda: made(beam_with=2),
    }
    for expected, call in wrong.items():
        assert refusal(call).startswith(expected)
    assert refusal(lambda: llm.chat([], documents=1)).endswith("go into chat_template_kwargs")
    assert len(llm.stats.__doc__ or "") > 10 and llm.stream.__name__ == "stream"


def test_forms_of_vllm_that_work(model: Path) -> None:
    from nanovllm import LLMEngine

    assert LLMEngine is LLM and not hasattr(nanovllm, "no_such_name")
    params = SamplingParams.from_optional(
        temperature=0, top_p=None, max_tokens=None, stop=None, logit_bias=None
    )
    assert params == SamplingParams(temperature=0, max_tokens=None)
    with make_tiny(model) as llm:
        expected = [output["token_ids"] for output in llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False)]
        for ids in ([[5, 6], [7]], [np.array([5, 6]), [7]]):
            outputs = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
        assert llm.generate(None, GREEDY, False, prompt_token_ids=[7])[0]["token_ids"] == expected[1]
        with pytest.raises(TypeError, match=r"LLM.generate\(\) needs prompts"):
            llm.generate(sampling_params=GREEDY)
        with pytest.raises(ValueError, match="pass one of them"):
            llm.generate([[5]], GREEDY, prompt_token_ids=[[5]])
        assert llm.reset_prefix_cache(True) and llm.reset_prefix_cache(reset_running_requests=True)
        llm.shutdown()
        with pytest.raises(EngineClosedError):
            llm.generate([[5]], GREEDY)


def test_arguments_of_vllm(model: Path) -> None:
    with make_tiny(model) as llm:
        neutral: dict[str, Any] = dict.fromkeys(GENERATE)
        assert len(llm.generate([[5]], GREEDY, False, **neutral)) == 1
        with pytest.raises(ValueError, match=r"generate\(\): mm_processor_kwargs=.* only text is supported"):
            llm.generate([[5]], GREEDY, mm_processor_kwargs={"num_crops": 4})
        each: dict[str, Any] = {"lora_request": [None] * 2, "priority": [0, 0]}
        assert len(llm.generate([[5], [6]], GREEDY, **each, use_tqdm=False)) == 2
        with pytest.raises(ValueError, match=r"tokenization_kwargs=.* pass token ids"):
            llm.generate([[5]], GREEDY, tokenization_kwargs={"add_special_tokens": False})
        assert len(llm.generate([[5]], GREEDY, priority=[1], use_tqdm=False)) == 1
        with pytest.raises(ValueError, match=r"lora_request=.* merge the adapter"):
            llm.generate([[5]], GREEDY, lora_request=object())
        with pytest.raises(TypeError, match=r"generate\(\) got 'top_p'; pass it as SamplingParams"):
            llm.generate([[5]], top_p=0.5)
        with pytest.raises(TypeError, match="'sampling_param'; did you mean 'sampling_params'"):
            llm.generate([[5]], sampling_param=GREEDY)
        assert llm.is_finished()


def test_arguments_of_vllms_other_calls(model: Path) -> None:
    with make_tiny(model) as llm:
        neutral = {name: absent.default for name, absent in EMBED.items()}
        assert len(llm.embed([5], **neutral)) == 1
        with pytest.raises(ValueError, match=r"embed\(\): truncate_prompt_tokens=4 is not supported; cut"):
            llm.embed([5], truncate_prompt_tokens=4)
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        assert len(llm.beam_search([5], params, lora_request=None, priority=[1], concurrency_limit=4)) == 1
        with pytest.raises(TypeError, match=r"beam_search\(\) got an unknown argument 'beam_width'"):
            llm.beam_search([5], params, beam_width=3)
        for wrong in (SamplingParams(), [params], None):
            with pytest.raises(TypeError, match="params must be BeamSearchParams, one for all"):
                llm.beam_search([5], wrong)  # type: ignore[arg-type]


def test_beam_search_needs_finite_logits(model: Path) -> None:
    with make_tiny(model) as llm:
        for parameter in inside.model(llm).parameters():
            parameter.data.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="the model's logits were not finite"):
            llm.beam_search([5], BeamSearchParams(beam_width=2, max_tokens=3))
        assert llm.is_finished()


def test_functions_of_logits_need_one_rank(model: Path) -> None:
    params = SamplingParams(max_tokens=2, logits_processors=[lambda ids, logits: logits])
    with make_tiny(model, tensor_parallel_size=2) as llm:
        for call in (llm.generate, lambda *args: list(llm.stream(*args)), llm.add_request):
            with pytest.raises(ValueError, match=r"the prompt: logits_processors are functions .* need tens"):
                call([5], params)
        [output] = llm.stream([5], params, "return")
        assert "logits_processors are functions" in str(output.error)
        assert len(llm.generate([5], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6


@pytest.mark.parametrize(
    ("value", "named"),
    [("cpu", "device='cpu'"), ("cuda:1", "device='cuda:1'"), (4, "its name, as in device='cpu'")],
)
def test_an_option_without_its_name(model: Path, value: object, named: str) -> None:
    made: Any = LLM
    message = f"LLM() got {value!r} behind the model; options have names: write {named}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        made(model, value)


def test_a_refused_prompt_leaves_the_prefix_cache(model: Path) -> None:
    prompt = [7] * (2 * BLOCK + 3)
    with make_tiny(model) as llm:
        llm.generate(prompt, GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match=rf"prompts\[1\]: token id {VOCAB_SIZE}"):
            llm.generate([prompt, [VOCAB_SIZE]], GREEDY, use_tqdm=False)
        assert llm.is_finished()
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == len(prompt) - 1
