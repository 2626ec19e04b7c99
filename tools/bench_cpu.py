"""Output tokens/s on a CPU: nanovllm, or another engine on the same prompts.

    python -m tools.bench cpu nanovllm MODEL --option quantization=int8
    python -m tools.bench cpu openvino FOLDER      # of optimum-cli export openvino -m MODEL FOLDER
    python -m tools.bench cpu llama_cpp FILE.gguf 2>/dev/null  # it logs much
    python -m tools.bench cpu vllm MODEL --option dtype=bfloat16
    python -m tools.bench cpu transformers MODEL --option dtype=bfloat16  # one padded batch

Prompts are common words, one token each in most vocabularies, with a fixed seed; temperature 0.6, and every
answer has its full length. `long` counts words of prompts instead. `label-64-200` has 64 rows that share 200
words, other ones in every run; only such workloads use prefix caches. Run engines in turn, on an idle
machine.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

Generate = Callable[[list[str], int], None]  # prompts and the tokens of each answer
TEXT = "the a of to and in is it you that he was for on are with as his they be at one have this from"
TEMPERATURE = 0.6


class Work(NamedTuple):
    """Prompts, each of `least` to `most` words after `shared` common ones, and the tokens of an answer."""

    prompts: int
    least: int
    most: int
    tokens: int
    shared: int = 0


WORKLOADS = {
    "mixed": Work(64, 16, 120, 64),
    "equal": Work(64, 64, 64, 64),
    "few": Work(16, 16, 120, 64),
    "one": Work(1, 30, 30, 256),
    "long": Work(8, 1000, 1000, 1),
    **{f"label-{rows}-{n}": Work(rows, 20, 60, 4, n) for rows in (64, 500) for n in (50, 200, 500)},
}


def prompts_of(work: Work, seed: int = 0) -> list[str]:
    rng, words = random.Random(seed), TEXT.split()
    lengths = [rng.randint(work.least, work.most) for _ in range(work.prompts)]
    shared = [rng.choice(words) for _ in range(work.shared)]
    return [" ".join([*shared, *(rng.choice(words) for _ in range(length))]) for length in lengths]


def nanovllm_engine(model: str, options: dict[str, Any]) -> Generate:
    from nanovllm import LLM, SamplingParams

    llm = LLM(model, device="cpu", **options)

    def generate(prompts: list[str], tokens: int) -> None:
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output["token_ids"]) == tokens for output in outputs)

    return generate


def vllm_engine(model: str, options: dict[str, Any]) -> Generate:
    import vllm

    llm = vllm.LLM(model, max_model_len=2048, **options)

    def generate(prompts: list[str], tokens: int) -> None:
        params = vllm.SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    return generate


def openvino_engine(model: str, options: dict[str, Any]) -> Generate:
    import openvino_genai

    schedule = openvino_genai.SchedulerConfig()
    schedule.cache_size, schedule.max_num_batched_tokens = options.pop("cache_size", 2), 8192  # GB
    schedule.max_num_seqs = options.pop("max_num_seqs", 256)
    schedule.enable_prefix_caching = options.pop("enable_prefix_caching")
    pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=schedule, **options)

    def generate(prompts: list[str], tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = tokens, True, False
        config.do_sample, config.temperature = True, TEMPERATURE
        pipeline.generate(prompts, config)

    return generate


def llama_cpp_engine(model: str, options: dict[str, Any]) -> Generate:
    """Up to `n_seq_max` sequences at once; what they share is computed once, as in llama-batched-bench."""
    import llama_cpp as c

    loaded = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
    params, steps = c.llama_context_default_params(), 2048  # tokens of a step
    params.n_seq_max = options.pop("n_seq_max", 64)
    params.n_ctx, params.n_batch, params.kv_unified = params.n_seq_max * 2048, steps, False
    for name in ("n_threads", "n_threads_batch"):
        setattr(params, name, options.get(name, len(os.sched_getaffinity(0))))
    context = c.llama_init_from_model(loaded, params)
    vocab, memory = c.llama_model_get_vocab(loaded), c.llama_get_memory(context)
    batch = c.llama_batch_init(steps, 0, 1)
    chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
    c.llama_sampler_chain_add(chain, c.llama_sampler_init_temp(TEMPERATURE))
    c.llama_sampler_chain_add(chain, c.llama_sampler_init_dist(0))

    def tokenized(text: str) -> list[int]:
        found = (c.llama_token * (4 * len(text)))()
        number = c.llama_tokenize(vocab, text.encode(), len(text.encode()), found, len(found), True, True)
        return found[:number]

    def decode(cells: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token, position, sequence, whether to draw) in steps; return what each sequence drew."""
        drawn: dict[int, int] = {}
        for start in range(0, len(cells), steps):
            part = cells[start : start + steps]
            batch.n_tokens = len(part)
            for place, (token, position, sequence, draws) in enumerate(part):
                batch.token[place], batch.pos[place], batch.logits[place] = token, position, draws
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            assert c.llama_decode(context, batch) == 0
            for place, (_, _, sequence, draws) in enumerate(part):
                if draws:
                    drawn[sequence] = c.llama_sampler_sample(chain, context, place)
        return drawn

    def generate(prompts: list[str], tokens: int) -> None:
        for start in range(0, len(prompts), params.n_seq_max):
            c.llama_memory_clear(memory, True)
            group = [*map(tokenized, prompts[start : start + params.n_seq_max])]
            differ = (place for place, ids in enumerate(zip(*group, strict=False)) if len({*ids}) > 1)
            shared = next(differ, 0) if len(group) > 1 else 0
            decode([(token, position, 0, False) for position, token in enumerate(group[0][:shared])])
            for sequence in range(1, len(group) if shared else 0):
                c.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
            drawn = decode(
                [
                    (ids[position], position, sequence, position + 1 == len(ids))
                    for sequence, ids in enumerate(group)
                    for position in range(shared, len(ids))
                ]
            )
            for step in range(tokens - 1):
                drawn = decode([(drawn[each], len(ids) + step, each, True) for each, ids in enumerate(group)])

    return generate


def transformers_engine(model: str, options: dict[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llm = AutoModelForCausalLM.from_pretrained(model, **options)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    @torch.inference_mode()
    def generate(prompts: list[str], tokens: int) -> None:
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        exact = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        llm.generate(**batch, **exact, do_sample=True, temperature=TEMPERATURE, top_k=0)

    return generate


ENGINES: dict[str, Callable[[str, dict[str, Any]], Generate]] = {
    "nanovllm": nanovllm_engine,
    "openvino": openvino_engine,
    "llama_cpp": llama_cpp_engine,
    "vllm": vllm_engine,
    "transformers": transformers_engine,
}
SHARING = ("nanovllm", "openvino", "vllm")  # those with an option for a prefix cache


def rates(generate: Generate, work: Work, runs: int) -> list[float]:
    """Tokens of answers a second, or words of prompts for answers of one token."""
    prompts = prompts_of(work)
    generate(prompts[:4], min(work.tokens, 8))
    found = []
    for run in range(runs):
        if work.shared:
            prompts = prompts_of(work, run + 1)
        start = perf_counter()
        generate(prompts, work.tokens)
        counted = work.prompts * (work.tokens if work.tokens > 1 else work.least)
        found.append(counted / (perf_counter() - start))
    return found


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdecimal() else value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="default: mixed, equal and one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="of each answer, instead of the workload's own")
    parser.add_argument("--option", action="append", type=option, default=[], help="NAME=VALUE of the engine")
    args = parser.parse_args(argv)
    start = perf_counter()
    names = args.only or ["mixed", "equal", "one"]
    options = dict(args.option)
    if args.engine in SHARING:
        options["enable_prefix_caching"] = any(WORKLOADS[name].shared for name in names)
    generate = ENGINES[args.engine](args.model, options)
    print(f"start of the engine, with its imports: {perf_counter() - start:.1f} s", flush=True)
    for name in names:
        work = WORKLOADS[name]
        if args.tokens:
            work = work._replace(tokens=args.tokens)
        found = rates(generate, work, args.runs)
        print(f"{name:6}", " / ".join(f"{rate:.1f}" for rate in found), "tokens/s", flush=True)


if __name__ == "__main__":
    main()
