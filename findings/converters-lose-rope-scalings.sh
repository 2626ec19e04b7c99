#!/usr/bin/env bash
# A Llama with a scaled rope is converted for two engines, ctranslate2 4.8.5 and onnxruntime-genai 0.18.0, whose
# converters take both "llama3" (of Llama 3.1) and "linear" (of older long contexts). Do both keep both?
# Guess: the logits of all four converted models are those of transformers 5.24.0, in float32.
# Seen:  each engine keeps one and loses the other, without a word. ctranslate2 has the logits of the same weights with
#        no scaling for llama3 (its file has the two frequency factors, and not the factor itself), onnxruntime-genai
#        for linear. Over 2,000 tokens logits are wrong by more than half of the largest one.
# Ours:  all kinds are those of transformers, tests/cpu/models/test_models.py::test_rope_types
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5 \
    onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 numpy==2.3.5
cd "$folder"
cat > look.py <<'PYTHON'
import subprocess
import sys
from importlib.metadata import version

import ctranslate2
import numpy as np
import onnxruntime_genai
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {"vocab_size": 258, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.15}
SIZES |= {"bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 16384}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
THETAS = {"llama3": 500000.0, "linear": 10000.0}
SCALINGS = {"llama3": LLAMA3, "linear": {"rope_type": "linear", "factor": 4.0}}
NUMBERS = [(7 * place * place + 3 * place) % 200 for place in range(2000)]

letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
tokens = {text: number for number, text in enumerate(letters)}
made = Tokenizer(models.BPE(tokens, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
made.add_special_tokens(["<s>", "</s>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def model(rope):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval()


@torch.inference_mode()
def of_transformers(rope):
    return model(rope)(torch.tensor([NUMBERS])).logits[0].numpy()


def of_ctranslate2(folder):
    TransformersConverter(folder).convert(f"{folder}-ct2")
    generator = ctranslate2.Generator(f"{folder}-ct2", compute_type="float32", intra_threads=1)
    texts = tokenizer.convert_ids_to_tokens(NUMBERS)
    return np.array(generator.forward_batch([texts], return_log_probs=False))[0]


def of_onnxruntime(folder):
    options = ["-i", folder, "-o", f"{folder}-onnx", "-p", "fp32", "-e", "cpu", "-c", "cache"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    converted = onnxruntime_genai.Model(f"{folder}-onnx")
    params = onnxruntime_genai.GeneratorParams(converted)
    params.set_search_options(max_length=len(NUMBERS) + 1)
    generator = onnxruntime_genai.Generator(converted, params)
    generator.append_tokens(np.array([NUMBERS], dtype=np.int32))
    return np.array(generator.get_output("logits"))[0]


packages = ("transformers", "ctranslate2", "onnxruntime-genai")
print(*(f"{package} {version(package)}" for package in packages), sep=", ")
print("guess: all four are those of transformers")
seen = {}
for kind, scaling in SCALINGS.items():
    theta = {"rope_theta": THETAS[kind]}
    model(scaling | theta).save_pretrained(kind)
    tokenizer.save_pretrained(kind)
    scaled, plain = of_transformers(scaling | theta), of_transformers({"rope_type": "default"} | theta)
    assert abs(scaled - plain).max() > abs(scaled).max() / 2  # the scaling matters
    converted = {"ctranslate2": of_ctranslate2(kind), "onnxruntime-genai": of_onnxruntime(kind)}
    for engine, logits in converted.items():
        far, far_from_plain = (float(abs(logits - each).max()) for each in (scaled, plain))
        seen[engine, kind] = "kept" if far < 0.01 else "lost" if far_from_plain < 0.01 else "neither"
        print(f"seen: {engine} with {kind}: {seen[engine, kind]}; logits of up to {abs(scaled).max():.1f}")
        print(f"    are {far:.4f} from the scaled ones, {far_from_plain:.4f} from those without a scaling")
lost = [pair for pair, word in seen.items() if word == "lost"]
kept = [pair for pair, word in seen.items() if word == "kept"]
assert lost == [("ctranslate2", "llama3"), ("onnxruntime-genai", "linear")], "the behaviour has changed"
assert kept == [("onnxruntime-genai", "llama3"), ("ctranslate2", "linear")], "the behaviour has changed"
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python look.py 2>errors || { tail errors >&2; exit 1; }
