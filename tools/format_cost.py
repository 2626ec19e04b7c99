"""What a stored format costs: how far its next-token distributions are from those of the base checkpoint.

    python -m tools.format_cost BASE OTHER [OTHER ...]       # folders or files that LLM reads
    python -m tools.format_cost BASE --quantization fp8      # the base's weights, quantised at load

The base model answers fixed questions greedily. Each other model then gets the same answers token by token,
and its distribution before each token is compared with the base's: the Kullback-Leibler divergence
KL(base || other) in nats, the change of the token's log-probability, and whether the likeliest token is the
same. The bundled demo model is also scored on held-out problems, which have one right answer each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm import LLM, SamplingParams, demo_model_path
from tools.demo_tasks import heldout, score

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain photosynthesis to a child in four sentences.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five animals that live in the desert.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the journey?",
    "Translate into Spanish: The weather is nice today, and we go to the beach.",
    "Write a short poem about the sea.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the story of Romeo and Juliet in three sentences.",
    "How do I boil an egg?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write an email that asks a colleague to move a meeting to Thursday.",
    "What are the three laws of motion?",
    "Explain what an operating system does.",
    "Which planets have rings?",
    "Write an SQL query that counts the orders of each customer.",
    "What is 17 times 23? Show the steps.",
    "Name three causes of the French Revolution.",
    "How does a bicycle stay upright?",
    "Suggest a name for a cafe by a river, and say why.",
    "What does HTTP status 404 mean?",
    "Describe the water cycle.",
    "Who wrote Don Quixote, and when?",
)


@dataclass
class Answer:
    """The base's greedy answer: its tokens, and the log-probabilities before each, [tokens, vocabulary]."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Cost:
    """Means over all tokens of all answers."""

    tokens: int
    kl: float
    kl_99: float  # of 100 tokens, one has a larger divergence
    logprob: float  # the change of the log-probability of the base's token, absolute
    same: float  # the share of tokens whose likeliest token is the base's


def record_answers(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
    """The greedy answers of the base to token ids, with all distributions on the CPU."""
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]

    def recorder(own: list[torch.Tensor]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        def record(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            own.append(torch.log_softmax(logits, -1).cpu())
            return logits

        return record

    params = [
        SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, logits_processors=[recorder(own)]
        )
        for own in rows
    ]
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [
        Answer(prompt, tokens, torch.stack(own[: len(tokens)]))
        for prompt, own, output in zip(prompts, rows, outputs, strict=True)
        if (tokens := output["token_ids"])
    ]


def compare(llm: LLM, answers: Sequence[Answer]) -> Cost:
    """The distance of the distributions of `llm` from those that the answers hold."""
    found: list[list[tuple[float, float, bool]]] = [[] for _ in answers]

    def forcer(
        answer: Answer, own: list[tuple[float, float, bool]]
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            step = len(output)
            if step < len(answer.tokens) and len(own) == step:
                token = answer.tokens[step]
                base = answer.logprobs[step].to(logits.device)
                other = torch.log_softmax(logits, -1)
                kl = (base.exp() * (base - other)).sum()
                change = (base[token] - other[token]).abs()
                own.append((float(kl), float(change), bool(other.argmax() == base.argmax())))
            token = answer.tokens[min(step, len(answer.tokens) - 1)]
            return torch.full_like(logits, -torch.inf).index_fill_(
                0, torch.tensor([token], device=logits.device), 0.0
            )

        return force

    params = [
        SamplingParams(
            temperature=0,
            max_tokens=len(answer.tokens),
            ignore_eos=True,
            detokenize=False,
            logits_processors=[forcer(answer, own)],
        )
        for answer, own in zip(answers, found, strict=True)
    ]
    llm.generate([answer.prompt for answer in answers], params, use_tqdm=False)
    columns = zip(*(row for rows in found for row in rows), strict=True)
    kl, change, same = (torch.tensor(each, dtype=torch.float64) for each in columns)
    return Cost(len(kl), float(kl.mean()), float(kl.quantile(0.99)), float(change.mean()), float(same.mean()))


def accuracy(llm: LLM, num_problems: int) -> float:
    """The share of held-out problems that the demo model solves, greedily."""
    examples = heldout(num_problems, 1)
    conversations = [[{"role": "user", "content": example.prompt}] for example in examples]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    return score(examples, [output["text"] for output in outputs])["overall"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", nargs="?", default=str(demo_model_path()), help="default: the bundled model")
    parser.add_argument("others", nargs="*")
    parser.add_argument("--quantization", action="append", default=[], help="of the base, at load")
    parser.add_argument("--kv-cache-dtype", action="append", default=[], help="of the base")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--problems", type=int, default=0, help="held-out problems of the demo model to score"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    common: dict[str, Any] = {"dtype": args.dtype, "device": args.device, "max_model_len": 1024}
    settings: list[tuple[str, str, dict[str, Any]]] = [(each, each, {}) for each in args.others]
    settings += [(f"quantization={each}", args.base, {"quantization": each}) for each in args.quantization]
    settings += [
        (f"kv_cache_dtype={each}", args.base, {"kv_cache_dtype": each}) for each in args.kv_cache_dtype
    ]

    @contextmanager
    def opened(model: str, **options: Any) -> Iterator[LLM]:
        with LLM(model, **common | options) as llm:
            yield llm

    with opened(args.base) as llm:
        asked = [example.prompt for example in heldout(64, 2)] if args.problems else QUESTIONS
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": each}], add_generation_prompt=True, return_dict=False
            )
            for each in asked
        ]
        answers = record_answers(llm, prompts, args.max_tokens)
        right = f" {accuracy(llm, args.problems):7.2%}" if args.problems else ""
        print(
            f"{'base':40} {'tokens':>6} {'KL':>8} {'KL 99 %':>8} {'logprob':>8} {'same':>7}{right}",
            flush=True,
        )
    for name, model, options in settings:
        with opened(model, **options) as llm:
            cost = compare(llm, answers)
            right = f" {accuracy(llm, args.problems):7.2%}" if args.problems else ""
            print(
                f"{name[-40:]:40} {cost.tokens:6} {cost.kl:8.5f} {cost.kl_99:8.5f} {cost.logprob:8.4f} "
                f"{cost.same:7.2%}{right}",
                flush=True,
            )


if __name__ == "__main__":
    main()
