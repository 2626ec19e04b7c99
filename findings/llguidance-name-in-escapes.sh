#!/usr/bin/env bash
# llguidance 1.9.1: a property's name, written with a \u escape, counts as an additional property.
# Guess: its documentation says that listed properties are enforced uniquely, so with {"a": {"const": 1}} no accepted
#        text has another value of "a" for a reader of JSON.
# Seen:  {"a":1,"\u0061":2} is accepted, and json.loads gives {"a": 2}. json_allowed_escapes without u prevents it.
# Our own: tests/cpu/text/test_json_schemas.py::test_a_name_cannot_be_written_in_another_way
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps llguidance==1.9.1 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import json

import llguidance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

vocab = {text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
vocab["<end>"] = len(vocab)
tokenizer = Tokenizer(models.BPE(vocab, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])
tokens = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=vocab["<end>"])
schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
text = '{"a":1,"\\u0061":2}'


def accepts(**options):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    matcher = llguidance.LLMatcher(tokens, grammar)
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


seen = accepts(), json.loads(text), accepts(json_allowed_escapes='nrbtf\\"')
print("llguidance", llguidance.__version__, "| guess: (False, ...) | seen:", seen)
assert seen == (True, {"a": 2}, False), "the behaviour has changed"
PYTHON
