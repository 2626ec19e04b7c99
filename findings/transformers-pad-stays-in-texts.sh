#!/usr/bin/env bash
# transformers 5.8.0: whether `skip_special_tokens=True` leaves the pad token out depends on the tokenizer's class.
#
# Guess: a token that tokenizer_config.json names as pad_token is in `all_special_ids`, and so
#        `decode(ids, skip_special_tokens=True)` leaves it out, whatever class the file names.
# Seen:  where tokenizer.json has the token without the mark "special", and tokenizer_config.json has an
#        added_tokens_decoder, GPT2Tokenizer leaves it out and PreTrainedTokenizerFast writes it into the text. It is in
#        `all_special_ids` of both. (4.57.1 and 5.0.0 write it with both.)
#
# Ours: what is special by either mark is left out, of whole texts and of streams, for all classes.
#       tests/cpu/text/test_file_tokenizers.py::test_tokens_of_the_configuration_stay
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.8.0 tokenizers==0.22.2
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

print("transformers", transformers.__version__)
print("guess: 'ab' with both classes")
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.add_tokens([AddedToken("<empty>", normalized=False)])
more = {"content": "<more>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
seen = {}
for name in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": name, "pad_token": "<empty>"}
    config["added_tokens_decoder"] = {str(made.get_vocab_size()): more | {"single_word": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a<empty>b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3 and ids[1] in tokenizer.all_special_ids
    seen[name] = tokenizer.decode(ids, skip_special_tokens=True)
print("seen:", seen)
same = seen == {"GPT2Tokenizer": "ab", "PreTrainedTokenizerFast": "a<empty>b"}
sys.exit(0 if same else "the behaviour has changed")
PYTHON
