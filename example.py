"""Ask a model a few questions and print its answers. Without arguments: the bundled demo model."""

from __future__ import annotations

import argparse

from nanovllm import LLM, SamplingParams, demo_model_path

DEMO_QUESTIONS = [
    "What is 687087 + 67?",
    "Multiply 624292 by 4.",
    "Sort these numbers: 67 45 92 20 73 71 40.",
    "Reverse the word NOTEBOOK.",
    "How many times does A appear in BANANA?",
    "List the primes from 167 to 182.",
    "Count down from 67 to 56 in steps of 4.",
    "Write DONE 3 times.",
]

QUESTIONS = [
    "Introduce yourself in one sentence.",
    "List all prime numbers below 100.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model folder or a Hugging Face hub id, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--temperature", type=float, help="0 is greedy; default: 0 for the demo model, else 0.6"
    )
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: a faster start")
    parser.add_argument("questions", nargs="*", help="default: a few sample questions")
    args = parser.parse_args()

    is_demo = args.model is None
    temperature = args.temperature if args.temperature is not None else (0.0 if is_demo else 0.6)
    questions = args.questions or (DEMO_QUESTIONS if is_demo else QUESTIONS)
    with LLM(
        args.model or demo_model_path(),
        tensor_parallel_size=args.tensor_parallel_size,
        device=args.device,
        enforce_eager=args.enforce_eager,
    ) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens)
        outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    for question, output in zip(questions, outputs, strict=True):
        print(f"\n> {question}\n{output['text'].strip()}")
    if is_demo:
        print(
            "\nThis was the bundled demo model, which knows about twenty small tasks and nothing else. "
            "For a real model:\n"
            "    python example.py --model Qwen/Qwen3-0.6B     (a hub id or a folder; more options: --help)"
        )


if __name__ == "__main__":
    main()
