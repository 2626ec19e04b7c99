"""How many held-out problems the bundled demo model answers exactly right, through nanovllm, greedily.

python tools/eval_demo_model.py            # 1,000 problems that it was never trained on
"""

from __future__ import annotations

import argparse

from demo_tasks import heldout, score

from nanovllm import LLM, SamplingParams, demo_model_path


def evaluate(llm: LLM, num_problems: int, seed: int = 1, use_tqdm: bool = False) -> dict[str, float]:
    """Return the share of exact answers: "overall", then by task."""
    examples = heldout(num_problems, seed)
    conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=400), use_tqdm=use_tqdm)
    return score(examples, [output["text"] for output in outputs])


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
        scores = evaluate(llm, args.num_problems, args.seed, use_tqdm=True)
    for task, share in scores.items():
        print(f"{task:16} {share:7.2%}")


if __name__ == "__main__":
    main()
