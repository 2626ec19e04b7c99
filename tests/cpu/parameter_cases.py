"""The requests and engines that test_sampling_parameters.py tries: each sampling parameter, each schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from checked_llm import BLOCK, CheckedLLM
from test_texts import TOKENIZERS

from nanovllm import SamplingParams, StructuredOutputsParams

TOKENIZER = TOKENIZERS["byte_level"]
VOCAB, EOS = len(TOKENIZER), TOKENIZER.eos_token_id
TOKENS = 12
MAX_LEN = 64


def shifted(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(len(output_ids))


def without_prompt(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[prompt_ids] -= 20.0  # changes them in place
    return logits


def halved(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits / 2


BIAS = {7: 3.0, 40: -4.0, 100: 2.5, VOCAB - 1: -math.inf, EOS: -8.0, 0: 1.0}
MANY = {token_id: 6.0 * (token_id % 3 - 1) for token_id in range(VOCAB)}
# texts of two of the first 20 tokens, "!" to "4"
PAIRS = [chr(33 + a) + chr(33 + b) for a in range(20) for b in range(20) if a == b or (a + b) % 2]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}
ALL: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.6,
    "presence_penalty": -0.5,
    "logit_bias": BIAS,
    "allowed_token_ids": list(range(0, VOCAB, 2)),
    "min_tokens": 4,
    "stop_token_ids": list(range(0, VOCAB, 4)),
    "bad_words": ["e", "th", "wo"],
    "logprobs": 5,
    "prompt_logprobs": 2,
}
# Each case: the parameters of a request in addition to temperature 0 and TOKENS tokens.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore_eos": {"ignore_eos": True},
    "max_tokens": {"max_tokens": None, "ignore_eos": True},
    "repetition": {"repetition_penalty": 1.8},
    "repetition_below_1": {"repetition_penalty": 0.4, "ignore_eos": True},
    "frequency": {"frequency_penalty": 1.9, "ignore_eos": True},
    "frequency_below_0": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 2.0},
    "presence_below_0": {"presence_penalty": -1.5, "ignore_eos": True},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "bias": {"logit_bias": BIAS},
    "bias_of_all": {"logit_bias": MANY, "ignore_eos": True},
    "one_processor": {"logits_processors": [shifted]},
    "two_processors": {"logits_processors": [without_prompt, halved], "logprobs": 1},
    "allowed": {"allowed_token_ids": [*range(30, 60), VOCAB - 1]},
    "allowed_one": {"allowed_token_ids": [77]},
    "bad_words": {"bad_words": [*map(chr, range(33, 127)), "th", "wo"]},
    "bad_words_of_two": {"bad_words": PAIRS, "allowed_token_ids": list(range(20)), "ignore_eos": True},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 2))},
    "min_tokens_is_max_tokens": {"min_tokens": TOKENS, "stop_token_ids": list(range(0, VOCAB, 2))},
    "stop_token_ids": {"stop_token_ids": list(range(0, VOCAB, 3))},
    "logprobs_0": {"logprobs": 0},
    "logprobs_1": {"logprobs": 1},
    "logprobs_20": {"logprobs": 20},
    "logprobs_of_all": {"logprobs": -1},
    "prompt_logprobs_0": {"prompt_logprobs": 0},
    "prompt_logprobs_3": {"prompt_logprobs": 3, "logprobs": 2},
    "prompt_logprobs_alone": {"prompt_logprobs": 1, "max_tokens": 0},
    "prompt_logprobs_of_all": {"prompt_logprobs": -1, "max_tokens": 0},
    "all": ALL,
    "sampled": SAMPLED,
    "sampled_logprobs": SAMPLED | {"logprobs": 5},
    "top_k": SAMPLED | {"top_k": 5, "logprobs": 3},
    "top_p": SAMPLED | {"top_p": 0.7, "logprobs": 3},
    "min_p": SAMPLED | {"min_p": 0.1, "logprobs": 3},
    "filters": SAMPLED | {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    "sampled_penalties": SAMPLED | {"repetition_penalty": 1.3, "presence_penalty": 1.0, "temperature": 2.0},
    "sampled_bias": SAMPLED | {"logit_bias": MANY, "top_p": 0.9, "logprobs": 0},
    "sampled_processor": SAMPLED | {"logits_processors": [halved], "top_k": 9, "logprobs": 2},
    "sampled_all": ALL | SAMPLED | {"top_k": 30, "top_p": 0.95, "min_p": 0.01, "temperature": 1.5},
}
# Other requests in the batch, which the reference does not compute.
MATES: list[dict[str, Any]] = [
    {"temperature": 1.2, "n": 3, "logprobs": 4, "presence_penalty": 1.0},
    {"temperature": 1.5, "top_p": 0.8},
    {"structured_outputs": StructuredOutputsParams(regex="[a-c]{9}")},
    {"temperature": 2.0, "stop": ["a", "e", "o"], "logprobs": 1},
    {"allowed_token_ids": [5], "logit_bias": {5: -math.inf}},  # allows no token
    {"temperature": 1.0, "min_tokens": 3, "bad_words": ["a"], "n": 2},
]
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {},
    "in_step": {"async_scheduling": False},
    "few_slots": {"max_num_seqs": 5},
    "tight": {"num_kvcache_blocks": 14, "max_num_batched_tokens": 11},
    "tight_in_step": {"num_kvcache_blocks": 14, "max_num_batched_tokens": 7, "async_scheduling": False},
    "uncached": {"enable_prefix_caching": False, "num_kvcache_blocks": 20, "max_num_batched_tokens": 13},
    "two_ranks": {"tensor_parallel_size": 2, "num_kvcache_blocks": 14, "max_num_batched_tokens": 11},
}


def make(model: Path, **options: Any) -> CheckedLLM:
    defaults = {
        "device": "cpu",
        "kvcache_block_size": BLOCK,
        "max_model_len": MAX_LEN,
        "async_scheduling": True,
        "max_logprobs": -1,
    }
    return CheckedLLM(model, **defaults | options)


def params_of(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": TOKENS} | case)
