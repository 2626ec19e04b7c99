"""How near bfloat16 answers are to float32 ones, with nanovllm and with transformers, for each family.

python tools/bf16_nearness.py --device cuda                # 8 checkpoints, 256 prompts x 64 positions in all
python tools/bf16_nearness.py --device cpu --layers 4 --hidden 256 --prompts 64 --positions 16 --vocab 512
python tools/bf16_nearness.py --families olmo2 gemma2 --json nearness.json

For each family it makes random checkpoints in bfloat16, from seeds, by the recipe of outlier_models.py: with
one small checkpoint the ratio of two programs that round equally often is anything from 0.5 to 1.7. The
reference is transformers in float32 with these weights, one pass over whole texts. KL(reference || x) of the
next token is measured at the last `--positions` tokens of each prompt of random tokens, after as many tokens
before them:

- prefill: one pass over whole texts, nanovllm's through `prompt_logprobs`;
- decode: the same tokens one by one, after a prefill of the tokens before them.

transformers has the attention "sdpa", or "eager" where its "sdpa" leaves out softcaps or sinks. The ratio is
that of the means over all prompts and positions. The bound is the 95th percentile of ratios of checkpoints,
and of their prompts, drawn again (bootstrap).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from outlier_models import FAMILIES, Family, Sizes, make_model, write_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.answers import RequestOutput, unlisted

_FEW = 16  # prompts that transformers and nanovllm score at once


# -- logprobs [prompts, positions, vocabulary] float32 ------------------------------------------------------


@torch.inference_mode()
def _transformers_prefill(model: PreTrainedModel, ids: torch.Tensor, positions: int) -> torch.Tensor:
    parts = [model(part, use_cache=False).logits[:, -positions:].float() for part in ids.split(_FEW)]
    return torch.cat(parts).log_softmax(-1)


@torch.inference_mode()
def _transformers_decode(model: PreTrainedModel, ids: torch.Tensor, positions: int) -> torch.Tensor:
    start = ids.shape[1] - positions
    cache, logits = model(ids[:, :start], use_cache=True).past_key_values, []
    for place in range(start, ids.shape[1]):
        out = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[:, -1].float())
    return torch.stack(logits, 1).log_softmax(-1)


def _vocabulary(output: RequestOutput, vocab: int, positions: int) -> torch.Tensor:
    """The logprobs after the last tokens of a scored prompt, whose last token is scored too."""
    columns: Any = unlisted(output, "prompt_logprobs").columns
    values, token_ids = (
        torch.from_numpy(each[-positions:, 1:].copy()) for each in (columns.values, columns.token_ids)
    )
    return values.new_full((positions, vocab), -torch.inf).scatter_(1, token_ids, values)


def _own_prefill(llm: LLM, ids: torch.Tensor, positions: int, vocab: int) -> torch.Tensor:
    params = SamplingParams(max_tokens=0, prompt_logprobs=-1)
    parts = []
    for part in ids.split(_FEW):  # a further token, so that what follows the last one is scored
        prompts = [[*row, 0] for row in part.tolist()]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        parts += [_vocabulary(output, vocab, positions).to(ids.device) for output in outputs]
    return torch.stack(parts)


def _own_decode(llm: LLM, ids: torch.Tensor, positions: int, vocab: int) -> torch.Tensor:
    """Functions of the requests keep the logits and choose the tokens."""
    start = ids.shape[1] - positions
    kept = torch.empty(len(ids), positions + 1, vocab, device=ids.device)

    def forced(row: int, tokens: list[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            place = len(output_ids)
            kept[row, place] = logits
            logits = torch.full_like(logits, -torch.inf)
            logits[tokens[place]] = 0
            return logits

        return force

    options: dict[str, Any] = {"temperature": 0, "max_tokens": positions + 1, "ignore_eos": True}
    params = [
        SamplingParams(logits_processors=[forced(row, [*tokens[start:], 0])], **options)
        for row, tokens in enumerate(ids.tolist())
    ]
    outputs = llm.generate([row[:start] for row in ids.tolist()], params, use_tqdm=False)
    for row, output in zip(ids.tolist(), outputs, strict=True):
        assert output["token_ids"] == [*row[start:], 0], output.error
    return kept[:, 1:].log_softmax(-1)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    """The mean KL(reference || other) of each prompt, [prompts] float64."""
    terms = torch.zeros(len(reference), dtype=torch.float64)
    for row, (a, b) in enumerate(zip(reference, other, strict=True)):
        p = a.double()
        terms[row] = (p.exp() * (p - b.double())).sum(-1).mean()
    return terms.numpy()


def bound(own: np.ndarray, other: np.ndarray, draws: int = 2000) -> float:
    """The 95th percentile of the ratio of means over checkpoints and prompts drawn again.

    own, other: [checkpoints, prompts].
    """
    checkpoints, prompts = own.shape
    random = np.random.default_rng(0)
    rows = random.integers(0, checkpoints, (draws, checkpoints, 1))
    picks = rows, random.integers(0, prompts, (draws, checkpoints, prompts))
    return float(np.quantile(own[picks].mean((1, 2)) / other[picks].mean((1, 2)), 0.95))


# -- all families -------------------------------------------------------------------------------------------


def measure(family: Family, sizes: Sizes, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for prefill and one for decode."""
    model = make_model(family, sizes)
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"prefill": [], "decode": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, llm = Path(name), None
        for seed in range(args.seed, args.seed + args.checkpoints):
            write_checkpoint(folder, model, family.offset, seed, args.peak)
            if llm is None:
                llm = stack.enter_context(_open(folder, args))
            else:
                llm.update_weights(load_file(folder / "model.safetensors"))
            for mode, pair in _divergences(llm, folder, family.attention, seed, args).items():
                found[mode].append(pair)
    rows = []
    for mode, pairs in found.items():
        own, other = (np.stack(each) for each in zip(*pairs, strict=True))
        rows.append({"mode": mode, "own": float(own.mean()), "transformers": float(other.mean())})
        rows[-1] |= {"ratio": float(own.mean() / other.mean()), "bound": bound(own, other)}
        rows[-1]["ratios"] = (own.mean(1) / other.mean(1)).tolist()
    return rows


def _open(folder: Path, args: argparse.Namespace) -> LLM:
    return LLM(
        str(folder),
        **{"device": args.device, "dtype": "bfloat16", "skip_tokenizer_init": True, "max_logprobs": -1},
        **{"enable_prefix_caching": False, "max_model_len": 2 * args.positions + 2},
        **{"max_num_seqs": args.max_num_seqs, "enforce_eager": args.enforce_eager},
        kv_cache_memory_bytes=2**30,
    )


def _divergences(
    llm: LLM, folder: Path, attention: str, seed: int, args: argparse.Namespace
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """nanovllm's and transformers' divergences of the prompts of one checkpoint, by mode."""
    generator = torch.Generator().manual_seed(seed)
    shape = args.prompts // args.checkpoints, 2 * args.positions
    ids = torch.randint(2, args.vocab, shape, generator=generator).to(args.device)

    def load(dtype: torch.dtype) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        return model.to(args.device).eval()

    reference = _transformers_prefill(load(torch.float32), ids, args.positions)
    model = load(torch.bfloat16)
    each = {
        "prefill": (
            _own_prefill(llm, ids, args.positions, args.vocab),
            _transformers_prefill(model, ids, args.positions),
        ),
        "decode": (
            _own_decode(llm, ids, args.positions, args.vocab),
            _transformers_decode(model, ids, args.positions),
        ),
    }
    return {
        mode: (divergence(reference, own), divergence(reference, other))
        for mode, (own, other) in each.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="*", default=[*FAMILIES], choices=[*FAMILIES])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 256")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--peak", type=float, default=1, help="of the outliers; see outlier_models.py")
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=256, help="of all checkpoints together")
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=32, help="rows of a decode step of nanovllm")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--limit", type=float, default=1.15, help="of the bounds; above it the exit code is 1"
    )
    parser.add_argument("--json", type=Path, help="also write all rows there")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = Sizes(args.layers, args.hidden, args.vocab)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.device}, {sizes}")
    print("| family | mode | nanovllm | transformers | ratio | 95 % bound | ratios of checkpoints | s |")
    print("|---|---|---|---|---|---|---|---|")
    rows, wrong = [], []
    for name in args.families:
        start = time.perf_counter()
        try:
            found = measure(FAMILIES[name], sizes, args)
        except Exception:  # the other families are still worth their time
            traceback.print_exc()
            wrong.append(name)
            continue
        finally:
            gc.collect()
            with suppress(RuntimeError, AssertionError):
                torch.cuda.empty_cache()
        seconds = time.perf_counter() - start
        for row in found:
            numbers = (
                f"{row['own']:.5f} | {row['transformers']:.5f} | {row['ratio']:.3f} | {row['bound']:.3f}"
            )
            ratios = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
            print(f"| {name} | {row['mode']} | {numbers} | {ratios} | {seconds:.0f} |", flush=True)
            rows.append({"family": name, **row})
            if not row["bound"] <= args.limit:
                wrong.append(f"{name} {row['mode']}")
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    if wrong:
        sys.exit(f"above {args.limit}, or failed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
