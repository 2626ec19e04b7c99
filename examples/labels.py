"""Labels with a schema: every answer is JSON of it, and never needs a second try.

pip install -e ".[structured]" && python examples/labels.py [MODEL]
The bundled demo model has never seen JSON: its labels are valid, and some are wrong.
"""

import json
import sys
from collections import Counter

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model_path

SCHEMA = {
    "type": "object",
    "properties": {"parity": {"enum": ["even", "odd"]}},
    "required": ["parity"],
    "additionalProperties": False,
}
NUMBERS = [17, 20, 35, 42, 56, 63]


def main() -> None:
    # What all prompts begin with is computed once: put the instruction first, and the row last.
    prompts = [[{"role": "user", "content": f"Is {number} even or odd?"}] for number in NUMBERS]
    params = SamplingParams(
        temperature=0, max_tokens=30, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    with LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model_path()) as llm:
        outputs = llm.chat(prompts, params, on_error="return")
    labels = []
    for number, output in zip(NUMBERS, outputs, strict=True):
        if output.error or output["finish_reason"] != "stop":  # "length": the JSON is cut
            print(f"{number}: no label, {output.error or 'the answer is too long'}")
            continue
        labels.append(json.loads(output["text"])["parity"])
        print(f"{number}: {labels[-1]}")
    print(dict(Counter(labels)))


if __name__ == "__main__":
    main()
