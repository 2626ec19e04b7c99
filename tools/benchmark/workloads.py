"""The workloads of bench.py: prompts as token ids, and numbers of output tokens.

Every draw is seeded, so the totals are the same everywhere. Loads no model and runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from nanovllm import SamplingParams
from nanovllm.models.config import ModelConfig
from tools.demo_tasks import heldout

SAMPLES = 16  # of each prompt in the workload `samples`
ROW_KEYS = ("prompt", "prompt_token_ids", "max_tokens")
Tokenize = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class Workload:
    """Prompts, and the number of output tokens of each."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    groups: tuple[int, ...] = ()  # the number of each row's group; rows of a group share a prefix
    group_lens: tuple[int, ...] = ()  # tokens of each group's prefix

    @property
    def tokens_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a sequence, prompt and output."""
        return max(len(p) + out for p, out in zip(self.prompts, self.output_lens, strict=True))

    @property
    def common(self) -> int:
        """The length of the prefix that all prompts share; 0 for a single prompt."""
        if len(self.prompts) == 1:
            return 0
        low, high = min(self.prompts), max(self.prompts)  # all prompts in between share their common prefix
        return next(
            (i for i, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low)
        )

    def sharing(self) -> Sharing:
        """What a prefix cache can save: prefixes of groups, a prefix of all prompts, or equal prompts."""
        if self.groups:
            return Sharing(np.array(self.groups), np.array(self.group_lens))
        if self.common:
            return Sharing(np.zeros(len(self.prompts), np.int64), np.array([self.common]))
        numbers: dict[tuple[int, ...], int] = {}
        groups = np.array([numbers.setdefault(tuple(p), len(numbers)) for p in self.prompts])
        tokens = np.array([len(prompt) for prompt in numbers])
        return Sharing(groups, np.where(np.bincount(groups) > 1, tokens, 0))

    def shifted(self, by: int, vocab_size: int) -> Workload:
        """The same lengths and sharing with other ids, so that no prompt is in a prefix cache yet."""
        return replace(self, prompts=[[(i + by) % vocab_size for i in prompt] for prompt in self.prompts])

    def beginning(self, num_seqs: int, max_tokens: int) -> Workload:
        """The first `num_seqs` prompts with at most `max_tokens` output tokens each."""
        output_lens = [min(out, max_tokens) for out in self.output_lens[:num_seqs]]
        groups = self.groups[:num_seqs]
        return replace(self, prompts=self.prompts[:num_seqs], output_lens=output_lens, groups=groups)


@dataclass(frozen=True, eq=False)
class Sharing:
    """Groups of rows with a common prefix, which is computed once and read once in each step."""

    groups: np.ndarray  # [rows] the number of each row's group
    tokens: np.ndarray  # [groups] the length of each group's common prefix

    def saved(self, rows: np.ndarray) -> int:
        """The number of tokens whose K/V a step of `rows` need not read, due to sharing."""
        counts = np.bincount(self.groups[rows], minlength=len(self.tokens))
        return int((np.maximum(counts - 1, 0) * self.tokens).sum())


def drawn(name: str, num_seqs: int, ids_in: tuple[int, int], tokens_out: tuple[int, int]) -> Workload:
    """Random ids and output lengths within the given ranges, in the order of nano-vLLM's benchmark.

    All ids are drawn before the first output length, so `num_seqs` changes every output length.
    """
    rng = Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(*ids_in))] for _ in range(num_seqs)]
    return Workload(name, prompts, [rng.randint(*tokens_out) for _ in range(num_seqs)])


def headline(num_seqs: int, name: str = "headline") -> Workload:
    """nano-vLLM's workload: 100 to 1,024 random ids in, 100 to 1,024 tokens out."""
    return drawn(name, num_seqs, (100, 1024), (100, 1024))


def samples(num_seqs: int) -> Workload:
    """Prompts of 300 to 900 random ids, each SAMPLES times in a row; 100 to 600 tokens out each time."""
    rng = Random(0)
    count = -(-num_seqs // SAMPLES)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(300, 900))] for _ in range(count)]
    rows = [prompts[row // SAMPLES] for row in range(num_seqs)]
    return Workload("samples", rows, [rng.randint(100, 600) for _ in range(num_seqs)])


def shared_prefix(num_seqs: int) -> Workload:
    """4,096 random ids that all prompts share, then 64 to 256 ids of their own; 128 to 256 tokens out."""
    rng = Random(0)
    common = [rng.randint(0, 10000) for _ in range(4096)]
    prompts = [common + [rng.randint(0, 10000) for _ in range(rng.randint(64, 256))] for _ in range(num_seqs)]
    return Workload("prefix", prompts, [rng.randint(128, 256) for _ in range(num_seqs)])


def prefixes(num_seqs: int, length: int = 8192, num_ids: int = 10_001) -> Workload:
    """20 prefixes of `length` random ids, in random order; then 32 to 128 ids of their own; 64 to 128 out.

    num_ids: ids are below this.
    """
    rng = Random(0)
    begin = [[rng.randrange(num_ids) for _ in range(length)] for _ in range(20)]
    groups = tuple(rng.randrange(20) for _ in range(num_seqs))
    prompts = [begin[g] + [rng.randrange(num_ids) for _ in range(rng.randint(32, 128))] for g in groups]
    output_lens = [rng.randint(64, 128) for _ in range(num_seqs)]
    return Workload("prefixes", prompts, output_lens, groups, (length,) * 20)


def label(num_seqs: int, shared: int = 200, name: str = "label") -> Workload:
    """An instruction of `shared` random ids, then 40 to 100 ids of a row's own; 4 tokens out."""
    rng = Random(0)
    begin = [rng.randint(0, 10000) for _ in range(shared)]
    prompts = [begin + [rng.randint(0, 10000) for _ in range(rng.randint(40, 100))] for _ in range(num_seqs)]
    return Workload(name, prompts, [4] * num_seqs)


def labels(num_seqs: int) -> Workload:
    """20 instructions of 150 to 450 random ids in random order, then 40 to 100 ids of a row's own; 4 out."""
    rng = Random(0)
    begin = [[rng.randint(0, 10000) for _ in range(rng.randint(150, 450))] for _ in range(20)]
    groups = tuple(rng.randrange(20) for _ in range(num_seqs))
    prompts = [begin[g] + [rng.randint(0, 10000) for _ in range(rng.randint(40, 100))] for g in groups]
    return Workload("labels", prompts, [4] * num_seqs, groups, tuple(map(len, begin)))


def few_shot(num_seqs: int) -> Workload:
    """300 ids that all share, then one of 8 lists of examples of 200 to 600 ids in random order, then 40 to
    100 ids of a row's own; 4 tokens out."""
    rng = Random(0)
    task = [rng.randint(0, 10000) for _ in range(300)]
    shots = [task + [rng.randint(0, 10000) for _ in range(rng.randint(200, 600))] for _ in range(8)]
    groups = tuple(rng.randrange(8) for _ in range(num_seqs))
    prompts = [shots[g] + [rng.randint(0, 10000) for _ in range(rng.randint(40, 100))] for g in groups]
    return Workload("few-shot", prompts, [4] * num_seqs, groups, tuple(map(len, shots)))


def demo(num_seqs: int, model: Path) -> Workload:
    """Problems for the demo model, with output lengths of the right answers: 2 to about 150 tokens."""
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


SYNTHETIC: dict[str, tuple[int, Callable[[int], Workload]]] = {  # of random ids: default size, how to draw it
    "headline": (256, headline),
    "queue": (2048, lambda num_seqs: headline(num_seqs, "queue")),
    "single": (1, lambda num_seqs: headline(num_seqs, "single")),  # 964 in, 724 out
    "few": (16, lambda num_seqs: drawn("few", num_seqs, (100, 1024), (512, 512))),
    "chat": (2048, lambda num_seqs: drawn("chat", num_seqs, (20, 200), (20, 300))),
    "classify": (4096, lambda num_seqs: drawn("classify", num_seqs, (200, 600), (4, 4))),
    "long": (48, lambda num_seqs: drawn("long", num_seqs, (8000, 28000), (200, 200))),
    "prefix": (256, shared_prefix),
    "prefixes": (4096, prefixes),
    "samples": (64 * SAMPLES, samples),
    "label": (4096, label),
    **{f"label-{n}": (4096, partial(label, shared=n, name=f"label-{n}")) for n in (240, 370, 1000, 4000)},
    "labels": (4096, labels),
    "few-shot": (4096, few_shot),
}
# The workloads for the prefix cache: all from `prefix` on.
SHARED = tuple(SYNTHETIC)[list(SYNTHETIC).index("prefix") :]


def from_jsonl(
    path: Path, tokenize: Tokenize | None, vocab_size: int, default_max_tokens: int, num_seqs: int | None
) -> Workload:
    """Read rows of `prompt` (a string) or `prompt_token_ids`, and optionally `max_tokens`.

    tokenize: strings to ids; None without a tokenizer, and a string is then an error. num_seqs: the number of
    rows to read; None reads all. Blank lines are skipped.

    ValueError names the line and the fix; OSError if the file cannot be read.
    """
    rows: list[tuple[str | list[int], int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(rows) == num_seqs:
            break
        if not line.strip():
            continue
        try:
            prompt, max_tokens = _parse_row(line, vocab_size)
            if isinstance(prompt, str) and tokenize is None:
                raise ValueError(
                    "'prompt' is a string, and a dummy shape has no tokenizer: pass --model FOLDER"
                )
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        rows.append((prompt, default_max_tokens if max_tokens is None else max_tokens))
    if not rows:
        raise ValueError(f"{path} has no rows: write one JSON object a line, such as {{'prompt': 'Hello'}}")
    texts = [prompt for prompt, _ in rows if isinstance(prompt, str)]
    encoded = iter(tokenize(texts) if tokenize is not None and texts else [])
    prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt, _ in rows]
    return Workload(path.name, prompts, [max_tokens for _, max_tokens in rows])


def _parse_row(line: str, vocab_size: int) -> tuple[str | list[int], int | None]:
    """The prompt and `max_tokens` of one line; ValueError names the fix."""
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}); write one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"write an object with 'prompt' or 'prompt_token_ids', not {line.strip()[:60]}")
    for key in row:
        if key not in ROW_KEYS:
            raise ValueError(f"unknown key {key!r}; remove it, a row has {', '.join(map(repr, ROW_KEYS))}")
    if ("prompt" in row) == ("prompt_token_ids" in row):
        raise ValueError(f"give either 'prompt' or 'prompt_token_ids', not {sorted(row)}")
    max_tokens = row.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"'max_tokens' must be an integer of at least 1, not {max_tokens!r}")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError(f"'prompt' must be a string that is not empty, not {row['prompt']!r}")
        return row["prompt"], max_tokens
    ids = row["prompt_token_ids"]
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"'prompt_token_ids' must be a list of at least one integer, not {ids!r}")
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id!r} is outside the vocabulary; use 0 to {vocab_size - 1}")
    return ids, max_tokens


def make_workload(name: str, num_seqs: int | None, model: Path, config: ModelConfig, dummy: bool) -> Workload:
    """The workload with this name, or from this file, for the model in a folder.

    num_seqs: number of rows; None: the default. dummy: the model has no tokenizer. ValueError for a wrong
    file, or a row too long for the model; OSError if the file cannot be read.
    """
    if name in SYNTHETIC:
        default, draw = SYNTHETIC[name]
        work = draw(num_seqs or default)
    elif name == "demo":
        work = demo(num_seqs or 64, model)
    else:
        tokenize = None
        if not dummy:
            tokenizer = AutoTokenizer.from_pretrained(model)
            tokenize = lambda texts: tokenizer(texts)["input_ids"]  # noqa: E731
        work = from_jsonl(Path(name), tokenize, config.vocab_size, SamplingParams().max_tokens, num_seqs)
    if work.longest > config.longest:
        raise ValueError(
            f"the longest sequence has {work.longest} tokens and the model reads at most "
            f"{config.longest}; take shorter prompts or a smaller max_tokens"
        )
    return work
