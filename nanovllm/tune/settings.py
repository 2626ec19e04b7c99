"""Which settings matter on a machine: the options of `LLM` that a search varies, and their values.

A table and its products. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Setting: TypeAlias = "tuple[tuple[str, Any], ...]"  # options of LLM beside the job's own, by name; () is none

_SEQS = {"cpu": (8, 32, 128), "cuda": (128, 256, 512)}  # beside the default, 1,024
_TOKENS = {"cpu": (256, 1024), "cuda": (4096, 8192, 32768)}  # beside the default; a CPU's is 2,048
_QUANTISED = {"cpu": ("int8", "int4"), "cuda": ("fp8",)}
_CACHES = {"cpu": (), "cuda": ("fp8",)}
LEAST_ROWS = 32  # of a trial: fewer say nothing
CHANGES_ANSWERS = ("quantization", "kv_cache_dtype")


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which settings are of use.

    kind: "cpu" or "cuda". num_gpus: from the first device of the job on. heads: K/V heads of the model, which
    ranks share. quantised: whether the checkpoint's weights are quantised already.
    """

    kind: str
    num_gpus: int
    heads: int
    quantised: bool

    @property
    def warms_up(self) -> bool:
        """Whether the first pass of an engine is slower, by a half and more: it captures CUDA graphs."""
        return self.kind == "cuda"


def settings(machine: Machine, given: Mapping[str, Any], change_answers: bool) -> list[Setting]:
    """All settings to try; first the job's own, then those that differ from it in fewer options.

    given: options of the command line, which no setting changes. change_answers: also those that do.
    """
    axes: list[Sequence[Setting]] = [
        _axis("max_num_seqs", _SEQS[machine.kind], given),
        _axis("max_num_batched_tokens", _TOKENS[machine.kind], given),
        list(_splits(machine, given)),
    ]
    if change_answers:
        axes.append(_axis("kv_cache_dtype", _CACHES[machine.kind], given))
        axes.append(_axis("quantization", () if machine.quantised else _QUANTISED[machine.kind], given))
    found: list[Setting] = [()]
    for axis in axes:
        found = [(*setting, *more) for setting in found for more in axis]
    return sorted(found, key=lambda each: len(dict(each)))


def _axis(name: str, values: Sequence[Any], given: Mapping[str, Any]) -> list[Setting]:
    return [(), *(((name, value),) for value in values if name not in given)]


def _splits(machine: Machine, given: Mapping[str, Any]) -> Iterator[Setting]:
    """How several GPUs share the work: as replicas of the model, ranks of it, or both."""
    yield ()
    if {"tensor_parallel_size", "data_parallel_size"} & given.keys() or machine.num_gpus < 2:
        return
    for ranks in range(1, machine.num_gpus + 1):
        if machine.num_gpus % ranks == 0 and machine.heads % ranks == 0:
            replicas = machine.num_gpus // ranks
            sizes = {"data_parallel_size": replicas, "tensor_parallel_size": ranks}
            yield tuple((name, size) for name, size in sizes.items() if size > 1)


def least_rows(setting: Setting) -> int:
    """The rows of a trial that shows what a setting does: twice as many as run at once, so that most of the
    time as many do run."""
    return max(LEAST_ROWS, 2 * int(dict(setting).get("max_num_seqs", 0)))


def changes_answers(setting: Setting) -> bool:
    return any(name in CHANGES_ANSWERS for name, _ in setting)


def flags_of(setting: Setting) -> list[str]:
    """The setting as flags of a command line."""
    return [word for name, value in setting for word in (f"--{name.replace('_', '-')}", str(value))]
