#!/usr/bin/env bash
# RMSNorm and rope of transformers in bfloat16, family by family.
#
# Guess: all of transformers' RMSNorms round x / rms(x) to the model's dtype before they multiply it by the weight,
#        as LlamaRMSNorm does, and all ropes take cosines and sines in the model's dtype. An engine that copies
#        Llama's order of casts is then as near to float32 as transformers is, for every family.
# Seen:  OLMo 2, gpt-oss, Gemma 2 and Gemma 3 multiply in float32 and round once (at most 0.5 ulp from the exact
#        value); Llama, Qwen3, Phi-3, GLM-4, EXAONE 4, Granite and ERNIE 4.5 round twice (up to 1.4 ulp). OLMo 2 and
#        ERNIE 4.5 rotate by float32 cosines, the others by bfloat16 ones.
# Ours:  rounds once in every family: tests/cpu/kernels/test_roundings.py
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0" "numpy==2.3.5"
cat > "$folder/roundings.py" <<'PYTHON'
import importlib

import torch
import transformers

print("torch", torch.__version__, "transformers", transformers.__version__)
ONCE, TWICE = {"olmo2": "Olmo2", "gpt_oss": "GptOss", "gemma2": "Gemma2", "gemma3": "Gemma3"}, {
    **{"llama": "Llama", "qwen3": "Qwen3", "phi3": "Phi3", "glm4": "Glm4", "exaone4": "Exaone4"},
    **{"granite": "Granite", "ernie4_5": "Ernie4_5"},
}
WIDE_ROPE = ("olmo2", "ernie4_5")
torch.manual_seed(0)
x, weight = torch.randn(64, 128).bfloat16(), torch.rand(128).bfloat16()


def parts(module, name):
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return getattr(source, f"{name}RMSNorm"), getattr(source, f"{name}RotaryEmbedding")


@torch.no_grad()
def ulps(norm, offset):
    """The largest distance from the exact norm, in units of the last place."""
    norm.weight.copy_(weight)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)
    return float(((norm(x).double() - exact).abs() / 2.0 ** (exact.abs().log2().floor() - 7)).max())


wrong = []
for module, name in {**ONCE, **TWICE}.items():
    norm, rope = parts(module, name)
    found = ulps(norm(128, eps=1e-6).bfloat16(), 1.0 if module.startswith("gemma") else 0.0)
    line = f"{name}: norm within {found:.2f} ulp of the exact one"
    if (found <= 0.51) != (module in ONCE):
        wrong.append(f"{name}'s norm")
    if module != "gemma3":  # its rope takes the kind of layer
        sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
        config = getattr(transformers, f"{name}Config")(head_dim=128, **sizes)
        cos = rope(config)(x[None], torch.arange(64)[None])[0]
        line += f", cosines in {cos.dtype}"
        if (cos.dtype == torch.float32) != (module in WIDE_ROPE):
            wrong.append(f"{name}'s rope")
    print(line)
raise SystemExit(f"other than seen: {', '.join(wrong)}" if wrong else 0)
PYTHON
"$folder/venv/bin/python" "$folder/roundings.py"
