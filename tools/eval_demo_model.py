"""The share of held-out problems that the bundled demo model solves exactly, with nanovllm, greedily.

python tools/eval_demo_model.py            # 1,000 problems that it was never trained on
python tools/eval_demo_model.py --kv-cache-dtype fp8      # and what the cache changes in log-probabilities
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from demo_tasks import heldout, score

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.outputs import RequestOutput


def answer(llm: LLM, num_problems: int, seed: int = 1, use_tqdm: bool = False) -> list[RequestOutput]:
    """Return the greedy answers to some held-out problems."""
    prompts = [example.prompt for example in heldout(num_problems, seed)]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return llm.chat(conversations, SamplingParams(temperature=0, max_tokens=400), use_tqdm=use_tqdm)


def evaluate(llm: LLM, num_problems: int, seed: int = 1, use_tqdm: bool = False) -> dict[str, float]:
    """Return the share of exact answers: "overall", then by task."""
    outputs = answer(llm, num_problems, seed, use_tqdm)
    return score(heldout(num_problems, seed), [output["text"] for output in outputs])


def log_probabilities(llm: LLM, outputs: Sequence[RequestOutput]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the log-probability of each token of prompts and outputs but the first, given all before it; the
    likeliest token there), [tokens]."""
    texts = [output.prompt_token_ids + output["token_ids"] for output in outputs]
    scored = llm.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    rows = [
        (entry[token].logprob, next(each for each, found in entry.items() if found.rank == 1))
        for output in scored
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    chosen, likeliest = zip(*rows, strict=True)
    return torch.tensor(chosen), torch.tensor(likeliest)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=demo_model_path(), help="default: the bundled one")
    parser.add_argument("--num-problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    options = {
        "device": args.device,
        "dtype": args.dtype,
        "attention_backend": args.attention_backend,
        "kv_cache_dtype": args.kv_cache_dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
    }
    with LLM(args.model, **options) as llm:
        outputs = answer(llm, args.num_problems, args.seed, use_tqdm=True)
        found = log_probabilities(llm, outputs) if args.kv_cache_dtype != "auto" else None
    scores = score(heldout(args.num_problems, args.seed), [output["text"] for output in outputs])
    for task, share in scores.items():
        print(f"{task:16} {share:7.2%}")
    if found is not None:
        with LLM(args.model, **options | {"kv_cache_dtype": "auto"}) as llm:
            exact = log_probabilities(llm, outputs)
        gap = (found[0] - exact[0]).abs()
        same = (found[1] == exact[1]).double().mean()
        print(
            f"log-probabilities of {len(gap):,} tokens of problems and answers, against those with an exact "
            f"cache: off by {gap.mean():.4f} on average and {gap.max():.2f} at most; the likeliest token is "
            f"the same for {same:.2%}"
        )


if __name__ == "__main__":
    main()
