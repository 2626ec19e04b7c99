#!/usr/bin/env bash
# tokenizers 0.23.3: a word with letters beyond ASCII is added to a byte-level BPE, as fine-tuners add words and marks.
# Guess: decode() gives the added token as it is.
# Seen:  its letters are read as letters of that alphabet, so "größe" becomes "gr��e" and "<réponse>" "<r�ponse>", be
#        it special or not. If any letter is outside the alphabet, such as a space or "中", all of the token comes back.
# Ours:  the text is the one of tokenizers, in parts as in whole,
#        tests/cpu/text/test_texts.py::test_letters_of_added_tokens_that_are_read_as_bytes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
print("tokenizers", tokenizers.__version__)
seen = {}
for is_special in (False, True):
    for word in ("größe", "<réponse>", "größe 中", "naïve café"):
        tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(ALPHABET)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        plain = tokenizer.encode(word).ids
        assert tokenizer.decode(plain) == word  # while it is not added
        tokenizer.add_tokens([AddedToken(word, special=is_special, normalized=False)])
        [number] = tokenizer.encode(word).ids
        seen[word, is_special] = tokenizer.decode([number], skip_special_tokens=False)
        print(f"{'special' if is_special else 'added'}: guess: {word!r} seen: {seen[word, is_special]!r}")
right = {"größe": "gr\ufffd\ufffde", "<réponse>": "<r\ufffdponse>"}
assert seen == {(word, kind): right.get(word, word) for word, kind in seen}, "the behaviour has changed"
PYTHON
