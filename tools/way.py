"""The measures of the house: the core, its imports of doors, and the way of a prompt through `generate`.

    python -m tools.way           # a table
    python -m tools.way --json
    python -m tools.way --files   # the files of the way too, with their functions that run

The *core* is what every prompt passes through; `tests/test_architecture.py` lists its files. A *door* is
any other folder of the package. The *way* is what a `generate` of one prompt on the demo model runs on a
CPU, after a first one: the functions that are called, without kernels, seen by `sys.setprofile`; products
and attention run in plain torch. "Lines" are all lines of a file; "code" leaves out blank lines, comments
and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import sys
import threading
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
sys.path.append(str(ROOT / "tests"))


def code_lines(source: str) -> set[int]:
    """The numbers of the lines of `source` that hold code."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                found -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return found


def is_kernel(path: Path) -> bool:
    return "kernels" in path.parts


@dataclasses.dataclass(frozen=True)
class Way:
    """What a prompt passed: the lines of functions that ran, by file; the calls down to attention."""

    met: list[Path]  # the files, kernels too, in the order in which they are met
    ran: dict[Path, set[int]]
    functions: dict[Path, set[str]]
    calls: list[tuple[Path, str]]  # from `generate` to attention
    values: set[str]  # classes of values that were arguments or results
    stays: set[str]  # functions below `launch` that had the batch
    returns: set[str]  # those among them that gave it back


class Watch:
    """Sees each call within the package."""

    def __init__(self) -> None:
        self.codes: dict[Any, None] = {}  # in the order of their first calls
        self.values: set[type] = set()
        self.calls: list[tuple[Path, str]] = []
        self.stays: set[str] = set()
        self.returns: set[str] = set()

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "return":
            self._see(result)
            if type(result).__name__ == "Batch" and f"{code.co_filename}:{code.co_qualname}" in self.stays:
                self.returns.add(f"{code.co_filename}:{code.co_qualname}")
            return
        self.codes[code] = None
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        for each in arguments:
            self._see(each)
        names = [*_stack(frame)]
        if any(type(each).__name__ == "Batch" for each in arguments) and any(n == "launch" for _, n in names):
            self.stays.add(f"{code.co_filename}:{code.co_qualname}")
        if not self.calls and code.co_name == "forward" and "attention" in Path(code.co_filename).parts:
            self.calls = names[::-1]

    def _see(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__.startswith("nanovllm") and (
            dataclasses.is_dataclass(kind) or issubclass(kind, tuple)
        ):
            self.values.add(kind)


def _stack(frame: FrameType | None) -> Iterator[tuple[Path, str]]:
    """The functions of the package that are being called, the innermost first, up to `generate`."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            yield Path(code.co_filename), code.co_name
        if code.co_name == "generate":
            return
        frame = frame.f_back


def walk() -> Way:
    """Answer one prompt and see which functions it passes."""
    from nanovllm import LLM, SamplingParams, demo_model_path
    from nanovllm.cpu import isa

    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8)
    watch = Watch()
    options = {"device": "cpu", "max_model_len": 128}
    with isa.compiling_for("torch"), LLM(str(demo_model_path()), **options) as llm:
        llm.generate(["1 + 1 ="], params, use_tqdm=False)
        before = sys.getprofile()
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            llm.generate(["12 + 3 ="], params, use_tqdm=False)
        finally:
            sys.setprofile(before)
            threading.setprofile(None)  # type: ignore[arg-type]
    ran: dict[Path, set[int]] = {}
    functions: dict[Path, set[str]] = {}
    for code in watch.codes:
        path = Path(code.co_filename)
        if is_kernel(path):
            continue
        ran.setdefault(path, set()).update(_lines_of(path, code.co_firstlineno))
        if not code.co_name.startswith("<"):
            functions.setdefault(path, set()).add(code.co_qualname)
    values = {f"{kind.__module__}.{kind.__qualname__}" for kind in watch.values}
    met = [*dict.fromkeys(Path(code.co_filename) for code in watch.codes)]
    return Way(met, ran, functions, watch.calls, values, watch.stays, watch.returns)


def _lines_of(path: Path, first: int) -> set[int]:
    """The lines of the function that begins in line `first` of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorated = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first in (node.lineno, decorated):
                return set(range(decorated, (node.end_lineno or first) + 1))
    return {first}  # a lambda or a comprehension


def star_calls(tree: ast.AST) -> tuple[int, int]:
    """How many calls pass `*name`, and how many `**name`, whatever the name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lists = sum(isinstance(a, ast.Starred) and isinstance(a.value, ast.Name) for c in calls for a in c.args)
    maps = sum(k.arg is None and isinstance(k.value, ast.Name) for c in calls for k in c.keywords)
    return lists, maps


def measures(way: Way) -> dict[str, Any]:
    """Each row of the table, by its name."""
    from test_architecture import FILES, core_imports_of_doors, is_core

    sources = {path: path.read_text(encoding="utf-8") for path in FILES}
    lines = {path: len(text.splitlines()) for path, text in sources.items()}
    code = {path: code_lines(text) for path, text in sources.items()}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    core = [path for path in FILES if is_core(path) and not is_kernel(path)]
    opened = sum(lines[path] for path in way.ran)
    stars = [star_calls(tree) for tree in trees.values()]
    classes = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]

    def total(paths: list[Path] | dict[Path, Any], of: Callable[[Path], int]) -> int:
        return sum(of(path) for path in paths)

    return {
        "package: files": len(FILES),
        "package: lines": sum(lines.values()),
        "package: code": total(FILES, lambda path: len(code[path])),
        "package: classes": len(classes),
        "core without kernels: files": len(core),
        "core without kernels: lines": total(core, lines.__getitem__),
        "core without kernels: code": total(core, lambda path: len(code[path])),
        "imports from core into doors": len(core_imports_of_doors()),
        "the way: files": len(way.ran),
        "the way: lines": opened,
        "the way: code": total(way.ran, lambda path: len(code[path])),
        "the way: functions": total(way.functions, lambda path: len(way.functions[path])),
        "the way: lines of functions that run": total(way.ran, lambda path: len(way.ran[path])),
        "the way: share of lines that run, %": round(
            100 * total(way.ran, lambda path: len(way.ran[path])) / opened
        ),
        "the way: share of code that runs, %": round(
            100
            * total(way.ran, lambda path: len(way.ran[path] & code[path]))
            / total(way.ran, lambda path: len(code[path]))
        ),
        "value types on the way": len(way.values),
        "classes named Step-something": sum(node.name.startswith("Step") for node in classes),
        "generate to attention: calls": len(way.calls),
        "generate to attention: files": len({path for path, _ in way.calls}),
        "functions below launch that have the batch": len(way.stays),
        "of these, functions that return it": len(way.returns),
        "calls with *name": sum(lists for lists, _ in stars),
        "calls with **name": sum(maps for _, maps in stars),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--files", action="store_true", help="print the files of the way and their functions")
    args = parser.parse_args()
    way = walk()
    found = measures(way)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:46} {value:>8,}")
    print("from generate to attention: " + " > ".join(f"{path.stem}.{name}" for path, name in way.calls))
    if args.files:
        for path in sorted(way.ran):
            print(
                f"{path.relative_to(ROOT)} {len(way.ran[path])} of {len(path.read_text().splitlines())}: ",
                end="",
            )
            print(", ".join(sorted(way.functions.get(path, ()))))
        print("values: " + ", ".join(sorted(way.values)))


if __name__ == "__main__":
    main()
