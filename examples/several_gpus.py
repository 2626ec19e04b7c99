"""Several GPUs: two replicas of a model, each on `tensor_parallel_size` GPUs of its own.

python examples/several_gpus.py [MODEL]      (on a CPU: two processes that share it)
"""

import sys

from nanovllm import LLM, SamplingParams, demo_model_path

# data_parallel_size: many prompts for a model that fits one GPU. tensor_parallel_size: one that does not.
OPTIONS = {"data_parallel_size": 2, "tensor_parallel_size": 1}


def main() -> None:
    prompts = [f"What is {number} + {number + 1}?" for number in range(10, 30)]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model_path(), **OPTIONS) as llm:
        # One queue feeds both. Outputs, their order and their seeds are those of one engine.
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=100))
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"{prompt} {output['text'].splitlines()[-1]}")
        print(llm.stats())


if __name__ == "__main__":
    main()
