"""Conversations whose model may call functions: each round answers all that wait for an answer, at once.

python examples/tools.py [MODEL]      (default: the bundled demo model, which calls none)
"""

import json
import sys

from nanovllm import LLM, SamplingParams, demo_model_path

ADD = {"name": "add", "description": "Add whole numbers", "parameters": {"type": "object", "properties": {}}}
ADD["parameters"]["properties"] = {name: {"type": "integer"} for name in "ab"}
FUNCTIONS = {"add": lambda a, b: a + b}


def result_of(call: dict) -> dict:
    """The message with a call's result, or with its error, which the model reads."""
    function = call["function"]
    try:
        content = json.dumps(FUNCTIONS[function["name"]](**json.loads(function["arguments"])))
    except Exception as error:
        content = f"{type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": content}


def converse(llm: LLM, conversations: list, params: SamplingParams, most_rounds: int = 8) -> None:
    """Append answers and results of calls to the conversations until no answer has calls."""
    for _ in range(most_rounds):
        waiting = [each for each in conversations if each[-1]["role"] != "assistant"]
        tools = [{"type": "function", "function": ADD}]
        outputs = llm.chat(waiting, params, tools=tools) if waiting else []
        for conversation, output in zip(waiting, outputs, strict=True):
            answer = output.outputs[0]
            message = {"role": "assistant", "content": answer.text, "reasoning": answer.reasoning}
            conversation += [{**message, "tool_calls": answer.tool_calls}, *map(result_of, answer.tool_calls)]


def main() -> None:
    model, parsers = demo_model_path(), {"tool_parser": "hermes"}
    if len(sys.argv) > 1:
        model, parsers = sys.argv[1], {"reasoning_parser": "auto", "tool_parser": "auto"}
    conversations = [[{"role": "user", "content": f"What is {x} + {7 * x}?"}] for x in range(2, 6)]
    with LLM(model, **parsers) as llm:
        converse(llm, conversations, SamplingParams(temperature=0, max_tokens=400))
    for conversation in conversations:
        print(f"> {conversation[0]['content']}\n{conversation[-1]['content']}\n")


if __name__ == "__main__":
    main()
