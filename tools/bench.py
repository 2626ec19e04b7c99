"""The programs that measure, under one name each; `bench.py` at the top measures a whole workload.

    python -m tools.bench                      # the names, with one line each
    python -m tools.bench plan --num-seqs 512
    python -m tools.bench plan --help          # what one of them measures, and its flags

A program is the module `tools/bench_NAME.py`: its docstring's first paragraph is the line, `main` runs it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "bench_"


def programs() -> dict[str, str]:
    """Each program's name and what it measures; read from its file, as most of them import torch."""
    paths = sorted(Path(__file__).parent.glob(f"{PREFIX}*.py"))
    return {path.stem.removeprefix(PREFIX).replace("_", "-"): summary(path) for path in paths}


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, as one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def main(argv: Sequence[str] | None = None) -> None:
    found = programs()
    width = max(map(len, found)) + 2
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measure one part; `python bench.py` measures a whole workload.",
        epilog="names:\n" + "\n".join(f"  {name:{width}}{about}" for name, about in found.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=found, metavar="NAME", nargs="?", help="one of the names below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own flags; --help lists them")
    args = parser.parse_args(argv)
    if args.name is None:
        parser.print_help()
        return
    sys.argv = [f"{parser.prog} {args.name}", *args.arguments]  # what its `main` reads, and shows in its help
    importlib.import_module(f"tools.{PREFIX}{args.name.replace('-', '_')}").main()


if __name__ == "__main__":
    main()
