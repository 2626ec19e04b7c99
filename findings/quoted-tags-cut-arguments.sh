#!/usr/bin/env bash
# transformers 5.24.0 reads tool calls by the response templates that TRL 1.16.0 ships for Qwen3.5 and GLM-4.5: what
# becomes of an argument that holds code with a closing tag, or with indentation?
# Guess: the value comes back as the chat template wrote it, or there is an error.
# Seen:  without an error it ends at the first "</parameter>" or "</arg_value>" within it, and loses the white space
#        at its ends. A "</tool_call>" within leaves a call without arguments, and the rest becomes content.
# Ours:  tests/cpu/text/test_tool_calls.py::test_marks_in_values: tags count by their place, values keep white space.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 jinja2==3.1.6
"$folder/venv/bin/pip" install -q --no-deps trl==1.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import ast
import sys
from pathlib import Path

import transformers
from transformers.utils.chat_parsing import parse_response

# TRL's module needs torch, so its two dictionaries are read alone.
[path] = Path(sys.argv[1]).rglob("trl/chat_template_utils.py")
names = {"_XML_INLINE_VALUE_PARSER": {"name": "text"}}
for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.Assign) and node.targets[0].id in ("qwen3_5_template", "glm4moe_template"):
        exec(compile(ast.Module([node], []), str(path), "exec"), names)
PROPERTIES = {"code": {"type": "string"}, "line": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": PARAMETERS}}]


def qwen(code):
    pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in {"code": code, "line": 3}.items())
    return f"</think>\n\n<tool_call>\n<function=write>\n{pairs}</function>\n</tool_call><|im_end|>"


def glm(code):
    pairs = {"code": code, "line": 3}.items()
    text = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"\n<think></think>\n<tool_call>write\n{text}</tool_call><|user|>"


FAMILIES = {
    "Qwen3.5": (qwen, "<|im_start|>assistant\n<think>\n", names["qwen3_5_template"], "</parameter>"),
    "GLM-4.5": (glm, "<|assistant|>", names["glm4moe_template"], "</arg_value>"),
}
seen = {}
for family, (write, prefix, template, tag) in FAMILIES.items():
    for code in (f"a = 'x{tag}y'", "a = '</tool_call>'", "    return 1\n"):
        found = parse_response(write(code), template, prefix=prefix, tools=TOOLS)
        [call] = found["tool_calls"]
        seen[family, code] = call["function"]["arguments"].get("code")
print("transformers", transformers.__version__, "| guess: all as they were written | seen:")
for (family, code), value in seen.items():
    print(f"  {family}: {code!r} became {value!r}")
assert list(seen.values()) == ["a = 'x", None, "return 1"] * 2, "the behaviour has changed"
PYTHON
