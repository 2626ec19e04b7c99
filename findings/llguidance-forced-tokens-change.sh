#!/usr/bin/env bash
# llguidance 1.9.1: the tokens of compute_ff_tokens() are not always those that its masks allow one after another.
# Guess: after "a" only "€\n!" (a backslash and n) may follow, so compute_ff_tokens() gives its tokens, and as each one
#        is consumed, the mask allows just the next of them.
# Seen:  once the three bytes of the sign are consumed, llguidance encodes the rest alone. There the tokenizer, whose
#        words are split as Llama 3 splits them, has one token for the backslash and n, and not the two that were given.
# Our own: tests/plan/test_token_rules.py::test_a_forced_end_is_encoded_anew_after_each_token
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps llguidance==1.9.1 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import json

import llguidance
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

vocab = {text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
vocab["\\n"], vocab["<end>"] = len(vocab), len(vocab) + 1
tokenizer = Tokenizer(models.BPE(vocab, [("\\", "n")]))
words = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+"), "isolated")
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])
tokens = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=vocab["<end>"])
grammar = llguidance.grammar_from("choice", json.dumps(["a\u20ac\\n!", "b"]))
matcher = llguidance.LLMatcher(tokens, grammar)
matcher.consume_tokens(tokens.tokenize_str("a"))
given = [tokens.decode_bytes([each]) for each in matcher.deep_copy().compute_ff_tokens()]
allowed = []
while not matcher.is_stopped():
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    [token] = [each for each in range(len(vocab)) if mask >> each & 1]
    allowed.append(tokens.decode_bytes([token]))
    matcher.consume_token(token)
print("llguidance", llguidance.__version__, "| guess: the masks allow", given, "| seen:", allowed)
assert given[3:] == [b"\\", b"n", b"!"] and allowed[3:] == [b"\\n", b"!"], "the behaviour has changed"
PYTHON
