"""How near the next tokens of a GGUF file are to those of its dequantised weights, beside llama.cpp.

    python -m tools.gguf_nearness FILE.gguf                       # nanovllm as it reads the file by default
    python -m tools.gguf_nearness FILE.gguf --engines nanovllm llama_cpp --threads 2

500 prompts, the same token ids for each engine: 250 questions by the file's chat template, and 250 openings
of texts without one. The reference is nanovllm in float32 with `quantization="dequantize"`. The tool prints
how many prompts have the reference's likeliest token, and the mean Kullback-Leibler divergence
KL(reference || engine) of the next token in nats, with the error of the mean and the largest of 100.
llama.cpp (the package llama-cpp-python) has its defaults, with a KV cache in 16 bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from nanovllm import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of {}?",
    "Tell me about {} in one sentence.",
    "Which language do most people in {} speak?",
    "Write a short poem about a journey to {}.",
    "How large is {}? Answer with a number.",
    "Name three foods that people like in {}.",
    "Translate into French: I have never been in {}.",
    "Is {} an island? Answer with yes or no.",
    "Write a Python function that returns the neighbours of {}.",
    "When is the best month to visit {}, and why?",
)
OPENINGS = (
    "The history of {} began",
    "{} is a country in",
    "When we arrived in {}, it was raining. The first thing that we",
    "def population():\n    # of {}\n    return",
    '{{"country": "{}", "capital": "',
    "1. {}\n2.",
    "Dear Sir,\n\nwe thank you for your letter from {}, which",
    "SELECT name, city FROM customers WHERE country = '{}'",
    "People in {} are often said to be",
    "Ten years ago nobody in {} had heard of computers. Today",
)
PLACES = (
    *("France", "Japan", "Brazil", "Kenya", "Norway", "India", "Canada", "Egypt", "Peru", "Iceland"),
    *("Italy", "Vietnam", "Ghana", "Poland", "Chile", "Turkey", "Nepal", "Cuba", "Jordan", "Samoa"),
    *("Ireland", "Mexico", "Mali", "Austria", "Fiji"),
)


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """The token ids of all prompts, each place in turn."""
    prompts = []
    for place, (question, opening) in product(PLACES, zip(QUESTIONS, OPENINGS, strict=True)):
        chat = [{"role": "user", "content": question.format(place)}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        prompts.append(tokenizer(opening.format(place))["input_ids"])
    return prompts


def own_logprobs(llm: LLM, prompts: Sequence[list[int]]) -> torch.Tensor:
    """The logprobs of the token after each prompt, [prompts, vocabulary] float32."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(prompts)

    def keeper(index: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        def keep(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            found[index] = logits.log_softmax(-1).cpu()
            return logits

        return keep

    params = [
        SamplingParams(temperature=0, max_tokens=1, logits_processors=[keeper(index)], detokenize=False)
        for index in range(len(prompts))
    ]
    llm.generate(list(prompts), params, use_tqdm=False)
    return torch.stack(found)


def llama_cpp_logprobs(path: str, prompts: Sequence[list[int]], threads: int) -> torch.Tensor:
    """As `own_logprobs`, with llama-cpp-python."""
    import llama_cpp

    print(f"llama-cpp-python {llama_cpp.__version__}", llama_cpp.llama_print_system_info().decode())
    llm = llama_cpp.Llama(path, n_ctx=512, verbose=False, n_threads=threads, n_threads_batch=threads)
    found = []
    for prompt in prompts:
        llm.reset()
        llm.eval(prompt)
        logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        found.append(torch.from_numpy(np.ctypeslib.as_array(logits, (llm.n_vocab(),)).copy()))
    return torch.stack(found).log_softmax(-1)


def row_of(reference: torch.Tensor, other: torch.Tensor) -> str:
    """The figures of an engine, as a row of a table."""
    p, q = reference.double(), other.double()
    kl = (p.exp() * (p - q)).sum(-1)
    same = (p.argmax(-1) == q.argmax(-1)).sum()
    error = kl.std() / len(kl) ** 0.5
    return f"{same} of {len(kl)} | {kl.mean():.5f} +- {error:.5f} | {kl.quantile(0.99):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--engines", nargs="+", default=["nanovllm"], choices=["nanovllm", "llama_cpp"])
    parser.add_argument("--dtype", default="auto", help="of nanovllm")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "num_threads": args.threads}

    with LLM(args.file, **common, dtype="float32", quantization="dequantize") as llm:
        prompts = prompts_of(llm.get_tokenizer())
        reference = own_logprobs(llm, prompts)
    print("| engine | the same first token | KL | the largest of 100 |")
    print("|---|---|---|---|")
    for engine in args.engines:
        if engine == "nanovllm":
            with LLM(args.file, **common, dtype=args.dtype) as llm:
                found = own_logprobs(llm, prompts)
        elif engine == "llama_cpp":
            found = llama_cpp_logprobs(args.file, prompts, args.threads)
        else:
            sys.exit(f"no engine {engine}")
        print(f"| {engine} | {row_of(reference, found)} |", flush=True)


if __name__ == "__main__":
    main()
