#!/usr/bin/env bash
# transformers 5.24.0 reads a GGUF file of a Qwen3 whose metadata state yarn (rope.scaling.type, factor, original
# context length), as files of models with a longer context do.
# Guess: rope_parameters of the config that it makes have the type yarn and the factor 4 of the file.
# Seen:  rope_type is default, without a word. The logits are to the last bit those of the same weights without a
#        scaling, while max_position_embeddings is the extended length.
# Ours:  tests/cpu/models/test_gguf.py::test_rope_scaling_is_found_again
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    gguf==0.19.0 numpy==2.3.5
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>errors <<'PYTHON' || { tail errors >&2; exit 1; }
import sys
from importlib.metadata import version

import gguf
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 256}


def made(rope):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=rope)).eval()


scaled, plain = made(YARN), made({"rope_type": "default", "rope_theta": 1e6})
writer = gguf.GGUFWriter("model.gguf", "qwen3")
writer.add_block_count(1)
writer.add_context_length(256)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(2)
writer.add_head_count_kv(1)
writer.add_key_length(128)
writer.add_value_length(128)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_vocab_size(64)
writer.add_rope_freq_base(1e6)
writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
writer.add_rope_scaling_factor(4.0)
writer.add_rope_scaling_orig_ctx_len(64)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)
for name, tensor in scaled.state_dict().items():
    writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

read = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32).eval()
with torch.inference_mode():
    logits, with_yarn, without = (each(torch.arange(40)[None]).logits for each in (read, scaled, plain))
rope = read.config.rope_parameters
print("transformers", version("transformers"), "with gguf", version("gguf"))
print("guess: rope_type yarn, factor 4.0")
print("seen: ", rope, "with", read.config.max_position_embeddings, "positions")
print(f"logits differ by {(logits - with_yarn).abs().max():.2f} from yarn's, ", end="")
print(f"and by {(logits - without).abs().max():.2f} from those without a scaling")
is_lost = rope["rope_type"] == "default" and torch.equal(logits, without)
sys.exit(not (is_lost and (logits - with_yarn).abs().max() > 0.01))
PYTHON
