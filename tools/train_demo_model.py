"""Train the bundled demo model from scratch: `python tools/train_demo_model.py --out DIR [--minutes 8]`.

Owns the demo tokenizer, the model's configuration, the training and the evaluation. Writes a complete Hugging
Face folder with a model card. `--minutes` is the wall-clock time of the whole run: the learning rate schedule
follows the clock, so the run ends on time on any machine. Knows nothing of the inference engine or of the
content of the tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from demo_tasks import HELD_OUT_ONE_IN, TASKS, Example, heldout, make_example, score
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 512
ROW = 512  # tokens in a training row, which holds several examples
CHUNK = 4096  # examples that a worker generates at a time
# fmt: off
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "bos_token_id": None,
}
# fmt: on


def chat_prompt(prompt: str) -> str:
    """The chat template applied to one user message, with the generation prompt."""
    return f"{START}user\n{prompt}{END}\n{START}assistant\n"


def build_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE trained on the tasks; each digit and each capital letter is one token.

    All 256 bytes are in the vocabulary, so any text round-trips. Deterministic in `seed`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("[A-Z]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng, corpus = Random(seed), ["system\n", "user\n", "assistant\n", "Write it in capital letters."]
    for task in TASKS:
        for example in (make_example(rng, task=task) for _ in range(300)):
            if task != "capitals":  # its random words would fill the vocabulary with random syllables
                corpus += [example.prompt, example.answer]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_configs(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer and the JSON files in a form that transformers 4.51 and 5.x read."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MODEL_CONFIG["max_position_embeddings"],
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": MODEL_CONFIG | {"eos_token_id": end, "pad_token_id": pad},
        "generation_config.json": {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def pack(pairs: list[tuple[list[int], list[int]]], pad: int) -> np.ndarray:
    """Pack (prompt, answer) token lists into rows.

    Returns int16 [3, rows, ROW]: the tokens; the positions, which restart at 0 for each example; the targets:
    the next token where it is part of an answer, else -100.
    """
    packed = np.zeros((3, len(pairs), ROW), dtype=np.int16)
    packed[0], packed[2] = pad, -100
    row, at = 0, 0
    for prompt, answer in pairs:
        if at + len(prompt) + len(answer) > ROW:
            row, at = row + 1, 0
        middle, stop = at + len(prompt), at + len(prompt) + len(answer)
        packed[0, row, at:stop] = prompt + answer
        packed[1, row, at:stop] = np.arange(stop - at)
        packed[2, row, middle - 1 : stop - 1] = answer
        at = stop
    return packed[:, : row + 1].copy()


def generate_rows(worker: int, tokenizer_json: str, seed: int, deadline: float) -> np.ndarray:
    """The packed rows of one worker: it generates chunks until `deadline` (of `time.time`), at least one."""
    tokenizer, rng = Tokenizer.from_str(tokenizer_json), Random(f"{seed}-{worker}")
    chunks: list[np.ndarray] = []
    while not chunks or time.time() < deadline:
        examples = [make_example(rng) for _ in range(CHUNK)]
        prompts = tokenizer.encode_batch([chat_prompt(example.prompt) for example in examples])
        answers = tokenizer.encode_batch([example.answer + END for example in examples])
        pairs = [(prompt.ids, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
        chunks.append(pack(pairs, tokenizer.token_to_id(PAD)))
    return np.concatenate(chunks, axis=1)


def generate_dataset(tokenizer: Tokenizer, seed: int, seconds: float) -> torch.Tensor:
    """All training data that the CPU cores generate in `seconds`: int16 [3, rows, ROW]."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    deadline = time.time() + seconds
    generate = partial(generate_rows, tokenizer_json=tokenizer.to_str(), seed=seed, deadline=deadline)
    with multiprocessing.Pool(workers) as pool:
        packed = np.concatenate(pool.map(generate, range(workers), chunksize=1), axis=1)
    print(f"{(packed[1] == 1).sum():,} training examples in {packed.shape[1]:,} rows", flush=True)
    return torch.from_numpy(packed)


def rows_per_step(device: torch.device) -> int:
    return 128 if device.type == "cuda" else 8


def compute_loss(model: Qwen3ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the answers in packed rows [3, rows, ROW]; examples do not see each other."""
    tokens, positions, targets = batch.long()
    example = (positions == 0).cumsum(dim=1)
    mask = torch.ones(ROW, ROW, dtype=torch.bool, device=batch.device).tril()
    mask = (mask & (example[:, :, None] == example[:, None, :]))[:, None]  # [rows, 1, query, key]
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        hidden = model.model(
            input_ids=tokens, position_ids=positions, attention_mask={"full_attention": mask}, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def compile_layers(model: Qwen3ForCausalLM, batch: torch.Tensor) -> None:
    """Compile the decoder layers and check their loss; on an error or a different loss, train eagerly."""
    with torch.no_grad():
        expected = compute_loss(model, batch).item()
    try:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        loss = compute_loss(model, batch)
        loss.backward()
        if abs(loss.item() - expected) > 0.02:
            raise RuntimeError(f"compiled loss {loss.item():.4f}, eager loss {expected:.4f}")
        print("decoder layers compiled", flush=True)
    except Exception as error:  # whatever fails in the compiler, training continues without it
        for layer in model.model.layers:
            layer._compiled_call_impl = None
        print(f"not compiled ({type(error).__name__}: {str(error)[:300]}); training eagerly", flush=True)
    model.zero_grad(set_to_none=True)


def train(
    model: Qwen3ForCausalLM, dataset: torch.Tensor, seconds: float, seed: int
) -> Iterator[tuple[float, int]]:
    """Train for `seconds`, with warm-up and cosine decay over the elapsed share of the time.

    Yields (share, tokens seen) after each step. The caller's time between steps does not count.
    """
    device = dataset.device
    rows, peak = rows_per_step(device), 1.5e-3
    generator = torch.Generator(device).manual_seed(seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    used, steps, reported = 0.0, 0, 0.0
    while used < seconds:
        started, share = time.monotonic(), used / seconds
        rate = peak * min(1.0, share / 0.04, steps / 50 + 0.02) * (0.5 + 0.5 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        picked = torch.randint(dataset.shape[1], (rows,), generator=generator, device=device)
        loss = compute_loss(model, dataset[:, picked])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 20 == 0 or device.type == "cpu":
            value = loss.item()  # also waits for the device, so that the clock is right
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss became {value} at step {steps}")
            if used - reported >= 10:
                reported, speed = used, steps * rows * ROW / used
                print(f"{used:5.0f} s  step {steps:6d}  loss {value:.4f}  {speed:,.0f} tokens/s", flush=True)
        used += time.monotonic() - started
        yield used / seconds, steps * rows * ROW


@torch.inference_mode()
def evaluate(
    folder: Path, tokenizer: Tokenizer, examples: list[Example], device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the score of the model in `folder`, decoded greedily in `dtype`; print some wrong answers."""
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    model = Qwen3ForCausalLM.from_pretrained(folder).to(device, dtype).eval()
    prompts = [tokenizer.encode(chat_prompt(example.prompt)).ids for example in examples]
    lengths = [len(tokenizer.encode(example.answer).ids) for example in examples]
    order = sorted(range(len(examples)), key=lengths.__getitem__)  # similar lengths in one batch
    answers = [""] * len(examples)
    size = 1024 if device.type == "cuda" else 32
    for batch in (order[i : i + size] for i in range(0, len(order), size)):
        width = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in batch], device=device)
        longest = lengths[batch[-1]] + 2  # a longer answer is wrong in any case
        output = model.generate(input_ids=ids, attention_mask=(ids != pad).long(), max_new_tokens=longest)
        for i, row in zip(batch, output[:, width:].tolist(), strict=True):
            stop = next((at for at, token in enumerate(row) if token in (end, pad)), None)
            # Marks an answer that does not end, so that a correct beginning does not count as a correct
            # answer.
            answers[i] = tokenizer.decode(row[:stop]) + ("" if stop is not None else "...")
    scores = score(examples, answers)
    print("\n".join(f"  {task:16s} {value:.2%}" for task, value in scores.items()))
    wrong = [(e, answer) for e, answer in zip(examples, answers, strict=True) if answer != e.answer]
    for example, answer in wrong[:16]:
        print(f"  wrong {example.task}: {example.prompt}\n    {example.answer!r}\n    {answer[:400]!r}")
    return scores


def model_card(facts: dict[str, str], scores: dict[str, float], examples: list[Example]) -> str:
    """The README.md of the model folder."""
    shown = {example.task: example.prompt for example in reversed(examples)}
    about = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    table = "\n".join(f"| {task} | {scores[task]:.1%} | {shown[task]} |" for task in TASKS if task in scores)
    return f"""# nanovllm demo model

A very small chat model with the Qwen3 architecture. It solves {len(TASKS)} kinds of generated problems step
by step; each problem has exactly one correct answer. It lets you run an inference engine and measure its
accuracy on any machine, without a download. All its training text is generated.

{about}

## Accuracy

Greedy decoding on held-out problems. A hash selects one in {HELD_OUT_ONE_IN} of all problems; the training
data contains none of them, in any wording. An answer is correct if the whole string matches, steps included.
Overall **{scores["overall"]:.2%}** of {len(examples)} answers are correct.

| task | exact match | example prompt |
|---|---|---|
{table}

## Limitations

The model knows only these tasks, in these wordings and number ranges. Any other prompt gives nonsense. Words
whose letters matter must be in capitals: each capital letter is one token. The training examples are single
questions without a system prompt, of at most about 200 tokens. Use it for tests and demonstrations only.

The same numbers or letters in another order count as another problem, so the training data may contain a
held-out sum with its terms exchanged. The learning rate schedule follows the clock, so a second training run
gives other weights.
"""


def save_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16, without the LM head, which is tied to the embedding."""
    weights = {name: w.to("cpu", torch.bfloat16) for name, w in model.state_dict().items()}
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # package data: all users of an installation may read it


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="wall-clock time of the whole run (default 8)"
    )
    parser.add_argument("--device", default="auto", help='"auto" (a GPU where there is one), "cuda" or "cpu"')
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args, begin = parse_args(), time.monotonic()
    deadline = begin + args.minutes * 60
    tokenizer = build_tokenizer(args.seed)
    write_configs(args.out, tokenizer)
    dataset = generate_dataset(tokenizer, args.seed, seconds=6 * args.minutes)  # forks: call before CUDA

    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if args.device == "auto" else args.device)
    on_gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # the memory-efficient kernel is the one for masks
    model = (
        Qwen3ForCausalLM(Qwen3Config(**MODEL_CONFIG, attn_implementation="sdpa")).float().to(device).train()
    )
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {tokenizer.get_vocab_size()} tokens, on {machine}", flush=True)
    dataset = dataset.to(device)
    if on_gpu:
        compile_layers(model, dataset[:, : rows_per_step(device)])

    def finish(label: str, count: int, seed: int, tokens: int) -> None:
        """Write the current weights, evaluate them and write the model card."""
        print(label, flush=True)
        save_weights(model, args.out)
        examples, dtype = heldout(count, seed), torch.bfloat16 if on_gpu else torch.float32
        scores = evaluate(args.out, tokenizer, examples, device, dtype)
        facts = {
            "parameters": f"{size:,}, stored as bfloat16",
            "command": f"`python tools/train_demo_model.py --minutes {args.minutes:g} --seed {args.seed}`",
            "hardware": f"one {machine}, {(time.monotonic() - begin) / 60:.1f} minutes",
            "training tokens": f"{tokens:,}, drawn from {dataset[0].numel():,}",
            "evaluation dtype": str(dtype).removeprefix("torch."),
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
        }
        (args.out / "README.md").write_text(model_card(facts, scores, examples), encoding="utf-8")

    left = deadline - time.monotonic()
    seconds = left - 40 if on_gpu and left > 80 else 0.5 * left  # the rest is for the two evaluations
    tokens, halfway = 0, False
    for share, tokens in train(model, dataset, max(1.0, seconds), args.seed):
        if share > 0.5 and not halfway:
            halfway = True
            finish("half-way score:", 512 if on_gpu else 32, args.seed + 1, tokens)
    finish("final score:", 4096 if on_gpu else max(64, int(40 * args.minutes)), args.seed + 2, tokens)
    print(f"{args.out} written after {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
