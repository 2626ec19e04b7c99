"""Throughput of offline generation, beside what the machine's memory bus allows.

    python bench.py                        # on a GPU: 256 sequences on the Qwen3-0.6B shape; on a CPU: the
    demo model python bench.py --engine transformers  # the same lists of lengths through a peer
    (transformers or vllm)

Ends in one line of JSON. Weights are random where no --model is given: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

import nanovllm
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model_config

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from demo_tasks import heldout

QWEN3 = {  # name: layers, hidden, intermediate, heads, tied embeddings
    "qwen3-0.6b": (28, 1024, 3072, 16, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, True),
    "qwen3-4b": (36, 2560, 9728, 32, True),
    "qwen3-8b": (36, 4096, 12288, 32, False),
    "qwen3-14b": (40, 5120, 17408, 40, False),
    "qwen3-32b": (64, 5120, 25600, 64, False),
}
# Bytes/s that a pure read reaches and bf16 FLOP/s that a large matrix product reaches, measured with torch
# 2.11.
KNOWN_DEVICES = {"NVIDIA H200": (4.58e12, 720e12)}


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def tokens_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        return sum(self.output_lens)


def headline(num_seqs: int) -> Workload:
    """nano-vLLM's workload, drawn in its order: 100 to 1,024 random ids in, 100 to 1,024 tokens out."""
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(num_seqs)]
    return Workload("headline", prompts, [random.randint(100, 1024) for _ in range(num_seqs)])


def demo(num_seqs: int, model: str) -> Workload:
    """Problems for the demo model, with as many tokens out as their right answers have: 2 to about 150."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    examples = heldout(num_seqs, seed=0)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": example.prompt}], tokenize=False, add_generation_prompt=True
        )
        for example in examples
    ]
    answers = tokenizer([example.answer for example in examples])["input_ids"]
    return Workload("demo", tokenizer(texts)["input_ids"], [len(answer) + 1 for answer in answers])


def write_shape(name: str, folder: Path) -> Path:
    """Write the config.json of a Qwen3 shape, for dummy weights."""
    layers, hidden, intermediate, heads, tied = QWEN3[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
        "bos_token_id": 151643,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def device_speed(device: torch.device) -> tuple[float, float]:
    """Bytes/s of reading memory and FLOP/s of a matrix product: known for some GPUs, measured in a second
    else."""
    if device.type == "cuda" and torch.cuda.get_device_name(device) in KNOWN_DEVICES:
        return KNOWN_DEVICES[torch.cuda.get_device_name(device)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    data = torch.ones(2**27, device=device)
    square = torch.rand(2048, 2048, device=device, dtype=dtype)
    return data.nbytes / best(data.sum), 2 * 2048**3 / best(lambda: square @ square)


def floor_seconds(config: ModelConfig, work: Workload, itemsize: int, speed: tuple[float, float]) -> float:
    """The least time for the workload: weights once a decode step, every K/V read once, prefill at full
    FLOP/s."""
    bandwidth, flops = speed
    c = config
    qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
    per_layer = qkv + c.num_heads * c.head_dim * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
    weights = c.num_layers * per_layer + c.vocab_size * c.hidden_size
    kv_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize
    contexts = sum(
        out * len(prompt) + out * (out - 1) // 2
        for prompt, out in zip(work.prompts, work.output_lens, strict=True)
    )
    attention = 2 * c.num_heads * c.head_dim * c.num_layers * sum(len(p) * (len(p) + 1) for p in work.prompts)
    prefill = 2 * c.num_layers * per_layer * work.tokens_in + attention
    decode_flops = 2 * weights * work.tokens_out
    weight_seconds = max(weights * itemsize * max(work.output_lens) / bandwidth, decode_flops / flops)
    return weight_seconds + contexts * kv_token / bandwidth + prefill / flops


# -- the engines: each returns a function that runs the workload once ----------------------------------------


def run_nanovllm(args: argparse.Namespace, model: Path, dummy: bool, work: Workload) -> Callable[[], None]:
    options = {"max_num_seqs": args.max_num_seqs, "attention_backend": args.attention_backend}
    llm = nanovllm.LLM(
        str(model),
        load_format="dummy" if dummy else "auto",
        skip_tokenizer_init=True,
        enforce_eager=args.enforce_eager,
        device=args.device,
        enable_prefix_caching=False,  # the prompts of one run come again in the next: each is to be computed
        **options,
    )
    params = [
        nanovllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length)
        for length in work.output_lens
    ]

    def run(first_token_only: bool = False) -> None:
        if first_token_only:
            llm.generate([work.prompts[0]], nanovllm.SamplingParams(max_tokens=1), use_tqdm=False)
            return
        outputs = llm.generate(work.prompts, params, use_tqdm=args.progress)
        lens = [len(output["token_ids"]) for output in outputs]
        assert lens == work.output_lens, "an output has the wrong length"

    return run


def run_transformers(
    args: argparse.Namespace, model: Path, dummy: bool, work: Workload
) -> Callable[[], None]:
    """`generate` with one left-padded batch, which runs until the longest output is done."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device(
        args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.from_pretrained(model)
    if dummy:
        net = AutoModelForCausalLM.from_config(config).to(device, dtype)
    else:
        net = AutoModelForCausalLM.from_pretrained(model).to(device, dtype)
    width = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=device)

    def run(first_token_only: bool = False) -> None:
        longest = 1 if first_token_only else max(work.output_lens)
        net.generate(
            ids[:1] if first_token_only else ids,
            attention_mask=mask[:1] if first_token_only else mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            temperature=0.6,
            top_k=0,
            pad_token_id=0,
        )

    return run


def run_vllm(args: argparse.Namespace, model: Path, dummy: bool, work: Workload) -> Callable[[], None]:
    import vllm

    llm = vllm.LLM(
        str(model),
        load_format="dummy" if dummy else "auto",
        skip_tokenizer_init=True,
        max_num_seqs=args.max_num_seqs,
        max_model_len=4096,
        enable_prefix_caching=False,
    )
    params = [
        vllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False)
        for n in work.output_lens
    ]

    def run(first_token_only: bool = False) -> None:
        count = 1 if first_token_only else len(work.prompts)
        one = vllm.SamplingParams(max_tokens=1, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts[:count]]
        llm.generate(prompts, [one] if first_token_only else params, use_tqdm=False)

    return run


ENGINES = {"nanovllm": run_nanovllm, "transformers": run_transformers, "vllm": run_vllm}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="nanovllm")
    parser.add_argument(
        "--workload", choices=("headline", "demo"), help="default: headline on a GPU, demo on a CPU"
    )
    parser.add_argument("--shape", choices=QWEN3, default="qwen3-0.6b", help="of the dummy weights")
    parser.add_argument("--model", help="a model folder to use instead of a dummy shape")
    parser.add_argument("--num-seqs", type=int, help="default: 256 (headline) or 64 (demo)")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument("--progress", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    name = args.workload or ("headline" if on_gpu else "demo")
    with tempfile.TemporaryDirectory() as folder:
        dummy = args.model is None and name == "headline"
        if dummy:
            model = write_shape(args.shape, Path(folder))
        else:
            model = Path(args.model or nanovllm.demo_model_path())
        config = load_model_config(model)
        work = headline(args.num_seqs or 256) if name == "headline" else demo(args.num_seqs or 64, str(model))
        start = time.perf_counter()
        run = ENGINES[args.engine](args, model, dummy, work)
        run(first_token_only=True)
        startup = time.perf_counter() - start
        seconds = []
        for _ in range(args.repeat + 1):  # the first one warms up
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    device = torch.device("cuda" if on_gpu else "cpu")
    floor = floor_seconds(config, work, 2 if on_gpu else 4, device_speed(device))
    result = {
        "engine": args.engine,
        "workload": name,
        "model": args.shape if dummy else model.name,
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "num_seqs": len(work.prompts),
        "tokens_in": work.tokens_in,
        "tokens_out": work.tokens_out,
        "seconds": [round(s, 3) for s in seconds],
        "output_tokens_per_s": round(work.tokens_out / median, 1),
        "floor_output_tokens_per_s": round(work.tokens_out / floor, 1),
        "share_of_floor": round(floor / median, 3),
        "startup_s": round(startup, 2),
    }
    print(f"{args.engine}, {name}: {work.tokens_in:,} tokens in, {work.tokens_out:,} out")
    print(f"start-up to first token   {startup:8.2f} s")
    print(f"generation                {median:8.2f} s (median of {args.repeat} after one warm-up)")
    print(f"output                    {work.tokens_out / median:8,.0f} tokens/s")
    print(f"roofline                  {work.tokens_out / floor:8,.0f} tokens/s; reached {floor / median:.1%}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
