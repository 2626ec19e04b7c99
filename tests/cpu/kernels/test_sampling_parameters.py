"""Each sampling parameter through the engine against a plain loop over transformers' logits, alone and beside
all others, for any schedule.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import BLOCK, CheckedLLM
from parameter_cases import (
    ALL,
    CASES,
    ENGINES,
    EOS,
    MANY,
    MATES,
    MAX_LEN,
    SAMPLED,
    TOKENIZER,
    TOKENS,
    VOCAB,
    make,
    params_of,
)
from sampling_reference import MODES, Reference, checker
from test_texts import model_for

from nanovllm import RequestOutput, SamplingParams
from nanovllm.checks import PENALTIES
from nanovllm.extras.logprobs import LogprobDicts
from nanovllm.models.decoder import DecoderForCausalLM

Check = Callable[[RequestOutput, SamplingParams], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_for(TOKENIZER, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, TOKENIZER, MAX_LEN)


@pytest.fixture(scope="module")
def check(reference: Reference) -> Check:
    """Caches reference answers across tests."""
    return checker(reference)


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[list[int], SamplingParams]]:
    """A prompt for each case: many share a prefix, some fill whole blocks, one is a single token."""
    rng = random.Random(2)
    shared = [rng.randrange(VOCAB - 3) for _ in range(3 * BLOCK)]
    lens = [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK, 20, 3 * BLOCK]
    made = {}
    for index, (name, case) in enumerate(CASES.items()):
        length = lens[index % len(lens)]
        own = [rng.randrange(VOCAB - 3) for _ in range(length)]
        made[name] = (shared[:length] if index % 2 else own, params_of(case))
    return made


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[CheckedLLM]:
    with make(model) as llm:
        yield llm
        assert inside.block_manager(llm).pool.usage == 0


@pytest.mark.parametrize("name", CASES)
def test_each_alone(llm: CheckedLLM, rows: dict[str, Any], check: Check, name: str) -> None:
    prompt, params = rows[name]
    llm.reset_prefix_cache()
    for _ in range(2):  # the second time, the prefix cache has the prompt
        [output] = llm.generate([prompt], params, use_tqdm=False)
        check(output, params)


def test_each_case_differs_from_the_plain_one(reference: Reference, rows: dict[str, Any]) -> None:
    """A case with the same answer as the plain one would test nothing."""
    for name, (prompt, params) in rows.items():
        if "logprobs" not in name and name not in ("plain", "max_tokens", "ignore_eos"):
            same = ["max_tokens", "ignore_eos", *["allowed_token_ids"] * (name == "bad_words_of_two")]
            plain = params_of({field: getattr(params, field) for field in same})
            answers = [reference.answer(prompt, each).token_ids for each in (params, plain)]
            assert answers[0] != answers[1], name


@pytest.mark.parametrize("name", ENGINES)
def test_beside_all_others(model: Path, rows: dict[str, Any], check: Check, name: str) -> None:
    """In random order and beside requests of every kind, twice, so that the prefix cache has all prompts."""
    rng = random.Random(len(name))
    known = {each: row for each, row in rows.items() if "two" not in name or not row[1].logits_processors}
    checked = {id(params) for _, params in known.values()}
    mates = [
        ([rng.randrange(VOCAB - 3) for _ in range(1 + 9 * index % 20)], params_of(case))
        for index, case in enumerate(MATES)
    ]
    with make(model, **ENGINES[name]) as llm:
        free = llm.num_free_blocks
        for _ in range(2):
            order = [*known.values(), *mates]
            rng.shuffle(order)
            llm.batches.clear()
            outputs = llm.generate(*map(list, zip(*order, strict=True)), use_tqdm=False)
            errors = 0
            for (_, params), output in zip(order, outputs, strict=True):
                if id(params) in checked:
                    check(output, params)
                elif params.structured_outputs is not None:
                    assert re.fullmatch("[a-c]{9}", output["text"])
                errors += output.error is not None
            assert errors == 1
            scored = sum(len(b.extras.scored.token_ids) for b in llm.batches if b.extras and b.extras.scored)
            wanted = [len(prompt) - 1 for prompt, params in order if params.prompt_logprobs is not None]
            assert scored == sum(wanted), "each prompt token is scored once"
            assert llm.num_free_blocks == free
        if "tight" in name:
            assert sum(bool(seq.num_preemptions) for seq in llm.sequences) >= 5
            asking = [seq for seq in llm.sequences if seq.extras is not None]
            assert any(seq.num_preemptions and seq.extras.prompt_logprobs for seq in asking)
            preempted = [vars(seq.params) for seq in llm.sequences if seq.num_preemptions]
            assert any(own[name] != each.neutral for own in preempted for name, each in PENALTIES.items())
            assert any(not batch.draws.all() for batch in llm.batches), "no prompt went in chunks"
        elif name == "ahead":
            assert max(seq.num_cached_tokens for seq in llm.sequences) >= 2 * BLOCK


@pytest.mark.parametrize(("mode", "size"), [*((mode, 1) for mode in MODES), (MODES[0], 2), (MODES[3], 2)])
def test_logprobs_modes(
    model: Path, rows: dict[str, Any], reference: Reference, mode: str, size: int
) -> None:
    """All modes in one batch; prompt logprobs are always raw. They are computed in chunks of rows, as for a
    large vocabulary.
    """
    check = checker(reference, mode)
    names = ["logprobs_20", "prompt_logprobs_3", "all", "top_k", "top_p", "min_p", "sampled_all"]
    with make(model, logprobs_mode=mode, tensor_parallel_size=size, max_num_batched_tokens=30) as llm:
        if size == 1:
            inside.limit_logit_rows(llm, 3)
        chosen = [rows[name] for name in names]
        outputs = llm.generate(*map(list, zip(*chosen, strict=True)), use_tqdm=False)
        for (_, params), output in zip(chosen, outputs, strict=True):
            check(output, params)


@pytest.mark.parametrize(
    ("names", "largest"),
    [(["sampled_logprobs", "logprobs_20", "two_processors"], 0), (["sampled_all", "logprobs_1", "all"], 2)],
    ids=["no filters", "filters"],
)
def test_logprobs_sort_only_for_filters(
    model: Path, rows: dict[str, Any], reference: Reference, names: list[str], largest: int
) -> None:
    """And only a few rows at a time: for a large vocabulary, all rows at once would need gigabytes."""
    sort, chosen, num_sorted = torch.Tensor.sort, [rows[name] for name in names], [0]

    def recorded(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        num_sorted.append(len(logits))
        return sort(logits, *args, **options)

    with make(model, logprobs_mode="processed_logprobs") as llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sort", recorded)
        patch.setattr("nanovllm.kernels.sampling.SORT_ELEMENTS", 2 * VOCAB)
        outputs = llm.generate(*map(list, zip(*chosen, strict=True)), use_tqdm=False)
    assert max(num_sorted) == largest
    check = checker(reference, "processed_logprobs")
    for (_, params), output in zip(chosen, outputs, strict=True):
        check(output, params)


def test_completions_share_logprobs_of_the_prompt(llm: CheckedLLM, rows: Any, reference: Reference) -> None:
    """Each completion is that of a request with its seed alone. The prompt is scored once for all."""
    prompt, _ = rows["all"]
    params = params_of(ALL | SAMPLED | {"n": 4, "temperature": 3.0})
    llm.batches.clear()
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert (
        sum(len(b.extras.scored.token_ids) for b in llm.batches if b.extras and b.extras.scored)
        == len(prompt) - 1
    )
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    first = params.clone()
    first.n = 1
    checker(reference)(output, first)
    for completion in output.outputs:
        assert len(completion.logprobs) == len(completion.token_ids)
        own = [
            shown[token].logprob
            for shown, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(own))


def test_logits_of_a_token_are_computed_once(
    model: Path, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rows of a step ask for."""
    num_rows, compute_logits = [0], DecoderForCausalLM.compute_logits

    def recorded(decoder: DecoderForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return compute_logits(decoder, hidden)

    monkeypatch.setattr(DecoderForCausalLM, "compute_logits", recorded)
    names = ["plain", "filters", "penalties", "logprobs_20", "allowed", "bias", "sampled_all"]
    with make(model, logprobs_mode="processed_logprobs") as llm:
        num_rows.clear()  # of the start, in which no kernel runs
        llm.generate(*map(list, zip(*(rows[name] for name in names), strict=True)), use_tqdm=False)
        scored = sum(len(b.extras.scored.token_ids) for b in llm.batches if b.extras and b.extras.scored)
        assert scored > 0 and sum(num_rows) == scored + sum(int(b.draws.sum()) for b in llm.batches)


def test_a_request_keeps_no_more_logprobs_than_its_own(model: Path) -> None:
    """Beside rows that ask for the whole vocabulary, and beside rows that ask for none."""
    asked = [None, -1, 0, None, 2, 0]
    params = [params_of({"logprobs": each, "prompt_logprobs": each, "ignore_eos": True}) for each in asked]
    with make(model, async_scheduling=False) as llm:
        outputs = llm.generate([[5, 6, 7 + index] for index in range(6)], params, use_tqdm=False)
        sequences = sorted(llm.sequences, key=lambda seq: seq.seq_id)
    for seq, each in zip(sequences, asked, strict=True):
        width = 1 + (VOCAB if each == -1 else each or 0)
        count = asked.count(each)
        assert (seq.extras is None) == (each is None)
        if each is None:
            continue
        own, prompt = [columns for columns, _ in seq.extras.logprobs], seq.extras.prompt_logprobs
        assert [len(own), len(prompt)] == [TOKENS, 1]
        assert all(columns.values.shape == (count, width) for columns in own)
        assert all(columns.token_ids.base is None for columns in own), "a view keeps all of it"
        assert all(columns.values.shape == (2, width) for columns in prompt)
    for output, each in zip(outputs, asked, strict=True):
        if each is not None:
            count = VOCAB if each == -1 else each
            assert all(count <= len(shown) <= count + 1 for shown in output.outputs[0].logprobs)


def assert_begins(whole: LogprobDicts, part: LogprobDicts) -> None:
    for before, now in zip(whole, part, strict=False):
        assert list(before) == list(now)
        for token_id, entry in now.items():
            assert entry.logprob == pytest.approx(before[token_id].logprob, abs=1e-4)


def test_logprobs_end_with_the_text(llm: CheckedLLM) -> None:
    """A stop string, an abort or an error cuts the logprobs where it cuts the tokens."""
    params = params_of({"logprobs": 2, "ignore_eos": True})
    [full] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    text = full.outputs[0].text
    params.stop = [text[3:5]]
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.text == text[: text.index(text[3:5])]
    assert len(completion.token_ids) == len(completion.logprobs) < TOKENS
    assert_begins(full.outputs[0].logprobs, completion.logprobs)
    request_id = llm.add_request([5, 6, 7], params_of({"logprobs": 2, "prompt_logprobs": 1}))
    for _ in range(4):
        llm.step()
    aborted = llm.abort(request_id)
    assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
    cut = aborted.outputs[0]
    assert 0 < len(cut.token_ids) == len(cut.logprobs) < TOKENS
    assert_begins(full.outputs[0].logprobs, cut.logprobs)
    assert len(aborted.prompt_logprobs) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("run_ahead", [True, False], ids=["ahead", "in_step"])
def test_a_row_that_is_not_finite_ends_alone(
    model: Path, rows: dict[str, Any], check: Check, value: float, run_ahead: bool
) -> None:
    """Logits that are not finite end a row at its first token or later; it and the other rows have extras of
    every kind.
    """

    def breaking(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[50] = value if len(output_ids) == 3 else logits[50]
        return logits

    good = [rows[name] for name in ("plain", "all", "sampled_all", "logprobs_of_all", "penalties", "top_p")]
    bad = params_of(
        {"logprobs": 3, "repetition_penalty": 1.2, "logits_processors": [breaking], "min_tokens": 5}
    )
    with make(model, async_scheduling=run_ahead) as llm:
        order = [good[0], good[1], ([9] * 10, bad), *good[2:], ([9] * 10, bad)]
        outputs = llm.generate(*map(list, zip(*order, strict=True)), use_tqdm=False)
        for (_, params), output in zip(order, outputs, strict=True):
            if params is not bad:
                check(output, params)
                continue
            [completion] = output.outputs
            assert completion.finish_reason == "error" and len(completion.token_ids) == 3
            assert len(completion.logprobs) == 3
            assert "logits were not finite" in output.error
        assert inside.block_manager(llm).pool.usage == 0
        # Other sequences now have the slots of the ended rows.
        check(llm.generate([good[1][0]], good[1][1], use_tqdm=False)[0], good[1][1])


def test_min_tokens_forbids_end_of_sequence_tokens_that_are_ignored(llm: CheckedLLM) -> None:
    wanted = {"logit_bias": {EOS: 100.0, 5: 50.0}, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    answers = [
        llm.generate([[3, 4]], SamplingParams(min_tokens=count, **wanted), use_tqdm=False)[0]["token_ids"]
        for count in (0, 3, 5)
    ]
    assert answers == [[EOS] * 5, [5] * 3 + [EOS] * 2, [5] * 5]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ({"allowed_token_ids": [5], "bad_words": [TOKENIZER.decode([5])]}, "allowed_token_ids, bad_words"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "allowed_token_ids, min_tokens"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, "logit_bias"),
        ({"logits_processors": [lambda ids, logits: logits - math.inf]}, "logits_processors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rules_that_leave_no_token_are_named(
    llm: CheckedLLM, rows: dict[str, Any], check: Check, case: dict[str, Any], named: str
) -> None:
    plain = rows["plain"]
    for temperature in (0, 1):
        params = params_of(case | {"temperature": temperature})
        outputs = llm.generate([[9], plain[0]], [params, plain[1]], use_tqdm=False)
        assert outputs[0]["finish_reason"] == "error" and outputs[0]["token_ids"] == []
        assert f"no token was left by {named}" in outputs[0].error
        check(outputs[1], plain[1])


# each from n answers of one token: about 10,000 draws in total
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.5, "temperature": 0.8},
    "bias_and_top_k": {"logit_bias": MANY, "top_k": 12, "temperature": 1.5},
    "mask_and_top_p": {"allowed_token_ids": list(range(40)), "top_p": 0.9, "temperature": 1.2},
    "min_p": {"min_p": 0.05, "bad_words": ["e"], "temperature": 1.4, "logprobs": 1},
    "all": ALL | {"top_k": 25, "top_p": 0.97, "min_p": 0.002, "temperature": 1.1, "prompt_logprobs": None},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_distribution_drawn_from(
    llm: CheckedLLM, rows: dict[str, Any], reference: Reference, name: str
) -> None:
    """Chi-square with fixed seeds for the two samples; |z| stays below 5."""
    prompt, draws = rows["penalties"][0], 4000
    params = SamplingParams(
        **{"max_tokens": 1, "min_tokens": 0, "seed": 11, "n": draws} | DISTRIBUTIONS[name] | {"min_tokens": 0}
    )
    [output] = llm.generate([prompt], params, use_tqdm=False)
    drawn = torch.tensor([completion.token_ids[0] for completion in output.outputs])
    one = params.clone()
    one.n, one.min_tokens = 1, 0
    shares = reference.answer(prompt, one).logprob_values["processed_logprobs"][0].double().exp()
    observed, expected = torch.bincount(drawn, minlength=VOCAB).double(), draws * shares
    assert not observed[expected == 0].any()
    likely = expected >= 5
    rest = (observed[~likely].sum() - expected[~likely].sum()).abs()
    assert rest < 5 * math.sqrt(float(expected[~likely].sum()) + 1)
    freedom = int(likely.sum()) - 1
    assert freedom >= 3, "nearly nothing to tell apart"
    error = float(((observed - expected).square() / expected)[likely].sum())
    assert abs(error - freedom) < 5 * math.sqrt(2 * freedom) + 5, (error, freedom)


def test_errors_name_the_prompt_and_the_value(model: Path, llm: CheckedLLM) -> None:
    """Errors that only an engine can find; they come before anything runs."""
    num_batches = len(llm.batches)
    for case, error in (
        (
            {"logit_bias": {VOCAB: 1.0}},
            rf"prompts\[1\]: logit_bias: token id {VOCAB} is outside",
        ),
        ({"allowed_token_ids": [3, VOCAB]}, rf"allowed_token_ids: token id {VOCAB} is outside"),
        ({"stop_token_ids": [VOCAB]}, rf"stop_token_ids: token id {VOCAB} is outside"),
    ):
        with pytest.raises(ValueError, match=error):
            llm.generate([[5], [6]], [SamplingParams(), SamplingParams(**case)], use_tqdm=False)
    assert len(llm.batches) == num_batches and llm.is_finished()
    with make(model, max_logprobs=4) as few:
        for case in ({"logprobs": 5}, {"prompt_logprobs": 5}, {"logprobs": -1}):
            [(name, value)] = case.items()
            with pytest.raises(ValueError, match=rf"{name}={value} is more than max_logprobs=4 allows"):
                few.generate([[5]], SamplingParams(**case), use_tqdm=False)
        assert few.batches == []
