"""A training loop: sample, reward, one step of the optimiser, the new weights into the engine.

python examples/training_loop.py [MODEL]      (the reward: short answers)
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams, demo_model_path

STEPS, SAMPLES = 3, 8
QUESTIONS = ["Say something short.", "How are you today?", "Tell me a story about numbers."]


def loss_of(policy: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The mean negative log-probability of an answer's tokens."""
    ids = torch.tensor([prompt + answer], device=policy.device)
    logits = policy(ids[:, :-1]).logits[0, len(prompt) - 1 :]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, len(prompt) :])


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else demo_model_path()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    # A GPU that the trainer shares: llm.sleep() after sampling, llm.wake_up() before update_weights.
    with LLM(model) as llm:
        for step in range(STEPS):
            params = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=64, seed=step)
            outputs = llm.chat(conversations, params, use_tqdm=False)
            optimizer.zero_grad()
            for output in outputs:
                rewards = torch.tensor([-float(len(each.token_ids)) for each in output.outputs])
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
                for each, advantage in zip(output.outputs, advantages.tolist(), strict=True):
                    loss = loss_of(policy, list(output.prompt_token_ids), list(each.token_ids))
                    (advantage * loss / len(outputs) / SAMPLES).backward()
            optimizer.step()
            llm.update_weights(policy.state_dict())  # the engine is now as a fresh load of these weights
            lengths = [len(each.token_ids) for output in outputs for each in output.outputs]
            print(f"step {step}: {sum(lengths) / len(lengths):.1f} tokens an answer")


if __name__ == "__main__":
    main()
