#!/usr/bin/env bash
# lm-eval 0.4.13 with a model of transformers 5.24.0: a context ends with "(" and the choices are "A" to "D" with no
# delimiter between, and the tokenizer has one token for "(B". No token is then left for the choice "B".
# Guess: an error, or a score in which the joint token counts; its log-likelihood is never 0.
# Seen:  beside choices of one token "B" has the log-likelihood 0.0 and is "greedy": as if it were certain, so it wins
#        for every model and every question, without a word. Asked alone it is an AssertionError.
# Ours:  an error that names its place, tests/integrations/test_lm_eval.py::test_a_choice_that_joins_the_context
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    "lm-eval[hf]==0.4.13" numpy==2.2.6
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>errors <<'PYTHON' || { tail errors >&2; exit 1; }
import sys
from importlib.metadata import version

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT, CHOICES = "2+2? (A) 3 (B) 4 (C) 5 (D) 6. (", ["A", "B", "C", "D"]

tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "(B", "</s>"]
bpe = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, [("(", "B")]))
words = pre_tokenizers.Split(Regex(r"[^\s\p{L}\p{N}]?\p{L}+"), "isolated")  # with the sign before them, as of Llama 3
bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
bpe.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="</s>")
sizes = {"vocab_size": len(tokens), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


def scores(seed, choices):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3)).eval()
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=128)
    asked = [Instance("loglikelihood", {}, (CONTEXT, each), place) for place, each in enumerate(choices)]
    return lm.loglikelihood(asked, disable_tqdm=True)


print("lm-eval", version("lm-eval"), "with transformers", version("transformers"))
print("guess: an error, or a score below 0")
found = []
for seed, choices in enumerate((CHOICES, CHOICES[::-1], ["B", "C"])):
    answers = dict(zip(choices, scores(seed, choices), strict=True))
    print("seen: ", {choice: (round(score, 2), greedy) for choice, (score, greedy) in answers.items()})
    others = [score for choice, (score, _) in answers.items() if choice != "B"]
    found.append(answers["B"] == (0.0, True) and max(others) < -0.01)
try:
    scores(0, ["B"])
    found.append(False)
except AssertionError:
    print("seen:  B alone is an AssertionError")
sys.exit(not all(found))
PYTHON
