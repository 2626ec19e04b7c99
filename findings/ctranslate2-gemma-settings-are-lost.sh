#!/usr/bin/env bash
# ctranslate2 4.8.5 converts Gemma 2 and Gemma 3 of transformers 5.24.0: does the converted model follow their configs?
# Guess: the logits are those of transformers in float32, with Gemma 2's soft caps and windows, the
#        query_pre_attn_scalar of the 27B models, and the linear rope of Gemma 3's global layers (4B and larger).
# Seen:  only where the config has none of these. With each of them alone, and no word about it, ctranslate2's logits
#        are to the last bit those without it: soft caps and windows of Gemma 2, and scalar and rope of either.
# Ours:  tests/cpu/models/test_families.py::test_families with gemma2 and gemma3, which have all of these
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0 \
    ctranslate2==4.8.5 numpy==2.3.5
cd "$folder"
cat > look.py <<'PYTHON'
from importlib.metadata import version

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
SIZES |= {"bos_token_id": 61, "eos_token_id": 62, "pad_token_id": 0}
THETAS = {"sliding_attention": 10000.0, "full_attention": 1000000.0}
PLAIN = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETAS.items()}
LINEAR = PLAIN | {"full_attention": PLAIN["full_attention"] | {"rope_type": "linear", "factor": 8.0}}
BARE = {"query_pre_attn_scalar": 16, "sliding_window": 64}  # a window longer than the text, scalar = head_dim
KINDS = {
    "Gemma2": BARE | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "Gemma3": BARE | {"rope_parameters": PLAIN, "layer_types": list(THETAS)},
}
CHANGES = [
    ("Gemma2", {"attn_logit_softcapping": 50.0}),
    ("Gemma2", {"final_logit_softcapping": 30.0}),
    ("Gemma2", {"sliding_window": 8}),
    ("Gemma2", {"query_pre_attn_scalar": 18}),  # 9/8 of head_dim, as 144 is of 128
    ("Gemma3", {"query_pre_attn_scalar": 21}),  # 21/16 of head_dim, as 168 is of 128
    ("Gemma3", {"rope_parameters": LINEAR}),
]
NUMBERS = [(7 * place * place + 3 * place) % 60 for place in range(40)]
words = {f"t{number}": number for number in range(61)} | {"<s>": 61, "</s>": 62, "<unk>": 63}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
    **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
)


@torch.inference_mode()
def logits(kind, settings):
    """By transformers, and by ctranslate2."""
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma2": "Gemma2Config", "Gemma3": "Gemma3TextConfig"}[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**SIZES, **settings)).eval()
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    TransformersConverter("model").convert("converted", force=True)
    generator = ctranslate2.Generator("converted", compute_type="float32", intra_threads=1)
    found = generator.forward_batch([[f"t{number}" for number in NUMBERS]], return_log_probs=False)
    return model(torch.tensor([NUMBERS])).logits[0].numpy(), np.array(found)[0]


print("transformers", transformers.__version__, "and ctranslate2", version("ctranslate2"))
print("guess: ctranslate2's logits follow each setting")
bare = {kind: logits(kind, settings) for kind, settings in KINDS.items()}
for kind, (expected, found) in bare.items():
    assert abs(expected - found).max() < 0.001, f"{kind} is another model without these settings too"
followed = []
for kind, change in CHANGES:
    expected, found = logits(kind, KINDS[kind] | change)
    by_setting = float(abs(expected - bare[kind][0]).max())
    is_lost = np.array_equal(found, bare[kind][1])
    [name] = change
    print(f"seen: {kind} with {name}: logits change by {by_setting:.3f} in transformers, "
          f"{'not at all' if is_lost else 'too'} in ctranslate2")
    assert by_setting > 0.05
    followed += [] if is_lost else [name]
assert not followed, f"the behaviour has changed: {followed}"
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python look.py 2>errors || { tail errors >&2; exit 1; }
