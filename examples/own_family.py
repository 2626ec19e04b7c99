"""One's own family: a model that is not in the list, here Qwen3 whose logits have a softcap.

python examples/own_family.py      (the bundled demo model with another config.json)
"""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.families.qwen3 import QWEN3
from nanovllm.models.config import HFConfig, ModelConfig, ModelFamily
from nanovllm.models.registry import register_model

KEY = "final_logit_softcapping"  # refused by families that do not read it


class CappedFamily(ModelFamily):
    def read(self, hf: HFConfig) -> ModelConfig:
        return replace(super().read(hf), logit_softcap=float(hf.get(KEY)))


def main() -> None:
    own = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": "head"}
    register_model("CappedForCausalLM", CappedFamily(QWEN3.defaults, reads=(KEY,), **own))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(demo_model_path(), Path(name) / "model"))
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"architectures": ["CappedForCausalLM"], KEY: 30.0}
        path.write_text(json.dumps(config))
        with LLM(folder) as llm:
            [output] = llm.chat(
                [{"role": "user", "content": "Sort these numbers: 67 45 92 20."}],
                SamplingParams(temperature=0, max_tokens=100, logprobs=0),
            )
    print(output["text"])
    print(f"log-probability of the answer: {output.outputs[0].cumulative_logprob:.4f}")


if __name__ == "__main__":
    main()
