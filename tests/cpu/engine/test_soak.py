"""Many short requests of every kind through `stream`: one output for each, nothing left over, no memory leak.

With NANOVLLM_SOAK_REQUESTS=20000 this takes long. One test only reads a million prompts.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import BLOCK, CheckedLLM
from test_texts import TOKENIZERS, model_for

from nanovllm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanovllm.engine.requests import Requests
from nanovllm.streams import reader
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import parse_prompts

TOKENIZER = TOKENIZERS["byte_level"]
VOCAB = len(TOKENIZER)
NUM_REQUESTS = int(os.environ.get("NANOVLLM_SOAK_REQUESTS", "800"))
KEPT_BYTES = 500_000  # allowed growth of Python's memory from the first to the last quarter of a soak
READ_BLOCKS = 20_000  # allowed growth, in blocks of up to 512 bytes, while a million prompts are read
BAD_PROMPTS: list[Any] = [[], None, "", "a\ud800", [VOCAB], [5, "x"], {"text": "x"}, [5] * 60]
TEXTS = ["Hello the world", "the wörld", "日本語 🌍", "I say: the"]


def broken(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * (math.nan if len(output_ids) == 1 else 1.0)


def random_params(rng: random.Random) -> SamplingParams:
    """A random combination of parameters that a request may have."""

    def some(chance: float, **values: Any) -> dict[str, Any]:
        return values if rng.random() < chance else {}

    options: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 4, 12])}
    options |= some(0.5, temperature=0) or {
        "temperature": rng.choice([0.5, 1.0, 2.0]),
        "n": rng.choice([1, 1, 1, 3]),
    }
    options |= some(0.2, seed=rng.randrange(99)) | some(0.2, top_k=rng.randint(1, 40))
    options |= some(0.2, top_p=rng.uniform(0.1, 1)) | some(0.1, min_p=rng.uniform(0, 0.5))
    options |= some(0.2, repetition_penalty=rng.uniform(0.5, 2)) | some(
        0.1, frequency_penalty=rng.uniform(-2, 2)
    )
    options |= some(0.1, presence_penalty=rng.uniform(-2, 2)) | some(0.1, ignore_eos=True)
    options |= some(0.1, logit_bias={rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(5)})
    options |= some(0.2, logprobs=rng.randrange(6)) | some(0.15, prompt_logprobs=rng.randrange(4))
    options |= some(0.2, stop=rng.sample(["a", "th", "e", "ö", "日"], 2)) | some(0.1, min_tokens=1)
    options |= some(0.1, allowed_token_ids=rng.sample(range(VOCAB), 40)) | some(0.1, bad_words=["e", "wo"])
    options |= some(0.1, stop_token_ids=rng.sample(range(VOCAB), 20))
    options |= some(0.05, structured_outputs=StructuredOutputsParams(regex="[a-c]{1,4}"))
    options |= some(0.05, detokenize=False, stop=None) | some(0.03, logits_processors=[broken])
    return SamplingParams(**options)


def rows(rng: random.Random, count: int) -> Iterator[tuple[Any, SamplingParams]]:
    shared = [rng.randrange(VOCAB - 3) for _ in range(3 * BLOCK)]
    for _ in range(count):
        prompt = shared[: rng.randint(1, 24)] + [rng.randrange(VOCAB - 3) for _ in range(rng.randint(1, 9))]
        kind = rng.random()
        yield (
            rng.choice(BAD_PROMPTS) if kind < 0.05 else rng.choice(TEXTS) if kind < 0.3 else prompt,
            random_params(rng),
        )


def check_output(output: RequestOutput, params: SamplingParams) -> str:
    """Check an output; return how its first completion ended."""
    first = output.outputs[0]
    if output.error is not None:
        assert first.finish_reason == "error" or any(c.finish_reason == "error" for c in output.outputs)
        return "refused" if output.metrics is None else "error"
    assert len(output.outputs) == params.n
    for completion in output.outputs:
        assert len(completion.token_ids) <= params.max_tokens
        assert (completion.logprobs is None) == (params.logprobs is None)
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
        assert completion.finish_reason in ("stop", "length", "abort")
    if params.prompt_logprobs is not None and first.finish_reason != "abort":
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return first.finish_reason


def soak(llm: LLM, rng: random.Random, count: int) -> Counter[str]:
    """Stream this many requests and abort some; return how they ended."""
    source, given, started = rows(rng, count), {}, inside.next_id(llm)
    ends: Counter[str] = Counter()

    def prompts() -> Iterator[Any]:
        for index, (prompt, params) in enumerate(source):
            given[index] = params
            yield prompt

    def parameters() -> Iterator[SamplingParams]:
        index = 0
        while index in given or index < count:
            yield given[index]
            index += 1

    for output in llm.stream(prompts(), parameters(), on_error="return"):
        # KeyError: a second output for the same index.
        ends[check_output(output, given.pop(output.index))] += 1
        if rng.random() < 0.1:
            llm.abort(started + output.index + rng.randint(1, 20))
    assert not given and sum(ends.values()) == count
    return ends


@pytest.mark.parametrize("run_ahead", [True, False], ids=["ahead", "in_step"])
def test_soak(tmp_path: Path, run_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks and chunked prefill, so that sequences are preempted."""
    model, rng, parts = model_for(TOKENIZER, tmp_path), random.Random(6), 4
    options = {"num_kvcache_blocks": 14, "max_num_seqs": 16, "max_num_batched_tokens": 50}
    ends: Counter[str] = Counter()
    monkeypatch.setattr(reader, "READ_SECONDS", 60.0)  # prompts are always ready, however busy the machine is
    num_preempted = 0
    with CheckedLLM(
        model, device="cpu", kvcache_block_size=BLOCK, max_model_len=56, async_scheduling=run_ahead, **options
    ) as llm:
        held = []
        tracemalloc.start()
        try:
            for _ in range(parts):
                ends += soak(llm, rng, NUM_REQUESTS // (2 * parts))
                num_preempted += sum(bool(seq.num_preemptions) for seq in llm.sequences)
                llm.batches.clear()
                llm.sequences.clear()
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert num_preempted >= 5
        assert llm.is_finished() and not inside.requests(llm) and not inside.stop_searches(llm)
        assert inside.block_manager(llm).pool.usage == 0
        assert held[-1] - held[0] < KEPT_BYTES, held
    assert set(ends) == {"stop", "length", "abort", "error", "refused"}, ends


def test_a_million_prompts_are_read_in_bounded_memory() -> None:
    """The reader keeps no prompt that it returned."""
    count, most = 1_000_000, 512
    prompts = reader.PromptReader(
        ([5, index % 90, 7] for index in range(count)), SamplingParams(max_tokens=1)
    )
    num_read, first, held = 0, 0, 0
    while not prompts.ended:
        first_index, read, _ = prompts.read(most)
        assert first_index == num_read and len(read) <= most
        num_read += len(read)
        first = first or sys.getallocatedblocks()
        held = max(held, sys.getallocatedblocks() - first)
    assert num_read == count and held < READ_BLOCKS, held


def test_a_prompt_is_kept_once() -> None:
    """Its ids are those of the request, however many sequences continue it."""
    processor = Processor(None, VOCAB, [])
    params = SamplingParams(n=3, max_tokens=2)
    [request] = processor.make_requests(parse_prompts([5] * 1_000_000), [params], 0)
    requests = Requests(processor, 0)
    tracemalloc.start()
    try:
        sequences = requests.make_sequences(request)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert all(seq.prompt_ids is request.prompt_token_ids for seq in sequences)
    for seq in sequences:
        seq.append(7)
        assert seq.token_bytes(999_998, 1_000_001) == array("i", [5, 5, 7]).tobytes()
        assert seq.num_tokens == 1_000_001 and seq.token_ids[-2:].tolist() == [5, 7]
    assert len(request.prompt_token_ids) == 1_000_000
