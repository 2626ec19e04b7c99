"""Run random requests on a CPU for long, with every address that a kernel uses checked; compare bits.

    python -m tools.soak_cpu                                       # 2,000 requests in bfloat16
    python -m tools.soak_cpu --quantization int8 --requests 10000

The KV cache is too small for the batch, so sequences are preempted; a tenth of the requests is aborted. After
each round the engine sleeps and wakes up, its weights are loaded again, and one prompt must have the same
tokens and log-probabilities, bit for bit. Exits with status 1 if they differ or nothing was preempted.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from typing import Any

os.environ.setdefault("NANOVLLM_CPU_CHECK", "1")  # read when kernels are imported

from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams, demo_model_path

ROUND = 250  # requests between two comparisons
RUNNING = 48  # requests that wait or run at once
CACHE = {"kvcache_block_size": 16, "num_kvcache_blocks": 40}
PROMPT = "What is 687087 + 67?"


def random_params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 16, 60]), "ignore_eos": rng.random() < 0.5}
    options |= {"temperature": rng.choice([0, 0.6, 1.0])}
    options |= {"top_p": rng.choice([1.0, 0.9])} | ({"top_k": 20} if rng.random() < 0.3 else {})
    options |= {"logprobs": rng.randrange(4)} if rng.random() < 0.2 else {}
    options |= {"repetition_penalty": 1.2} if rng.random() < 0.1 else {}
    return SamplingParams(**options)


def bits(llm: LLM) -> tuple[list[int], list[float]]:
    """The tokens of PROMPT and their log-probabilities."""
    (output,) = llm.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=24, logprobs=0), use_tqdm=False
    )
    tokens, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert logprobs is not None
    return list(tokens), [each[token].logprob for token, each in zip(tokens, logprobs, strict=True)]


def run_round(llm: LLM, rng: random.Random, count: int) -> tuple[int, int]:
    """Run `count` random requests; return how many ended, and how many were aborted."""
    ended = aborted = added = 0
    running: set[str] = set()
    while added < count or running:
        while added < count and len(running) < RUNNING:
            text = "".join(
                rng.choice("What is 0123456789 + times Write DONE?") for _ in range(rng.randint(1, 150))
            )
            running.add(llm.add_request(text, random_params(rng)))
            added += 1
        done = {output.request_id for output in llm.step() if output.finished}
        ended += len(done)
        running -= done
        if running and rng.random() < 0.03:
            request = rng.choice(sorted(running))
            llm.abort(request)
            running.discard(request)
            aborted += 1
    return ended, aborted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, start = random.Random(options.seed), time.monotonic()
    folder = demo_model_path()
    settings = {"dtype": options.dtype, "quantization": options.quantization, "seed": options.seed}
    ended = aborted = different = 0
    with LLM(folder, device="cpu", max_num_seqs=32, **CACHE, **settings) as llm:
        expected = bits(llm)
        while ended + aborted < options.requests:
            more, stopped = run_round(llm, rng, min(ROUND, options.requests - ended - aborted))
            ended, aborted = ended + more, aborted + stopped
            different += bits(llm) != expected
            llm.sleep(level=1)
            llm.wake_up()
            different += bits(llm) != expected
            llm.update_weights(load_file(f"{folder}/model.safetensors"))
            different += bits(llm) != expected
        preempted = llm.stats().num_preemptions
    print(
        f"{options.quantization or options.dtype}: {ended:,} requests ended, {aborted:,} aborted, "
        f"{preempted:,} preemptions, {different} comparisons differ, {time.monotonic() - start:.0f} s"
    )
    sys.exit(1 if different or not preempted else 0)


if __name__ == "__main__":
    main()
