"""score, score_pairs, embed and beam_search against transformers."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_llm import CheckedLLM, make_tiny
from jobs import read_rows, write_rows
from safetensors.torch import load_file, save_file
from tiny_models import transformers_model

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.jobs import main as program
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.outputs import RequestOutput

PROMPT = [5, 9, 17, 3, 44, 8, 61, 2, 90, 13, 7, 7, 21, 35, 1, 64, 11, 12, 13, 92]
CONTINUATIONS = [[4], [4, 8, 15], [16, 23, 42, 16, 23], [96, 95]]


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return transformers_model(model)


def logprobs_of(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module", params=["whole", "chunked", "tight", "two ranks"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[CheckedLLM]:
    options: dict[str, Any] = {
        "whole": {},
        "chunked": {"max_num_batched_tokens": 7},
        "tight": {"num_kvcache_blocks": 4, "max_num_seqs": 2},
        "two ranks": {"tensor_parallel_size": 2},
    }[request.param]
    with make_tiny(model, **options) as llm:
        yield llm


def test_score(llm: CheckedLLM, reference: Any) -> None:
    for scores in (llm.score(PROMPT, CONTINUATIONS, False), llm.score(PROMPT, CONTINUATIONS, False)):
        for score, continuation in zip(scores, CONTINUATIONS, strict=True):
            want = logprobs_of(reference, PROMPT + continuation)[len(PROMPT) - 1 : -1]
            own = want.gather(1, torch.tensor(continuation)[:, None])[:, 0]
            assert score.token_ids == continuation
            assert np.allclose(score.logprobs, own.numpy(), atol=1e-4)
            assert math.isclose(score.logprob, float(own.sum()), abs_tol=1e-3)
            assert score.is_greedy == (want.argmax(-1).tolist() == continuation)


def test_is_greedy(llm: CheckedLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    greedy = llm.generate([PROMPT], params, use_tqdm=False)[0]["token_ids"]
    other = [*greedy[:-1], (greedy[-1] + 1) % 90]
    assert [score.is_greedy for score in llm.score(PROMPT, [greedy, other], False)] == [True, False]


def test_the_last_token_needs_no_room(model: Path, reference: Any) -> None:
    """Its own hidden state is not needed, so a scored text may have one token more than `max_model_len`."""
    ids = [*PROMPT, 4, 8, 15, 16, 23]
    want = logprobs_of(reference, ids)
    want = want[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    with make_tiny(model, max_model_len=24) as llm:
        assert np.allclose(llm.score(PROMPT, [ids[20:]], False)[0].logprobs, want[19:], atol=1e-4)
        assert sum(len(batch.token_ids) for batch in llm.batches) == 24
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        logprobs = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
        assert logprobs is not None and len(logprobs) == 25
        found = [next(iter(row.values())).logprob for row in logprobs[1:] if row]
        assert np.allclose(found, want, atol=1e-4)
        with pytest.raises(ValueError, match="has 26 tokens, and at most 25 fit"):
            llm.score(PROMPT, [[*ids[20:], 3]], False)
        with pytest.raises(ValueError, match="has 25 tokens, and at most 24 fit"):
            llm.embed([ids], use_tqdm=False)
        assert llm.generate([[5]], params, use_tqdm=False)[0].prompt_logprobs == [None]


def test_logits_are_computed_for_the_continuations_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, compute_logits = [], DecoderForCausalLM.compute_logits

    def recorded(decoder: DecoderForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return compute_logits(decoder, hidden)

    monkeypatch.setattr(DecoderForCausalLM, "compute_logits", recorded)
    with make_tiny(model, max_num_batched_tokens=30) as llm:
        rows.clear()  # of the start, in which no kernel runs
        llm.score(PROMPT, CONTINUATIONS, False)
        scored = [batch.extras.scored for batch in llm.batches if batch.extras and batch.extras.scored]
        assert sum(len(each.token_ids) for each in scored) == sum(map(len, CONTINUATIONS)) == sum(rows)
        assert all(not batch.draws.any() for batch in llm.batches)
        llm.embed([PROMPT], use_tqdm=False)
        assert sum(map(len, CONTINUATIONS)) == sum(rows)
        outputs = llm.score(PROMPT, CONTINUATIONS, False)
        assert all(output.num_cached_tokens == len(PROMPT) - 1 for output in outputs), (
            "the shared prompt is computed once"
        )


def test_logprobs_of_tokens_that_are_asked_for(llm: CheckedLLM, reference: Any) -> None:
    """Beside rows that ask for likeliest tokens, for none, and for more."""
    labels = [90, 4, 4, 17]
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprob_token_ids=labels)
    more = SamplingParams(temperature=0, max_tokens=4, logprob_token_ids=[*range(40)])
    likeliest = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    assert (asked.num_logprobs, asked.logprobs, likeliest.num_logprobs) == (3, None, 2)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    params = [asked, likeliest, plain, more]
    outputs = [output.outputs[0] for output in llm.generate([PROMPT] * 4, params, use_tqdm=False)]
    rows, top = outputs[0].logprobs, outputs[1].logprobs
    assert isinstance(rows, list) and isinstance(top, list) and outputs[2].logprobs is None
    want = logprobs_of(reference, PROMPT + outputs[0].token_ids)[len(PROMPT) - 1 : -1]
    for row, likely, token_id, expected in zip(rows, top, outputs[0].token_ids, want, strict=True):
        assert list(row) == list(dict.fromkeys([token_id, *labels])) and row[token_id].rank == 1
        assert len(likely) == 2 and likely[token_id].rank == 1
        for each, logprob in row.items():
            assert math.isclose(logprob.logprob, float(expected[each]), abs_tol=1e-4)
            assert each == token_id or logprob.rank is None
    assert all(set(range(40)) <= row.keys() for row in outputs[3].logprobs or [{}])


def test_wrong_tokens_to_ask_for() -> None:
    assert SamplingParams(logprobs=2, logprob_token_ids=[5, 6]).num_logprobs == 2
    with pytest.raises(ValueError, match="logprobs=3 must be None or 2, the number of logprob_token_ids"):
        SamplingParams(logprobs=3, logprob_token_ids=[5, 6])
    with pytest.raises(ValueError, match="logprob_token_ids has 129 tokens, and may have 128; pass fewer"):
        SamplingParams(logprob_token_ids=range(129))
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=4) as llm:
        params = SamplingParams(logprob_token_ids=[5, 9999])
        with pytest.raises(ValueError, match="logprob_token_ids: token id 9999 is outside the vocabulary"):
            llm.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_scores_need_logprobs(model: Path, mode: str) -> None:
    with make_tiny(model, logprobs_mode=mode) as llm:
        for call in (
            lambda: llm.score(PROMPT, CONTINUATIONS, False),
            lambda: llm.beam_search([PROMPT], BeamSearchParams(beam_width=1, max_tokens=1)),
        ):
            with pytest.raises(
                ValueError, match=f"adds up logprobs, and logprobs_mode='{mode}' returns logits"
            ):
                call()
        assert llm.batches == []
        assert len(llm.embed([PROMPT], False)[0].outputs.embedding) > 0


def test_processed_logprobs_score_as_raw_ones(model: Path, llm: CheckedLLM) -> None:
    with make_tiny(model, logprobs_mode="processed_logprobs") as processed:
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        [found], [expected] = processed.beam_search([PROMPT], params), llm.beam_search([PROMPT], params)
        for beam, other in zip(found.sequences, expected.sequences, strict=True):
            assert beam.tokens == other.tokens and math.isclose(beam.score, other.score, abs_tol=1e-4)
        scores = processed.score(PROMPT, CONTINUATIONS, False), llm.score(PROMPT, CONTINUATIONS, False)
        for score, other in zip(*scores, strict=True):
            assert math.isclose(score.logprob, other.logprob, abs_tol=1e-3)


def test_long_texts_cause_no_warning_of_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers warns of indexing errors that do not occur here."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    long = "a " * 2000
    with LLM(demo_model_path(), num_kvcache_blocks=500) as llm:
        for call in (
            lambda: llm.generate(long, use_tqdm=False),
            lambda: llm.score(long, "b"),
            lambda: llm.chat([{"role": "user", "content": long}]),
        ):
            with pytest.raises(ValueError, match=r"has 20[01][0-9] tokens, and at most"):
                call()
    assert not caplog.records


def test_scores_of_texts() -> None:
    with LLM(demo_model_path(), num_kvcache_blocks=500) as llm:
        tokenizer = llm.get_tokenizer()
        pairs = [("Reverse: abc", " cba"), ("3+4", "=7"), ("Hello", "")]
        with pytest.raises(ValueError, match="the continuation of pair 2 is empty"):
            llm.score_pairs(pairs, use_tqdm=False)
        with pytest.raises(ValueError, match=r"^the prompt is empty"):
            llm.score("", "abc", use_tqdm=False)
        for pair, score in zip(pairs, llm.score_pairs(pairs[:2], use_tqdm=False), strict=False):
            whole = tokenizer("".join(pair))["input_ids"]
            assert whole[-len(score.token_ids) :] == score.token_ids
            assert tokenizer.decode(score.token_ids).endswith(pair[1].strip())
        ids = tokenizer("3+4")["input_ids"]
        mixed = llm.score(ids, ["=7"], use_tqdm=False)[0]
        assert mixed.token_ids == tokenizer("=7", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_embed(llm: CheckedLLM, reference: Any, pooling: str, normalize: bool) -> None:
    prompts = [PROMPT, PROMPT[:3], [7], PROMPT[:17]]
    for _ in range(2):  # also if the prefix cache has the prompts
        outputs = llm.embed(prompts, use_tqdm=False, pooling=pooling, normalize=normalize)
        for prompt, output in zip(prompts, outputs, strict=True):
            with torch.inference_mode():
                hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
            want = hidden[-1] if pooling == "last" else hidden.mean(0)
            want = want / want.norm() if normalize else want
            assert output.outputs.hidden_size == len(want) and output.finished
            assert np.allclose(output.outputs.embedding, want.numpy(), atol=1e-4)


def test_embeddings_of_bad_prompts(llm: CheckedLLM) -> None:
    outputs = llm.embed([[5], []], use_tqdm=False, on_error="return")
    assert outputs[0].error is None and len(outputs[0].outputs.embedding) > 0
    assert "prompts[1]" in str(outputs[1].error) and outputs[1].outputs.embedding == []
    with pytest.raises(ValueError, match="pooling must be 'last' or 'mean', not 'max'"):
        llm.embed([[5]], pooling="max")
    assert llm.is_finished()


def test_what_cannot_be_scored(llm: CheckedLLM) -> None:
    for call, error, message in [
        (lambda: llm.score([5], None), TypeError, "continuations must be one or a list of them, not None"),
        (
            lambda: llm.score_pairs(None),
            TypeError,
            r"pairs must be a list of \(prompt, continuation\), not No",
        ),
        (lambda: llm.score_pairs(["ab"]), TypeError, r"pair 0 must be \(prompt, continuation\), not 'ab'"),
        (lambda: llm.score_pairs([([5], [6]), ([5],)]), ValueError, r"pair 1 must be .* not \(\[5\],\)"),
        (lambda: llm.score("", [[5]]), ValueError, "^the prompt is empty"),
        (lambda: llm.score([5], [[6], []]), ValueError, r"^continuations\[1\] "),
        (lambda: llm.score([5], [[6], [999]]), ValueError, r"^the prompt with continuations\[1\].* 999"),
        (
            lambda: llm.score([5], [[6], [7] * 5000]),
            ValueError,
            r"^the prompt with continuations\[1\]: the prompt has 5001 tokens",
        ),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert llm.is_finished()


BAD = 30  # a token whose embedding is not finite
MIXED = [PROMPT, [5, BAD, 7], [8, 9], [*PROMPT[:12], BAD], [3]]


def with_a_bad_token(model: Path, folder: Path, token_id: int) -> Path:
    shutil.copytree(model, folder, dirs_exist_ok=True)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token_id, 3] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def values_of(output: RequestOutput) -> list[float]:
    """All logprobs of an output."""
    rows = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    return [each.logprob for row in rows for each in row.values()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 4},
        {"num_kvcache_blocks": 4, "max_num_seqs": 2},
        {"tensor_parallel_size": 2},
        {"logprobs_mode": "raw_logits"},
    ],
    ids=["whole", "chunked", "tight", "two ranks", "logits"],
)
def test_numbers_that_are_not_finite_are_an_error_of_their_row(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """In each kind of output as in generation. The other rows keep their values, also those that share the
    beginning of a prompt, and so do the tokens before it."""
    spoilt = with_a_bad_token(model, tmp_path, BAD)
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt_only = SamplingParams(max_tokens=0, prompt_logprobs=1)
    both = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0, logprobs=1)
    with make_tiny(spoilt, **options) as llm, make_tiny(model, **options) as good:
        free = llm.num_free_blocks
        for params in (few, prompt_only, both):
            found, expected = (each.generate(MIXED, params, use_tqdm=False) for each in (llm, good))
            for ids, output, want in zip(MIXED, found, expected, strict=True):
                if BAD in (ids[:-1] if params is prompt_only else ids):  # nothing follows the last token
                    assert output["finish_reason"] == "error" and not output["token_ids"]
                    assert str(output.error).startswith("the model's logits were not finite")
                    assert BAD not in ids[:-1] or output.prompt_logprobs is None
                else:
                    assert output["token_ids"] == want["token_ids"] and output.error is None
                    assert values_of(output) == pytest.approx(values_of(want), abs=1e-4)
        if "logprobs_mode" not in options:
            pairs = [(ids[:1], ids[1:] or [4]) for ids in MIXED]
            scores, wanted = llm.score_pairs(pairs, False), good.score_pairs(pairs, False)
            for ids, score, want in zip(MIXED, scores, wanted, strict=True):
                if BAD in ids[:-1]:
                    assert str(score.error).startswith("the model's logits were not finite")
                    assert math.isnan(score.logprob) and len(score.logprobs) == len(score.token_ids)
                else:
                    assert score.error is None and score.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        for pooling in ("last", "mean"):
            vectors, wanted = (each.embed(MIXED, False, pooling=pooling) for each in (llm, good))
            for ids, vector, want in zip(MIXED, vectors, wanted, strict=True):
                if BAD in ids:
                    assert vector.error == "the model's hidden states were not finite"
                    assert vector.outputs.embedding == []
                else:
                    near = pytest.approx(want.outputs.embedding, abs=1e-5)
                    assert vector.error is None and vector.outputs.embedding == near
        assert llm.is_finished() and llm.num_free_blocks == free


def test_rows_of_a_job_that_are_not_finite(model: Path, tmp_path: Path) -> None:
    """Of both kinds: generation and embeddings."""
    spoilt = with_a_bad_token(model, tmp_path / "model", BAD)
    rows = [
        {"custom_id": f"{number}", "url": url, "body": {key: prompt, **more}}
        for url, key, more in (
            ("/v1/embeddings", "input", {}),
            ("/v1/completions", "prompt", {"max_tokens": 3, "temperature": 0}),
        )
        for number, prompt in enumerate([[5, 6], [5, BAD, 6], [7]])
    ]
    source, answers = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    argv = ["run", source, "-o", answers, "--model", spoilt, "--device", "cpu", "--num-kvcache-blocks", 64]
    assert program.main([*map(str, argv), "--skip-tokenizer-init"]) == 1
    errors = [row["error"] and row["error"]["message"] for row in read_rows(answers)]
    assert [error is None for error in errors] == [True, False, True] * 2
    assert errors[1].endswith("the model's hidden states were not finite")
    assert errors[4].endswith("the model's logits were not finite")


@pytest.mark.parametrize("length_penalty", [1.0, 2.5])
def test_beam_search(llm: CheckedLLM, reference: Any, length_penalty: float) -> None:
    """Against a search over all logprobs of transformers."""
    width, steps, ends = 3, 4, set(llm.model_config.eos_token_ids)
    beams: list[tuple[list[int], float]] = [(PROMPT, 0.0)]
    ended: list[tuple[list[int], float]] = []

    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / (len(beam[0]) - len(PROMPT)) ** length_penalty

    for _ in range(steps):
        grown = []
        for tokens, total in beams:
            top = logprobs_of(reference, tokens)[-1].topk(2 * width)
            for value, token_id in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                beam = ([*tokens, token_id], total + value)
                (ended if token_id in ends else grown).append(beam)
        beams = sorted(grown, key=score, reverse=True)[:width]
    want = sorted([*ended, *beams], key=score, reverse=True)[:width]
    params = BeamSearchParams(beam_width=width, max_tokens=steps, length_penalty=length_penalty)
    [output] = llm.beam_search([PROMPT], params)
    assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in want]
    for beam, (tokens, total) in zip(output.sequences, want, strict=True):
        assert math.isclose(beam.cum_logprob, total, abs_tol=1e-3)
        assert len(beam.logprobs) == len(tokens) - len(PROMPT)


def test_beams_end_where_the_model_does(model: Path) -> None:
    with make_tiny(model, max_model_len=24) as llm:
        [output] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
        assert [len(beam.tokens) for beam in output.sequences] == [24, 24]
        assert {beam.finish_reason for beam in output.sequences} == {"length"}
        with pytest.raises(ValueError, match="beam_width=11 needs 22 logprobs, and max_logprobs=20; make"):
            llm.beam_search([PROMPT], BeamSearchParams(beam_width=11, max_tokens=1))
    with pytest.raises(ValueError, match="beam_width must be an integer of at least 1, not 0"):
        BeamSearchParams(beam_width=0, max_tokens=1)
    assert BeamSearchParams(2, 1, structured_outputs=None) == BeamSearchParams(2, 1)
    neutral: dict[str, Any] = {"skip_special_tokens": True, "allowed_token_ids": None, "watermarking": None}
    assert BeamSearchParams(2, 1, **neutral) == BeamSearchParams(2, 1)
    for name, value in (("skip_special_tokens", False), ("allowed_token_ids", [5]), ("watermarking", True)):
        with pytest.raises(ValueError, match=rf"BeamSearchParams\(\): {name}=.* is not supported; "):
            BeamSearchParams(2, 1, **{name: value})
    with pytest.raises(ValueError, match=r"structured_outputs=Struct.* is not supported; use generate\(\)"):
        BeamSearchParams(2, 1, structured_outputs=StructuredOutputsParams(regex="a"))
