"""Conversations: all at once, then one whose answer arrives word by word.

python examples/chat.py [MODEL]      (default: the bundled demo model)
"""

import sys

from nanovllm import LLM, SamplingParams, demo_model_path

QUESTIONS = ["What is 12 + 30?", "Reverse the word LEVELS.", "Is 17 even or odd?"]


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model_path()) as llm:
        params = SamplingParams(temperature=0, max_tokens=100)
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(conversations, params)  # in the order of the questions
        for question, output in zip(QUESTIONS, outputs, strict=True):
            print(f"> {question}\n{output['text']}\n")

        tokenizer = llm.get_tokenizer()
        turns = [{"role": "user", "content": "Count down from 67 to 56 in steps of 4."}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        for part in llm.stream([prompt], params, deltas=True):
            print(part["text"], end="", flush=True)
        print()


if __name__ == "__main__":
    main()
