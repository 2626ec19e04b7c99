"""Drafts from the text on a real model: rewriting, correcting, comments, JSON; stories, which repeat little.

    python -m tools.bench drafts MODEL.gguf                       # 256 rows at once, and one
    python -m tools.bench drafts MODEL.gguf --rows 8 --tasks 64 --kinds rewrite stories -- --num-threads 2

Texts are docstrings of Python's standard library. Engines without drafts, with `ngram` and with `suffix`
answer each list in turn, greedily; every run has other texts. Prints output tokens/s, the ratio to the engine
without drafts, and the tokens that a row gets from a decode step. Ends with 1 if answers differ, as they may
by rounding in bfloat16.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.jobs.job import engine_options
from nanovllm.jobs.main import parse_args

METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
}
ASKED = {
    "rewrite": "Rewrite this text and keep its words where you can:\n\n{text}",
    "correct": "Correct the spelling of this text and change nothing else:\n\n{typos}",
    "comments": "Write this Python function again with better comments:\n\n{code}",
    "json": 'Fill this JSON object from the text: {{"title": "", "summary": "", "keywords": []}}\n\n{text}',
    "stories": "Tell a story about the word {word!r}. Begin with the year {number}.",
}
LONGEST = 150  # tokens of an answer


@cache
def library() -> tuple[tuple[str, str], ...]:
    return tuple(sorted(found_in_library()))


def found_in_library() -> Iterator[tuple[str, str]]:
    """A docstring of 200 to 700 characters, and the source that it belongs to."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = inspect.cleandoc(ast.get_docstring(node) or "")
                code = ast.get_source_segment(source, node) or ""
                if 200 <= len(text) <= 700:
                    yield text, code[:1200]


def misspelt(text: str, rng: Random) -> str:
    """The text with two letters exchanged in every eighth word."""
    words = text.split(" ")
    for place in range(0, len(words), 8):
        word = words[place]
        if len(word) > 3:
            at = rng.randrange(1, len(word) - 1)
            words[place] = word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :]
    return " ".join(words)


def tasks(kind: str, count: int, run: int) -> list[list[dict[str, str]]]:
    """Conversations of one kind; each run has other texts as long as there are enough."""
    found = [*library()]
    Random(5).shuffle(found)
    rng, made = Random(run), []
    for number in range(run * count, (run + 1) * count):
        text, code = found[number % len(found)]
        word = rng.choice(text.split())
        typos = misspelt(text, rng)
        asked = ASKED[kind].format(text=text, typos=typos, code=code, word=word, number=1000 + number)
        made.append([{"role": "user", "content": asked}])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--kinds", nargs="+", choices=ASKED, default=[*ASKED])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1], help="at once")
    parser.add_argument("--tasks", type=int, help="of a run (default: 4 times the rows, at least 8)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("options", nargs="*", metavar="OPTION", help="options of LLM, after --")
    args = parser.parse_args()
    options = {"gpu_memory_utilization": 0.2}
    options |= engine_options(parse_args(["tune", args.model, "rows.jsonl", *args.options]))
    params = SamplingParams(temperature=0, max_tokens=LONGEST)
    differ = False
    head = f"{'kind':10} {'rows':>5} {'method':8} {'tokens/s':>9} {'ratio':>6} {'of runs':18}"
    print(f"{head} tokens a row and step")
    for rows in args.rows:
        count = args.tasks or max(4 * rows, 8)
        sized = options | {"max_num_seqs": rows}
        engines = {each: LLM(args.model, speculative_config=METHODS[each], **sized) for each in args.methods}
        for kind in args.kinds:
            speeds: dict[str, list[float]] = {each: [] for each in engines}
            steps = dict.fromkeys(engines, 0.0)
            for run in range(args.runs + 1):  # the first one warms up
                answers, asked = {}, tasks(kind, count, run)
                for name, llm in engines.items():
                    llm.reset_prefix_cache()
                    before, begin = llm.stats(), perf_counter()
                    outputs = llm.chat(asked, params, use_tqdm=False)
                    seconds, after = perf_counter() - begin, llm.stats()
                    answers[name] = [[*each.outputs[0].token_ids] for each in outputs]
                    if run:
                        speeds[name].append(sum(map(len, answers[name])) / seconds)
                        drafted = after.num_draft_tokens - before.num_draft_tokens
                        accepted = after.num_accepted_tokens - before.num_accepted_tokens
                        written = sum(map(len, answers[name]))
                        steps[name] = written / max(1, written - accepted)
                        assert drafted >= accepted
                same = len({str(each) for each in answers.values()}) == 1
                differ = differ or not same
            for name, found in speeds.items():
                ratios = [mine / other for mine, other in zip(found, speeds[args.methods[0]], strict=True)]
                each = " ".join(f"{ratio:.2f}" for ratio in ratios)
                line = f"{kind:10} {rows:5} {name:8} {median(found):9,.0f} {median(ratios):6.2f} {each:18}"
                print(f"{line} {steps[name]:.2f}{'' if same else '  answers differ'}", flush=True)
        for llm in engines.values():
            llm.close()
    sys.exit(int(differ))


if __name__ == "__main__":
    main()
