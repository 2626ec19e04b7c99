#!/usr/bin/env bash
# openvino-tokenizers 2026.4.1.0 converts a Unigram tokenizer with byte_fallback, as SentencePiece models of language
# models become in a tokenizer.json.
# Guess: its ids are those of transformers 5.24.0, and so are its texts.
# Seen:  what is no piece becomes <unk>, once for a run of characters, and its bytes are lost without a word: "日本語"
#        and "1234567" are the same prompt. A BPE with the same pieces and byte_fallback gives the ids of transformers.
# Ours:  tests/cpu/text/test_file_tokenizers.py::test_unigram_falls_back_on_bytes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 \
    transformers==5.24.0 tokenizers==0.23.3 numpy==2.3.5
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>errors <<'PYTHON' || { tail errors >&2; exit 1; }
from importlib.metadata import version

import openvino
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "ab"]
SCORES = [0.0] * 259 + [-2.0, -2.1, -2.2, -3.0, -3.1]  # 0 for bytes, as in SentencePiece's files
KINDS = {
    "Unigram": models.Unigram(list(zip(PIECES, SCORES)), unk_id=0, byte_fallback=True),
    "BPE": models.BPE(
        {piece: number for number, piece in enumerate(PIECES)}, [("▁", "a"), ("a", "b")],
        unk_token="<unk>", byte_fallback=True,
    ),
}
TEXTS = ["ab a", "日本語", "1234567", "a\tb"]
packages = ("openvino-tokenizers", "transformers")
print(*(f"{package} {version(package)}" for package in packages), sep=", ")
print("guess: the same ids by both, for each kind of model and each text")
seen = {}
for kind, model in KINDS.items():
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    converted = openvino.Core().compile_model(convert_tokenizer(tokenizer), "CPU")
    for text in TEXTS:
        expected = tokenizer(text)["input_ids"]
        assert tokenizer.decode(expected) == text
        found = converted([text])["input_ids"][0].tolist()
        seen[kind, text] = found == expected or tokenizer.convert_ids_to_tokens(found)
        print(f"seen: {kind} {text!r}: {'the same' if found == expected else seen[kind, text]}")
right = {pair: True for pair in seen}
right |= {("Unigram", "日本語"): ["▁", "<unk>"], ("Unigram", "1234567"): ["▁", "<unk>"]}
right |= {("Unigram", "a\tb"): ["▁a", "<unk>", "b"]}
assert seen == right, "the behaviour has changed"
PYTHON
