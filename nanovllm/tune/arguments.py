"""The flags of `nanovllm tune` that other commands do not have. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any


def add_tune(commands: Any) -> argparse.ArgumentParser:
    """Add the command; return its parser, which still needs the flags of rows and of `LLM`."""
    about = "try the settings of LLM on a sample of rows, and print the fastest command"
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help=about,
        usage="nanovllm tune MODEL INPUT ... [option ...]",
        description=f"{about[0].upper()}{about[1:]}. Flags of rows are those of the job. An option of LLM "
        "that is given holds for all trials. Ctrl-C ends the search and prints the best so far.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a Hugging Face hub id")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders or patterns of rows")
    search = parser.add_argument_group("the search")
    search.add_argument(
        "--minutes", type=_minutes, default=10.0, metavar="N", help="of the whole search (default: 10)"
    )
    search.add_argument(
        "--change-answers",
        action="store_true",
        help="also try what changes answers: quantised weights, an FP8 KV cache",
    )
    return parser


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= 10_000:
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, not {text!r}")
    return minutes
