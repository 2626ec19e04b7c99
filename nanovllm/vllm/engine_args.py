"""EngineArgs and FlexibleArgumentParser: vLLM's way from a command line to `LLM(**vars(args))`.

Every option of `LLM` and every argument of vLLM is a field and a flag. Nothing is decided here: `Config` and
the tables of `vllm/arguments.py` say which values are accepted.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from nanovllm.config import Config
from nanovllm.doors import DRAFTS, Table
from nanovllm.names import KnownFields, refuse_unknown
from nanovllm.params import SamplingParams
from nanovllm.vllm.arguments import ENGINE

logger = logging.getLogger("nanovllm")
_DRAFTS: Table[Any] = Table(DRAFTS)

P = ParamSpec("P")
_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)
# vLLM's names
RENAMED = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
    "enable_return_routed_experts": "return_routed_experts",
}
_SHORT = {
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "compilation_config": "-cc",
}
_OWN = {each.name: None if each.default is MISSING else each.default for each in fields(Config)}
_TOLD = {each.name: each.metadata["option"].text.replace("%", "%%") for each in fields(Config)[1:]}
_ALSO = {"gpu_memory_utilization": "--device-memory-utilization"}  # vLLM's other flags
_SIZES = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes", "max_num_scheduled_tokens")
_UNITS = {
    unit: base**power
    for base, units in ((1000, "kmgt"), (1024, "KMGT"))
    for power, unit in enumerate(units, 1)
}
_TEXTS = ("model", "tokenizer", "revision", "tokenizer_revision", "download_dir", "hf_token")
_DEFAULTS = _OWN | dict.fromkeys(RENAMED) | {name: absent.default for name, absent in ENGINE.items()}


def _with_parameters(
    of: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    def show(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        parameters = [
            each.replace(annotation=re.sub(r"^Held\[[^,]+, (.+)\]$", r"\1", str(each.annotation)))
            for each in signature(of).parameters.values()
        ]
        owner = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        init.__doc__ = init.__doc__ or of.__doc__
        init.__signature__ = Signature([owner, *parameters])  # type: ignore[attr-defined]
        return init

    return show


takes_options = _with_parameters(Config)
"""Shows a constructor with the parameters of `Config`: to type checkers, editors and `signature`."""


class EngineArgs(KnownFields):
    """The arguments of an engine, as in vLLM: `LLM.from_engine_args(EngineArgs(model=..., dtype=...))`.

    A dataclass whose fields are the options of `LLM` and vLLM's other arguments. A value that asks for what
    this engine lacks raises ValueError with the argument's name; an unknown name raises TypeError.
    """

    if TYPE_CHECKING:

        @takes_options
        def __init__(self, model: Any = None, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        values = vars(self)
        refuse_unknown("EngineArgs", {name: values[name] for name in ENGINE}, _OWN)

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Add a flag for each field, such as `--tensor-parallel-size`; return the parser.

        A switch also has `--no-...`. Other values are JSON, or strings; a size, such as that of
        `--max-model-len`, may be 10k (10,000), 1.5m, or 4K (4,096).
        """
        group = parser.add_argument_group("engine", "options of LLM, see docs/options.md")
        for name, default in _DEFAULTS.items():
            flag = "--" + name.replace("_", "-")
            flags = [flag, *(more[name] for more in (_SHORT, _ALSO) if name in more)]
            told = f"{_TOLD.get(name, '')} (default: {default})" if name in _OWN else argparse.SUPPRESS
            # Some are a switch or a value: versions of vLLM differ.
            is_either = name in ("async_scheduling", "hf_token") or (
                name in ENGINE and ENGINE[name].neutral is None
            )
            if isinstance(default, bool):
                group.add_argument(*flags, dest=name, default=default, help=told, action="store_true")
            else:
                action = group.add_argument(*flags, dest=name, default=default, help=told, metavar="VALUE")
                action.type = _text if name in _TEXTS else _size if name in _SIZES else json_or_text
                if not is_either:
                    continue
                action.type = str if name == "hf_token" else json_or_text
                action.nargs, action.const = "?", True
            off = "--no-" + name.replace("_", "-")
            group.add_argument(off, dest=name, action="store_false", default=default, help=argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The arguments among parsed flags; other flags are left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in _DEFAULTS})


EngineArgs.__annotations__ = dict.fromkeys(_DEFAULTS, "Any")
for _name, _default in _DEFAULTS.items():
    setattr(EngineArgs, _name, _default)
dataclass(EngineArgs)


def our_options(arguments: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """The options of `Config` among the arguments of `LLM`, under our names; the others are checked."""
    found = _renamed(arguments)
    if found.get("speculative_config") == {}:
        del found["speculative_config"]
    elif found.get("speculative_config") is not None:
        _DRAFTS["checked"](found["speculative_config"])
    _check_absent({name: found.pop(name) for name in arguments if name in found and name not in known}, known)
    return found


def _check_absent(absent: Mapping[str, Any], known: list[str]) -> None:
    """Check options that `Config` does not have. One of another library may be accepted, with a warning."""
    for name in absent:
        if name in SamplingParams.__dataclass_fields__ and name not in ENGINE:
            raise TypeError(f"LLM() got {name!r}; pass it to generate() as SamplingParams({name}=...)")
    refuse_unknown("LLM", absent, known)
    for name, value in absent.items():
        is_nothing = isinstance(value, (type(None), list, tuple, dict, str, set)) and not value
        if ENGINE[name].neutral is None and ENGINE[name].advice and not is_nothing:
            logger.warning(f"{name}={value!r} has no effect here; {ENGINE[name].advice}")


def _renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under our names. ValueError if both names of an option are given and differ."""
    found = {name: value for name, value in arguments.items() if name not in RENAMED}
    for name in RENAMED.keys() & arguments.keys():
        ours, value = RENAMED[name], arguments[name]
        if value is None:
            continue
        if found.get(ours) not in (None, value):
            raise ValueError(f"{name}={value!r} and {ours}={found[ours]!r} are one option; pass one of them")
        found[ours] = value
    return found


def json_or_text(text: str) -> Any:
    """The value of a flag: JSON, or a string that is none; Python's None, True and False too."""
    try:
        return json.loads(text)
    except ValueError:
        return {"None": None, "True": True, "False": False}.get(text, text)


def _text(text: str) -> str | None:
    return None if text in ("", "None") else text


def _size(text: str) -> Any:
    """A number with a unit, in vLLM's form; any other text as `json_or_text`."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text):
        size = Decimal(found[1]) * _UNITS[found[2]]
        if size % 1 or (found[2].isupper() and "." in found[1]):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; write its digits, such as 10240")
        return int(size)
    return "auto" if text.lower() == "auto" else json_or_text(text)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's parser with vLLM's further forms of flags, and with `--config FILE.yaml`, whose lines
    `max-model-len: 64` are flags that stand before all others, so that a command line's own flags win.

    `--max_model_len 5` is `--max-model-len 5`. `--hf-overrides.rope_theta 5 --hf-overrides.a.b 6` is
    `--hf-overrides '{"rope_theta": 5, "a": {"b": 6}}'`, also in a short form, as `-cc.mode=3`;
    `-O2` and `-O 2` are `--optimization-level 2`. A key that ends in + adds its
    values, separated by commas, to a list. `--disable-x` is `--no-enable-x`, and the other way round.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = self._with_file(list(sys.argv[1:] if args is None else args))
        return super().parse_known_args(self._plain(given), namespace)

    def load_config_file(self, file_path: str) -> list[str]:
        """The flags that a YAML file states, one key a flag; a value of true is a switch, of false its
        `--no-...`, where there is one. ValueError for another kind of file, OSError if it cannot be read."""
        import yaml  # type: ignore[import-untyped]

        if Path(file_path).suffix not in (".yaml", ".yml"):
            raise ValueError(f"--config {file_path} must be a file that ends in .yaml or .yml")
        try:
            values = yaml.safe_load(Path(file_path).read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"--config {file_path} is no YAML: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"--config {file_path} must hold lines of the form 'flag: value'")
        flags: list[str] = []
        for key, value in values.items():
            name = "--" + str(key).replace("_", "-")
            if value is True:
                flags.append(name)
            elif value is False:
                off = "--no-" + name[2:]
                flags += [off] if off in self._option_string_actions else []
            elif isinstance(value, list):
                flags += [name, *map(str, value)] if value else []
            else:
                flags += [name, json.dumps(value) if isinstance(value, dict) else str(value)]
        return flags

    def _with_file(self, args: list[str]) -> list[str]:
        """The arguments with those of a `--config` file, after a subcommand and before all flags."""
        places = [place for place, arg in enumerate(args) if arg.partition("=")[0] == "--config"]
        if not places:
            return args
        if len(places) > 1:
            self.error("--config may be given once")
        place = places[0]
        _, equals, path = args[place].partition("=")
        if not equals:
            if place + 1 == len(args):
                self.error("--config needs a YAML file")
            path = args[place + 1]
        rest = args[:place] + args[place + (1 if equals else 2) :]
        first = next((number for number, arg in enumerate(rest) if arg.startswith("-")), len(rest))
        return rest[:first] + self.load_config_file(path) + rest[first:]

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's; `deprecated` has an effect from Python 3.13 on."""
        if sys.version_info < (3, 13):
            options.pop("deprecated", None)
        return super().add_argument(*names, **options)

    def _long(self, flag: str) -> str:
        """The long form of a short flag, if it has one."""
        action = self._option_string_actions.get(flag)
        names = [] if action is None else action.option_strings
        return next((name for name in names if name.startswith("--")), flag)

    def _switch(self, flag: str) -> str:
        """`--no-enable-x` for `--disable-x`, and `--no-disable-x` for `--enable-x`, if there is only that."""
        for this, other in (("--enable-", "--no-disable-"), ("--disable-", "--no-enable-")):
            off = other + flag.removeprefix(this)
            if flag.startswith(this) and flag not in self._option_string_actions:
                return off if off in self._option_string_actions else flag
        return flag

    def _plain(self, args: Sequence[str]) -> list[str]:
        """The arguments in the forms that argparse reads."""
        found: list[str] = []
        values: dict[str, dict[str, Any]] = {}  # of flags with dots
        rest = list(args)
        while rest:
            arg = rest.pop(0)
            if arg == "-O" and rest and rest[0].isdigit():
                arg += rest.pop(0)
            if arg == "--":
                return [*found, *_json_flags(values), arg, *rest]
            name, equals, value = arg.partition("=")
            if keyed := re.fullmatch(r"(-\w+)(\.[A-Za-z].*)", name):
                name = self._long(keyed[1]) + keyed[2]
            if name.startswith("--"):
                name = name if name in self._option_string_actions else self._switch(_dashed(name))
                if "." in name:
                    value = value if equals or not rest else rest.pop(0)
                    flag, *keys = name.split(".")
                    _put(values.setdefault(flag, {}), keys, json_or_text(value))
                    continue
                arg = name + equals + value
            elif level := re.fullmatch(r"-O=?(\d)", arg):
                found.append("--optimization-level")
                arg = level[1]
            found.append(arg)
        return [*found, *_json_flags(values)]


def _dashed(name: str) -> str:
    """A flag with dashes; the keys after a dot stay."""
    flag, dot, keys = name.partition(".")
    return "--" + flag[2:].replace("_", "-") + dot + keys


def _put(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = values.setdefault(key, {})
        values = inner if isinstance(inner, dict) else values.setdefault(key, {})
    if keys[-1].endswith("+"):
        own = values.setdefault(keys[-1].removesuffix("+"), [])
        own.extend(value.split(",") if isinstance(value, str) else [value])
    else:
        values[keys[-1]] = value


def _json_flags(values: Mapping[str, Any]) -> list[str]:
    return [each for flag, value in values.items() for each in (flag, json.dumps(value))]
