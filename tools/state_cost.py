"""What states in bfloat16 change: log-probabilities of a hybrid with random weights, token by token.

    python -m tools.state_cost            # decays as at the start of a training
    python -m tools.state_cost --slow     # heads that remember thousands of tokens

Texts are drawn from the model in float32; then each dtype of model and states gets the same tokens.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from nanovllm import LLM, SamplingParams

HIDDEN, VOCABULARY, PROMPT, ROWS = 512, 8192, 64, 4
STEPS = {False: (0.001, 0.1), True: (0.0001, 0.001)}  # least and most of softplus(dt_bias), by --slow


def write(folder: Path, slow: bool) -> None:
    """8 layers, every fourth with attention; 4 key and 8 value heads of 128 x 128. A_log and dt_bias are
    drawn as the authors of Gated DeltaNet begin a training."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    heads |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    heads |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 1536, "num_hidden_layers": 8}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False}
    config = transformers.Qwen3_5TextConfig(**heads, **sizes, **ids, max_position_embeddings=8192)
    model = transformers.Qwen3_5ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, each in model.named_parameters():
            kind = name.removesuffix(".weight").rpartition(".")[2]
            if kind == "A_log":
                each.uniform_(0.01, 16, generator=generator).log_()
            elif kind == "dt_bias":
                least, most = map(math.log, STEPS[slow])
                each.uniform_(least, most, generator=generator).exp_().expm1_().log_()  # softplus is undone
            elif each.ndim == 1:
                each.fill_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
            else:
                scales = {"lm_head": 3 / HIDDEN**0.5, "embed_tokens": 1.0, "conv1d": 0.5}
                each.normal_(0.0, scales.get(kind, each.shape[1] ** -0.5), generator=generator)
    model.save_pretrained(folder)


def answers(
    folder: Path, dtype: str, states: str, count: int, tokens: list[list[int]] | None
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of each text, and their log-probabilities [ROWS, count]. tokens: those to take."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, VOCABULARY, (ROWS, PROMPT), generator=generator).tolist()
    params = [
        SamplingParams(
            temperature=1.0,
            seed=row,
            max_tokens=count,
            ignore_eos=True,
            logprobs=0,
            trace_decode_token_ids=None if tokens is None else tokens[row],
        )
        for row in range(ROWS)
    ]
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**29}
    options |= {"max_model_len": PROMPT + count, "max_num_seqs": ROWS}
    with LLM(str(folder), dtype=dtype, mamba_ssm_cache_dtype=states, **options) as llm:
        outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    found = [[row[t].logprob for t, row in zip(x.token_ids, x.logprobs, strict=True)] for x in outputs]
    return [list(each.token_ids) for each in outputs], torch.tensor(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", action="store_true", help="decays close to 1")
    parser.add_argument("--tokens", type=int, default=2000, help="of each of the texts")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        write(folder := Path(name), args.slow)
        tokens, exact = answers(folder, "float32", "float32", args.tokens, None)
        for dtype, states in (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
            same, found = answers(folder, dtype, states, args.tokens, tokens)
            assert same == tokens
            change = (found - exact).abs()
            parts = ", ".join(f"{each.mean():.4f}" for each in change.chunk(4, dim=1))
            print(
                f"model {dtype}, states {states}: {change.mean():.4f} on average, {change.max():.3f} at "
                f"most; by quarters of the texts {parts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
