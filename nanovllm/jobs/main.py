"""The program `nanovllm`: its command line, with argparse; it runs a command and returns the exit code.

The options of `LLM` become flags. Checks each argument on its own. Imports a command's module only on use:
`run` needs torch, and a wrong argument should not wait for it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import multiprocessing.util
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from nanovllm import __version__
from nanovllm.config import Option, kind_of
from nanovllm.jobs import arguments
from nanovllm.jobs.errors import FAILED, READER_LEFT, REFUSED, JobRefusedError, Signals, caught_signals
from nanovllm.jobs.formats import ENDINGS, SOURCES
from nanovllm.jobs.job import engine_fields
from nanovllm.jobs.params import make_params
from nanovllm.jobs.sources import QUOTINGS
from nanovllm.jobs.window import ROWS_A_SLOT, WINDOW_ROWS
from nanovllm.names import nearest
from nanovllm.params import SamplingParams
from nanovllm.tune.arguments import add_tune
from nanovllm.vllm.arguments import ENGINE, elsewhere

_MODULES = {  # of the commands
    **{name: f"jobs.{name}" for name in ("run", "check", "doctor")},
    "version": "jobs.about",
    "tune": "tune.command",
}
# Python's words in texts about options, and those of a command line.
_REWORDED = (
    (r", or a `?(torch|transformers)[.\w ]*\w`?", ""),
    ("`None` as a value", "null as a value"),
    (r"(^|\. )`None`", r"\1The default"),
    (r"`(\w+)`", lambda match: _as_flag(match[1])),
    ("`", ""),
    ("%", "%%"),
)
_ENDING_NAMES = ", ".join(ENDINGS)
EPILOG = """exit codes:
  0    every row has an answer
  1    every row was run, and some are error rows
  2    nothing was run: a wrong argument, or the output belongs to another job or to other rows
  3    stopped by --max-errors
  4    the disk, the device or the engine failed
  129  stopped by SIGHUP, because the terminal was closed
  130  stopped by Ctrl-C; a second one does not wait for the engine to close
  141  the reader of standard output left
  143  stopped by SIGTERM
After 4, 129, 130 and 143, and after kill -9, the same command resumes the job; after 3 it needs a larger
--max-errors, or --retry-errors."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without the program's name; return the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed; without this the next opened file gets its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for as long as the process lives)
    if isinstance(sys.stdout, TextIOWrapper):  # file names may not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parse_args(argv)
    with caught_signals() as signals:
        code = _code(args, signals)
        signals.hold()
        if signals.seen:
            leave(code)
        return code


def _code(args: argparse.Namespace, signals: Signals) -> int:
    """Run a command; return its exit code."""
    try:
        module = importlib.import_module(f"nanovllm.{_MODULES[args.command]}")
        signals.check()
        code: int = getattr(module, args.command)(args)
        sys.stdout.flush()
    except JobRefusedError as error:
        if signals.seen:  # a library that is interrupted may raise anything
            return signals.end[0]
        print(f"nanovllm {args.command}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return signals.end[0]
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at exit is silent
        return READER_LEFT
    except Exception:  # Python's own exit code, 1, has another meaning
        if signals.seen:
            return signals.end[0]
        with suppress(OSError):
            traceback.print_exc()
        return FAILED
    return code


def leave(code: int) -> NoReturn:
    """End this process and its children at once. Python's own exit may wait for an engine whose close was
    interrupted, and a further signal would change the code."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if multiprocessing.parent_process() is None:  # else the folder is that of the parent
        with suppress(OSError):  # the folder of its sockets, which Python's own exit removes
            shutil.rmtree(multiprocessing.util.get_temp_dir())
    os._exit(code)


# -- arguments ----------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; SystemExit with code 2 if it is wrong. `command` is the name of the command."""
    given = sys.argv[1:] if argv is None else argv
    parser, commands = _parser("--help-options" in given)
    if not given:
        parser.print_help()
        parser.exit()
    if not given[0].startswith("-") and given[0] not in commands.choices:
        parser.error(f"there is no command {given[0]!r}; {nearest(given[0], commands.choices)}")
    # Before argparse says what else is missing. vLLM's `chat` is a command, ours a flag.
    for each in given[1:]:
        name = _name(each)
        if each.startswith("--") and name != "chat" and (write := elsewhere(name, as_flag=True)) is not None:
            commands.choices.get(given[0], parser).error(f"unrecognized argument: {each}; {write}")
    args, unknown = parser.parse_known_args(given)
    if unknown:
        flags = ["--" + name.replace("_", "-") for name in (*vars(args), *engine_fields())]
        hint = _hint(unknown[0].partition("=")[0], flags, args.command)
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    args.given = list(given)
    if (n := getattr(args, "n", None)) is not None:
        args.sampling = {"n": n, **args.sampling}
        if args.sampling["n"] != n:
            commands.choices[args.command].error(f"--n is {n}, and in --sampling it is another; keep one")
    return args


def _parser(explained: bool) -> tuple[argparse.ArgumentParser, Any]:
    """The parser, and those of its commands. explained: the help has the options of `LLM`."""
    parser = argparse.ArgumentParser(prog="nanovllm", description="Offline batch inference.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    run = commands.add_parser(
        "run",
        help="answer every row of files",
        usage="nanovllm run INPUT ... -o OUTPUT --model MODEL [option ...]",
        description="Answer every row of files. docs/jobs.md has an example of each option.",
        epilog=EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    run.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=f"files, folders or patterns ({_ENDING_NAMES}), or - (stdin)",
    )
    run.add_argument(
        "-o", "--output", type=Path, required=True, help="a file with such an ending, or - (stdout)"
    )
    run.add_argument("--model", required=True, help="a folder or a Hugging Face hub id")
    _add_row_arguments(run, explained)
    _add_job_arguments(run)
    run.set_defaults(echo=None)
    _add_engine_arguments(run, explained)
    check = commands.add_parser(
        "check",
        help="say what is wrong with files, without running anything",
        usage="nanovllm check FILE ... [option ...]",
        formatter_class=raw,
        allow_abbrev=False,
    )
    check.add_argument("inputs", nargs="+", metavar="FILE", help="a file, a folder or a pattern")
    check.add_argument("--model", help="also check the lengths of prompts, with this model's tokenizer")
    _add_row_arguments(check, explained)
    _add_engine_arguments(check, explained)
    commands.add_parser("version", help="print versions, devices and attention backends")
    about = "say what runs here, and whether a model can, before anything is loaded"
    doctor = commands.add_parser("doctor", help=about, description=about, allow_abbrev=False)
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="a folder or a Hugging Face hub id")
    _add_engine_arguments(doctor, explained)
    tune = add_tune(commands)
    _add_row_arguments(tune, explained)
    _add_engine_arguments(tune, explained)
    return parser, commands


def _name(flag: str) -> str:
    """The name of `--some-name=VALUE` in Python."""
    return flag.removeprefix("--").partition("=")[0].replace("-", "_")


def _hint(flag: str, flags: Sequence[str], command: str) -> str:
    """What to write instead of an unknown flag."""
    name = _name(flag)
    if name in SamplingParams.__dataclass_fields__:
        return f"it is a sampling parameter: write --sampling {name}=VALUE"
    if name in ENGINE:
        advice = ENGINE[name].advice or "it has no effect here; leave it out"
        return f"this option of vLLM is not supported; {advice}"
    near = difflib.get_close_matches(flag, flags, n=1)
    return f"did you mean {near[0]}?" if near else f"`nanovllm {command} --help` lists all arguments"


def parse_sampling(text: str) -> dict[str, Any]:
    """Return fields of SamplingParams from `name=value,...` or a JSON object; values are JSON or strings.

    argparse.ArgumentTypeError for a wrong value.
    """
    try:
        values = _object(text) if text.startswith("{") else dict(map(_pair, filter(None, text.split(","))))
        make_params(values)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return values


def _object(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no JSON object ({error}); write name=value,... or '{{\"temperature\": 0}}'"
        ) from None


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(
            f'{text!r} is no name=value; write values with commas as JSON: \'{{"stop": ["a", "b"]}}\''
        )
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), {"None": None, "True": True, "False": False}.get(value, value)


def _add_row_arguments(parser: argparse.ArgumentParser, explained: bool) -> None:
    parser.add_argument("--help-options", action="help", help="show this, and the options of LLM")
    rows = parser.add_argument_group("rows")
    rows.add_argument("--format", choices=("auto", *SOURCES), default="auto", help="default: by the ending")
    help_quoting = (
        "minimal: a field in quotes may span lines; none: quotes are text (default: of CSV minimal, of "
    )
    help_quoting += "TSV none unless a field shows doubled quotes)"
    rows.add_argument("--quoting", choices=QUOTINGS, help=help_quoting)
    help_delimiter = "between fields of CSV (default: , and of TSV a tab)"
    rows.add_argument("--delimiter", type=arguments.delimiter, metavar="CHAR", help=help_delimiter)
    rows.add_argument("--id-column", metavar="NAME", help="default: id or custom_id, where there is one")
    help_columns = "columns that answers repeat: all, none, or a,b (default: all)"
    rows.add_argument("--columns", type=arguments.columns, metavar="NAMES", help=help_columns)
    rows = parser.add_argument_group("prompts")
    prompt = rows.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-column", metavar="NAME", help="of strings (default: prompt, or messages)")
    help_template = "a prompt with columns in braces, or @FILE"
    prompt.add_argument("--template", type=arguments.text_or_file, metavar="TEXT", help=help_template)
    prompt.add_argument("--messages-column", metavar="NAME", help="a conversation for the chat template")
    rows.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message for the chat template"
    )
    help_system = "the system message of conversations without one, or @FILE"
    rows.add_argument("--system", type=arguments.text_or_file, metavar="TEXT", help=help_system)
    rows.add_argument(
        "--chat-template-kwargs",
        type=arguments.json_object,
        default={},
        metavar="JSON",
        help="variables of the template",
    )
    rows.add_argument(
        "--sampling",
        type=parse_sampling,
        default={},
        metavar="NAME=VALUE,...",
        help="fields of SamplingParams, or a JSON object; above the model's defaults, beneath a row's "
        "`sampling_params`",
    )
    help_choice = "answer with one of these, and its score; or a JSON list"
    rows.add_argument("--choice", type=arguments.choices, metavar="A,B,C", help=help_choice)
    rows.add_argument(
        "--n", type=arguments.positive, metavar="N", help="answers to each row, as --sampling n=N"
    )


def _add_job_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job")
    job.add_argument("--limit", type=arguments.positive, metavar="N", help="run the first N rows only")
    job.add_argument(
        "--shard", type=arguments.shard, metavar="I/N", help="run the I-th of N parts, in the input's order"
    )
    job.add_argument("--extend", action="store_true", help="answer the new rows of an input that has grown")
    job.add_argument(
        "--max-errors", type=arguments.count, metavar="N", help="stop at more error rows than this"
    )
    job.add_argument("--retry-errors", action="store_true", help="run the error rows of the output again")
    job.add_argument("--ordered", action="store_true", help="run and write the rows in the input's order")
    default = f"{WINDOW_ROWS:,}, or {ROWS_A_SLOT} times --max-num-seqs, if that is more"
    help_window = f"rows that are reordered together (default: {default})"
    job.add_argument("--window", type=arguments.positive, metavar="N", help=help_window)
    help_safe = "put ' before a cell of CSV that a spreadsheet would run"
    job.add_argument("--csv-safe", action="store_true", help=help_safe)
    job.add_argument(
        "--report", type=arguments.page, metavar="FILE", help="write a page about the job, .html"
    )


def _add_engine_arguments(parser: argparse.ArgumentParser, explained: bool) -> None:
    """A flag for every option of `LLM`; options that are not given are missing in the result. Not explained,
    the help has only their names."""
    flags = {name: "--" + name.replace("_", "-") for name in engine_fields()}
    names = textwrap.fill(" ".join(flags.values()), 78, break_long_words=False, break_on_hyphens=False)
    brief = f"--help-options explains them, and docs/options.md.\n{names}"
    title = "options of LLM (docs/options.md)" if explained else "options of LLM"
    engine = parser.add_argument_group(title, None if explained else brief)
    for name, field in engine_fields().items():
        kind = kind_of(field)
        shown = "" if field.default is None else f" (default: {field.default})"
        text = text_of(field.metadata["option"]) + shown if explained else argparse.SUPPRESS
        if kind == "bool":
            action = argparse.BooleanOptionalAction
            engine.add_argument(flags[name], default=argparse.SUPPRESS, help=text, action=action)
        else:
            read = str if kind == "str" else arguments.json_or_text
            engine.add_argument(flags[name], default=argparse.SUPPRESS, help=text, type=read, metavar="VALUE")


def text_of(option: Option) -> str:
    """What is said of an option, without values that a command line cannot pass."""
    text = option.text
    for pattern, replacement in _REWORDED:
        text = re.sub(pattern, replacement, text)
    return text


def _as_flag(name: str) -> str:
    """The flag of an option that a text names."""
    return "--" + name.replace("_", "-") if name in engine_fields() else name
