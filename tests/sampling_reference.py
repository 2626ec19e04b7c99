"""The meaning of sampling parameters: answers by a plain loop over transformers' logits and processors.

Uses nothing of the engine except the last draw of a row with a temperature, `sample_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from sampling_cases import filters_of
from tiny_models import transformers_model
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import RequestOutput, SamplingParams
from nanovllm.kernels.sampling import sample_reference
from nanovllm.outputs import CompletionOutput, Logprob

TOLERANCE = 1e-4
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(frozen=True)
class Answer:
    """One completion. `logprob_values`: by logprobs_mode, values [tokens, V] for the choice of each token."""

    token_ids: list[int]
    finish_reason: str
    logprob_values: dict[str, torch.Tensor]


@lru_cache(maxsize=4096)
def _last_logits(folder: Path, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return transformers_model(folder)(torch.tensor([ids])).logits[0, -1].clone()


class Reference:
    """Answers of the model in a folder, with an end-of-sequence token and a tokenizer for bad words."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        self.folder, self.tokenizer, self.max_model_len = folder, tokenizer, max_model_len
        self.eos: int = tokenizer.eos_token_id
        self.vocab_size = len(tokenizer)

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """The first completion; params has a seed or is greedy."""
        ids, reason = list(prompt), "length"
        stop_ids = {*(params.stop_token_ids or ()), *([] if params.ignore_eos else [self.eos])}
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        most = self.max_model_len - len(prompt) if params.max_tokens is None else params.max_tokens
        while len(ids) - len(prompt) < min(most, self.max_model_len - len(prompt)):
            raw = _last_logits(self.folder, tuple(ids))[None]
            x = self._processed(raw, prompt, ids[len(prompt) :], params, sorted(stop_ids))
            token_id = self._draw(x, params, len(ids))
            steps.append((raw[0], self._filtered(x, params)[0]))
            ids.append(token_id)
            if token_id in stop_ids:
                reason = "stop"
                break
        raw, filtered = (
            torch.stack(column) if column else torch.empty(0, self.vocab_size)
            for column in (zip(*steps, strict=True) if steps else ([], []))
        )
        logprob_values = [raw.log_softmax(-1), filtered.log_softmax(-1), raw, filtered]
        return Answer(ids[len(prompt) :], reason, dict(zip(MODES, logprob_values, strict=True)))

    def prompt_logits(self, prompt: list[int]) -> torch.Tensor:
        """[len(prompt) - 1, V]: the logits that score each token but the first."""
        with torch.inference_mode():
            return transformers_model(self.folder)(torch.tensor([prompt])).logits[0, :-1]

    def _processed(
        self,
        raw: torch.Tensor,
        prompt: list[int],
        output: list[int],
        params: SamplingParams,
        stop_ids: list[int],
    ) -> torch.Tensor:
        """Logits [1, V] after all processing that also applies to greedy rows, in vLLM's order."""
        x = raw.clone()
        both = torch.tensor([prompt + output])
        for function in params.logits_processors or ():
            three = function.__code__.co_argcount == 3
            x[0] = function(*([prompt] if three else []), output, x[0])
        if params.logit_bias:
            x = SequenceBiasLogitsProcessor([[[k], float(v)] for k, v in params.logit_bias.items()])(both, x)
        if params.repetition_penalty != 1:
            x = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(both, x)
        for token_id in output:  # once for each occurrence
            x[0, token_id] -= params.frequency_penalty
        for token_id in set(output):
            x[0, token_id] -= params.presence_penalty
        masks = LogitsProcessorList()
        if params.allowed_token_ids is not None:
            others = set(range(self.vocab_size)) - set(params.allowed_token_ids)
            masks.append(SuppressTokensLogitsProcessor(sorted(others), "cpu"))
        if params.min_tokens:
            masks.append(
                MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stop_ids, device="cpu")
            )
        x = masks(both, x)
        if params.bad_words:
            words = [
                self.tokenizer.encode(text, add_special_tokens=False)
                for word in params.bad_words
                for text in (word, f" {word}")
            ]
            x = NoBadWordsLogitsProcessor(words)(torch.tensor([output], dtype=torch.int64), x)
        return x

    @staticmethod
    def _filtered(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """The logits from which a row with a temperature is drawn."""
        if params.temperature == 0:
            return x
        warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
        if params.min_p:
            warpers.append(MinPLogitsWarper(params.min_p))
        if params.top_k > 0:
            warpers.append(TopKLogitsWarper(min(params.top_k, x.shape[1])))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        return warpers(torch.empty(1, 0, dtype=torch.int64), x)

    def _draw(self, x: torch.Tensor, params: SamplingParams, position: int) -> int:
        if params.temperature == 0:
            return int(x.argmax())
        columns = {"top_k": [max(0, params.top_k)], "top_p": [params.top_p], "min_p": [params.min_p]}
        filters = filters_of(1, "cpu", **columns)
        temperature, seed = torch.tensor([params.temperature]), torch.tensor([params.seed])
        positions = torch.tensor([position], dtype=torch.int32)
        return int(sample_reference(x, temperature, seed, positions, *filters))


def check_token(shown: dict[int, Logprob], token_id: int, values: torch.Tensor, asked: int) -> None:
    """Check a token's dictionary against values [V]: the token and its `asked` likeliest ones."""
    count = len(values) if asked < 0 else min(asked, len(values))
    assert count <= len(shown) <= count + 1 and next(iter(shown)) == token_id
    own, mine = shown[token_id], float(values[token_id])
    assert own.logprob == mine or abs(own.logprob - mine) < TOLERANCE, (own, mine)
    assert int((values > mine + TOLERANCE).sum()) < own.rank <= int((values >= mine - TOLERANCE).sum())
    best = values.sort(descending=True).values[:count].tolist()
    others = [entry for entry in shown.values() if entry.rank is not None and entry.rank <= count]
    assert [entry.rank for entry in sorted(others, key=lambda e: e.rank)] == list(range(1, count + 1))
    for entry in others:
        expected = best[entry.rank - 1]
        assert entry.logprob == expected or abs(entry.logprob - expected) < TOLERANCE
    for each, entry in shown.items():
        expected = float(values[each])
        assert entry.logprob == expected or abs(entry.logprob - expected) < TOLERANCE


def check_completion(
    output: CompletionOutput, answer: Answer, params: SamplingParams, mode: str = MODES[0]
) -> None:
    """Check tokens, finish reason and logprobs."""
    assert output.token_ids == answer.token_ids
    assert output.finish_reason == answer.finish_reason
    if params.logprobs is None:
        assert output.logprobs is None and output.cumulative_logprob is None
        return
    assert len(output.logprobs) == len(answer.token_ids)
    values, total = answer.logprob_values[mode], 0.0
    for place, (shown, token_id) in enumerate(zip(output.logprobs, answer.token_ids, strict=True)):
        check_token(shown, token_id, values[place], params.logprobs)
        total += float(values[place, token_id])
    assert abs(output.cumulative_logprob - total) < TOLERANCE * max(1, len(answer.token_ids))


def check_prompt(
    output: RequestOutput, logits: torch.Tensor, params: SamplingParams, normalize: bool
) -> None:
    """Check the prompt's logprobs: None for its first token, the others from the logits before them."""
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    ids = output.prompt_token_ids
    values = logits.log_softmax(-1) if normalize else logits
    assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
    for place in range(1, len(ids)):
        check_token(output.prompt_logprobs[place], ids[place], values[place - 1], params.prompt_logprobs)


def checker(reference: Reference, mode: str = MODES[0]) -> Callable[[RequestOutput, SamplingParams], None]:
    """A function that checks one output, its prompt included, against the reference."""
    known: dict[tuple[object, ...], Answer] = {}

    def check(output: RequestOutput, params: SamplingParams) -> None:
        key = (tuple(output.prompt_token_ids), id(params))
        if key not in known:
            known[key] = reference.answer(output.prompt_token_ids, params)
        assert output.error is None
        check_completion(output.outputs[0], known[key], params, mode)
        logits = reference.prompt_logits(output.prompt_token_ids)
        check_prompt(output, logits, params, mode.endswith("logprobs"))

    return check
