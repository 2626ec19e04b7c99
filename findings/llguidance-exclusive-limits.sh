#!/usr/bin/env bash
# llguidance 1.9.1: beyond 2^53 an excluded limit of an integer is itself an answer.
# Guess: {"type": "integer", "exclusiveMinimum": 2^53, "exclusiveMaximum": 2^53 + 2} has the answer 2^53 + 1, or is
#        refused, since float64 has both limits.
# Seen:  the only answer is 9007199254740992, the limit that is excluded: 1 is added to it as float64.
# Our own: tests/cpu/text/test_json_schemas.py::test_limits_without_a_number_between_them_are_refused
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps llguidance==1.9.1 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import llguidance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

vocab = {text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
vocab["<end>"] = len(vocab)
tokenizer = Tokenizer(models.BPE(vocab, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])
tokens = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=vocab["<end>"])
schema = {"type": "integer", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 2}
accepted = []
for number in (2**53, 2**53 + 1, 2**53 + 2):
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(schema))
    ids = tokens.tokenize_str(str(number))
    if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
        accepted.append(number)
print("llguidance", llguidance.__version__, "| guess:", [2**53 + 1], "or a refusal | seen:", accepted)
assert accepted == [2**53], "the behaviour has changed"
PYTHON
