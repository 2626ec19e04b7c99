#!/usr/bin/env bash
# lm-format-enforcer 0.11.3 with {"enum": [...]} of one string that JSON must escape: a quote, a backslash, a new line.
# Guess: the one text that it lets a model write is the string as JSON has it, with the escape.
# Seen:  of a"b only "a" can be written, which is not in the list; of a\b "a\\b" and three others, such as "a\nb", as
#        any escape may follow the backslash; of the string with a new line a text with a bare one, which is no JSON.
# Ours:  tests/cpu/text/test_json_schemas.py::test_choices_that_json_escapes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q lm-format-enforcer==0.11.3
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from lmformatenforcer import JsonSchemaParser

LETTERS = '"abn\\\n'


def texts(choice):
    """All texts of up to 7 characters, of these letters, that may be written and end there."""
    found, begun = [], [("", JsonSchemaParser({"enum": [choice]}))]
    while begun:
        text, parser = begun.pop()
        if parser.can_end():
            found.append(text)
        may = [letter for letter in LETTERS if letter in parser.get_allowed_characters()]
        if len(text) < 7:
            begun += [(text + letter, parser.add_character(letter)) for letter in may]
    return sorted({text.strip() for text in found})  # white space may stand around a value


print("lm-format-enforcer", version("lm-format-enforcer"))
seen = {choice: texts(choice) for choice in ("ab", 'a"b', "a\\b", "a\nb")}
for choice, found in seen.items():
    print(f"of {choice!r} guess: {[json.dumps(choice)]} seen: {found}")
assert seen["ab"] == ['"ab"']
assert seen['a"b'] == ['"a"'] and seen["a\nb"] == ['"a\nb"'], "the behaviour has changed"
values = {json.loads(text) for text in seen["a\\b"]}
assert values == {"a\\b", 'a"b', "a\bb", "a\nb"}, "the behaviour has changed"
PYTHON
