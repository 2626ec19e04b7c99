"""How many held-out problems the bundled demo model answers exactly right, through nanovllm, greedily.

python tools/eval_demo_model.py            # 1,000 problems that it was never trained on
python tools/eval_demo_model.py --kv-cache-dtype fp8      # and what the cache changes in log-probabilities
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from demo_tasks import heldout, score

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.batch import ALL_GREEDY, Batch, StepKind
from nanovllm.outputs import RequestOutput
from nanovllm.runner.inputs import prepare_prefill


def answer(llm: LLM, num_problems: int, seed: int = 1, use_tqdm: bool = False) -> list[RequestOutput]:
    """Return the greedy answers to that many held-out problems."""
    prompts = [example.prompt for example in heldout(num_problems, seed)]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return llm.chat(conversations, SamplingParams(temperature=0, max_tokens=400), use_tqdm=use_tqdm)


def evaluate(llm: LLM, num_problems: int, seed: int = 1, use_tqdm: bool = False) -> dict[str, float]:
    """Return the share of exact answers: "overall", then by task."""
    outputs = answer(llm, num_problems, seed, use_tqdm)
    return score(heldout(num_problems, seed), [output["text"] for output in outputs])


@torch.inference_mode()
def log_probabilities(llm: LLM, outputs: Sequence[RequestOutput]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the log-probability of each token of prompts and outputs but the first, given all before it; the
    likeliest token there), [tokens].

    Each sequence is one prefill step that reads its own keys and values from the cache, whose blocks it
    overwrites: for an idle engine of one rank, which is to generate nothing afterwards.
    """
    runner, chosen, likeliest = llm._runner, [], []
    for output in outputs:
        ids = np.array(output.prompt_token_ids + output["token_ids"], np.int32)
        length = np.full(1, len(ids), np.int32)
        batch = Batch(
            kind=StepKind.PREFILL,
            seq_ids=(0,),
            slots=np.zeros(1, np.int32),
            token_ids=ids,
            query_lens=length,
            context_lens=length,
            block_tables=np.arange(-(-len(ids) // runner.block_size), dtype=np.int32)[None],
            draws=np.ones(1, np.int32),
            sampling=ALL_GREEDY,
        )
        inputs = runner.staging.send(prepare_prefill(batch, runner.block_size))()
        inputs = replace(inputs, attention=replace(inputs.attention, wanted_rows=None))
        logits = runner.model.compute_logits(runner.run_model(inputs)[:-1])
        assert logits is not None
        scores = logits.float().log_softmax(-1).cpu()
        chosen.append(scores.gather(1, torch.from_numpy(ids[1:, None]).long())[:, 0])
        likeliest.append(scores.argmax(-1))
    return torch.cat(chosen), torch.cat(likeliest)


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
        quantised = args.kv_cache_dtype != "auto" and args.tensor_parallel_size == 1
        found = log_probabilities(llm, outputs) if quantised else None
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
