"""Engines compute each token of the tree of their prompts once, and answer as without the prefix cache.

The KV cache starts as NaN on every rank.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inside
import pytest
from checked_llm import CheckedLLM, make_tiny
from engine_cases import make_prompts, tokens
from jobs import Lent, read_rows, run, write_rows
from prefix_cases import branching_prompts, must_compute, share_whole_blocks_only
from tiny_models import VOCAB_SIZE, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.compat import INTERPRET

FEW = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
AMPLE: dict[str, Any] = {"max_model_len": 360, "max_num_batched_tokens": 4096}


def prompts_of(seed: int, count: int = 24, longest: int = 300) -> list[list[int]]:
    return branching_prompts(random.Random(seed), count, longest, VOCAB_SIZE)


def make(model: Path, block_size: int, prompts: Sequence[Sequence[int]], **options: Any) -> CheckedLLM:
    """With a KV cache for all prompts at once."""
    blocks = sum(len(prompt) // block_size + 2 for prompt in prompts)
    return make_tiny(
        model, **AMPLE | {"kvcache_block_size": block_size, "num_kvcache_blocks": blocks} | options
    )


def check_counts(llm: LLM, prompts: Sequence[Sequence[int]], computed: int) -> None:
    stats = llm.stats()
    assert stats.num_computed_tokens == computed
    assert stats.num_cached_tokens == sum(map(len, prompts)) - computed


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Without the prefix cache."""
    with make(model, 64, prompts_of(1), enable_prefix_caching=False) as llm:
        return tokens(llm.generate(prompts_of(1), FEW, use_tqdm=False))


@pytest.mark.parametrize("budget", [50, 4096])
@pytest.mark.parametrize("block_size", [16, 40, 64, 256])
def test_the_tree_is_computed_once(
    model: Path, expected: list[list[int]], block_size: int, budget: int
) -> None:
    prompts = prompts_of(1)
    with make(model, block_size, prompts, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(prompts, FEW, use_tqdm=False)
        assert tokens(outputs) == expected
        check_counts(llm, prompts, must_compute(prompts))
        assert sum(each.num_cached_tokens for each in outputs) == llm.stats().num_cached_tokens
        assert any(batch.copies for batch in llm.batches)
        again = llm.generate(prompts, FEW, use_tqdm=False)
        assert tokens(again) == expected
        assert [each.num_cached_tokens for each in again] == [len(prompt) - 1 for prompt in prompts]


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"attention_backend": "reference"}], ids=str
)
def test_on_each_rank_and_backend(model: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    prompts = prompts_of(1)
    with make(model, 64, prompts, **options) as llm:
        assert tokens(llm.generate(prompts, FEW, use_tqdm=False)) == expected
        check_counts(llm, prompts, must_compute(prompts))


def test_prefill_in_two_halves(model: Path) -> None:
    """A row copies in the half in which it begins, from rows of the same half and of the one before."""
    prompts = prompts_of(2, 60, 90)
    prompts += [[5, 6, 7, *prompt] for prompt in prompts_of(3, 40, 80)]
    own = [[number % 90 + 2, *([7] * 30)] for number in range(90)]
    results = []
    for size in (1, 2):
        with make(model, 16, prompts, tensor_parallel_size=size, max_num_seqs=256) as llm:
            mixed = [each for pair in zip(prompts, own, strict=False) for each in pair]
            results.append(tokens(llm.generate(mixed, ONE, use_tqdm=False)))
            largest = max(len(batch.token_ids) for batch in llm.batches)
    assert results[0] == results[1] and largest >= 2048


def test_samples_share_their_prompt(model: Path) -> None:
    prompts = prompts_of(4, 6, 100)
    params = SamplingParams(temperature=1, n=4, max_tokens=2, ignore_eos=True, seed=1)
    with make(model, 64, prompts * 4) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        computed = sum(len(batch.token_ids) for batch in llm.batches if batch.query_lens.max() > 1)
        rows = [prompt for prompt in prompts for _ in range(4)]
        assert llm.stats().num_computed_tokens == must_compute(rows) >= computed


def test_a_stream_and_requests_between_steps(model: Path) -> None:
    prompts = prompts_of(5)
    with make(model, 64, prompts, max_num_seqs=3) as llm:
        answers = {output.request_id: output["token_ids"] for output in llm.stream(iter(prompts), FEW)}
        check_counts(llm, prompts, must_compute(prompts))
    with make(model, 64, prompts, enable_prefix_caching=False) as llm:
        whole = tokens(llm.generate(prompts, FEW, use_tqdm=False))
    assert [answers[number] for number in sorted(answers, key=int)] == whole


def test_chats_with_histories(model: Path) -> None:
    """Each turn computes what is new, and the last token of the answer before it."""
    chats = [[number + 2, *prompt] for number, prompt in enumerate(prompts_of(6, 4, 60))]
    plain = [list(chat) for chat in chats]
    with make(model, 64, [[0] * 200] * 4) as llm, make(model, 64, chats, enable_prefix_caching=False) as off:
        for turn in range(4):
            outputs = llm.generate(chats, FEW, use_tqdm=False)
            assert tokens(outputs) == tokens(off.generate(plain, FEW, use_tqdm=False))
            if turn:
                new = [len(chat) - each.num_cached_tokens for chat, each in zip(chats, outputs, strict=True)]
                assert new == [1 + 4] * 4
            for chat, each in zip(chats, outputs, strict=True):
                chat += [*each["token_ids"], 9, 8, 7, turn + 1]
            plain = [list(chat) for chat in chats]


def test_tokens_that_are_scored_or_pooled(model: Path) -> None:
    """Every token whose hidden state is asked for is computed, and those before it once."""
    start = prompts_of(7, 1, 120)[0] + [3] * 60
    with make(model, 64, [start] * 20) as llm:
        scores = llm.score(start, [[number + 2, 5, 6] for number in range(5)])
        assert [each.num_cached_tokens for each in scores] == [0, *[len(start) - 1] * 4]
        first = llm.stats().num_computed_tokens
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        llm.generate([start] * 2, params, use_tqdm=False)
        assert llm.stats().num_computed_tokens - first == 2 * len(start)
        llm.embed([start], use_tqdm=False, pooling="mean")
        assert llm.stats().num_computed_tokens - first == 3 * len(start)
        llm.embed([start], use_tqdm=False, pooling="last")
        assert llm.stats().num_computed_tokens - first == 3 * len(start) + 1


@pytest.mark.parametrize("num_blocks", [12, 20])
def test_under_pressure(model: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemptions happen; no more is computed than with whole blocks only."""
    prompts, params = prompts_of(8, 24, 40), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    results, computed = [], []
    for options in ({"enable_prefix_caching": False}, {"whole": True}, {}):
        with monkeypatch.context() as patch:
            if options.pop("whole", None):
                share_whole_blocks_only(patch)
            with make_tiny(model, num_kvcache_blocks=num_blocks, **options) as llm:
                results.append(tokens(llm.generate(prompts, params, use_tqdm=False)))
                computed.append(llm.stats().num_computed_tokens)
                assert num_blocks == 20 or llm.stats().num_preemptions
    assert results[0] == results[1] == results[2]
    assert computed[2] <= computed[1] < computed[0]


def test_an_fp8_cache_copies_its_bytes(model: Path) -> None:
    prompts = prompts_of(9, 12, 60)
    results = []
    for options in ({}, {"enable_prefix_caching": False}, {"tensor_parallel_size": 2}):
        with make(model, 64, prompts, kv_cache_dtype="fp8", **options) as llm:
            results.append(tokens(llm.generate(prompts, FEW, use_tqdm=False)))
            if "enable_prefix_caching" not in options:
                check_counts(llm, prompts, must_compute(prompts))
    assert results[0] == results[1] == results[2]


def test_a_job_computes_its_tree(one: LLM, tmp_path: Path) -> None:
    """Rows of three instructions in random order."""
    starts = ["Add the two numbers. ", "Add the two numbers and say why: ", "Which one is larger? "]
    texts = [f"{starts[number % 3]}{3 * number} and {7 * number}." for number in range(40)]
    random.Random(0).shuffle(texts)
    prompts = [one.tokenizer.encode(text) for text in texts]
    one.reset_prefix_cache()
    before = one.stats().num_computed_tokens
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": text} for text in texts])
    assert run(rows, "-o", tmp_path / "out.jsonl", "--sampling", "max_tokens=2", make_llm=Lent(one)) == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 40
    assert one.stats().num_computed_tokens - before == must_compute(prompts)


def test_replicas_compute_each_branch_at_most_once_each(two: LLM) -> None:
    prompts = branching_prompts(random.Random(11), 40, 90, 60)
    two.reset_prefix_cache()
    before = two.stats().num_computed_tokens
    two.generate(prompts, ONE, use_tqdm=False)
    computed = two.stats().num_computed_tokens - before
    nodes = Counter(tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt)))
    branches = sum(count > 1 for count in nodes.values())
    assert len(nodes) <= computed <= must_compute(prompts) + branches


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases")
def test_deterministic_answers_have_the_same_bits(model: Path) -> None:
    """Logprobs of a prompt that parts from others within a block, and of one that is computed whole."""
    begin, end = make_prompts()[4], [7, 8, 9]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    results = []
    for options in ({"enable_prefix_caching": False}, {}):
        with make(model, 32, [begin] * 8, deterministic=True, **options) as llm:
            assert inside.runner(llm).backend.name == "triton"
            llm.generate([[*begin[:11], 3]], ONE, use_tqdm=False)
            outputs = llm.generate([begin, [*begin, *end]], params, use_tqdm=False)
            results.append([each.outputs[0].logprobs for each in outputs])
            cached = [each.num_cached_tokens for each in outputs]
            assert cached == ([11, len(begin)] if not options else [0, 0])
    assert str(results[0]) == str(results[1])


@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "gemma4"])
def test_layers_with_windows_part_at_the_same_tokens(tmp_path: Path, family: str) -> None:
    """The answers are those without a cache, and each prompt is computed from where it parts."""
    folder, prompts = write_tiny_model(tmp_path, family), prompts_of(1, 12, 60)
    answers = []
    for options in ({"enable_prefix_caching": False}, {}):
        with make(folder, 8, prompts * 4, max_model_len=64, **options) as llm:
            outputs = llm.generate(prompts, FEW, use_tqdm=False)
            answers.append([each["token_ids"] for each in outputs])
            assert not all(each.policy.keeps_all for each in inside.scheduler(llm).room.groups)
            pairs = zip(prompts, outputs, strict=True)
            computed = sum(len(prompt) - each.num_cached_tokens for prompt, each in pairs)
            assert computed == (must_compute(prompts) if not options else sum(map(len, prompts)))
            assert any(batch.copies for batch in llm.batches) == (not options)
    assert answers[0] == answers[1]


def test_layers_of_two_sizes_and_layers_without_own_keys(tmp_path: Path) -> None:
    """A layer that reads another one's keys and values finds what that one copied."""
    changes = {"layer_types": ["full_attention"] * 7}
    folder, prompts = write_tiny_model(tmp_path, "gemma4-small", **changes), prompts_of(1, 12, 60)
    results = []
    for options in ({}, {"enable_prefix_caching": False}):
        with make(folder, 16, prompts, max_model_len=64, **options) as llm:
            results.append(tokens(llm.generate(prompts, FEW, use_tqdm=False)))
            specs = [layer.spec for layer in inside.model(llm).attention_layers]
            assert any(spec.kv_from is not None for spec in specs)
    assert results[0] == results[1]


def test_branches_are_computed_together(model: Path) -> None:
    """A KV cache for a few rows: shuffled questions about documents, each document is computed once."""
    rng = random.Random(5)
    documents = [[rng.randrange(1, VOCAB_SIZE) for _ in range(130)] for _ in range(8)]
    prompts = [[*document, number, 1 + number] for document in documents for number in range(1, 6)]
    rng.shuffle(prompts)
    few: dict[str, Any] = AMPLE | {"kvcache_block_size": 16, "num_kvcache_blocks": 27, "max_num_seqs": 4}
    with make_tiny(model, **few, enable_prefix_caching=False) as llm:
        answers = tokens(llm.generate(prompts, FEW, use_tqdm=False))
    with make_tiny(model, **few) as llm:
        assert tokens(llm.generate(prompts, FEW, use_tqdm=False)) == answers
        check_counts(llm, prompts, must_compute(prompts))
    with make_tiny(model, **few) as llm:  # one after the other, as a stream reads them
        assert tokens(sorted(llm.stream(prompts, FEW), key=lambda each: each.index)) == answers
        assert llm.stats().num_computed_tokens > 2 * must_compute(prompts)
