"""The instruction set of the CPU that kernels use. Chosen at the first question; imports no compiler before.

The environment variable NANOVLLM_CPU_ISA forces a level, so that every one is tested on one machine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec

from nanovllm.device import cpu_kernels

logger = logging.getLogger("nanovllm")

VARIABLE = "NANOVLLM_CPU_ISA"
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_MATRICES = {"amx-tile", "amx-bf16", "amx-int8"}
MATRIX_STEP = 32  # values of K that AMX multiplies at once
MATRIX_CONFIG = 64  # bytes of memory for the sizes of its tiles
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # numbers of Linux on x86-64
_BF16 = _AVX512 | {"avx512bf16", "avx512vnni"}
# Fastest first, with the features that LLVM must find in the CPU. "generic" is plain loops, which LLVM turns
# into the vectors of any CPU. "torch" uses no kernels of ours.
NEEDS: dict[str, set[str]] = {
    "amx": _BF16 | {"amx-tile", "amx-bf16"},
    "avx512_bf16": _BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": set(),
}
LEVELS = (*NEEDS, "torch")
HINT = 'pip install "nanovllm[cpu]" brings kernels for this CPU, which are 2 to 5 times faster than torch'


@lru_cache
def cpu_features() -> frozenset[str]:
    """The features of this CPU, as LLVM names them; none without the package llvmlite."""
    if find_spec("llvmlite") is None:
        return frozenset()
    from llvmlite.binding import get_host_cpu_features

    found = {name for name, there in get_host_cpu_features().items() if there}
    return frozenset(found if found.isdisjoint(_MATRICES) or _may_use_matrices() else found - _MATRICES)


def _may_use_matrices() -> bool:
    """Ask Linux to let this process, and its children, use AMX's registers; they are too large for all."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    return libc is not None and libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


_other: ContextVar[str] = ContextVar("other_level", default="")


@contextmanager
def compiling_for(level: str) -> Iterator[None]:
    """Within this block `level` is that of the machine that code is compiled for, perhaps another one."""
    token, answer = _other.set(level), cpu_kernels.set(None)
    try:
        yield
    finally:
        cpu_kernels.reset(answer)
        _other.reset(token)


def level() -> str:
    """The level, one of LEVELS. ValueError if the forced one does not exist, or if this CPU lacks it."""
    return _other.get() or _own_level()


def is_own() -> bool:
    """Whether the level is that of a new process."""
    return not _other.get()


@lru_cache
def _own_level() -> str:
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in LEVELS:
        raise ValueError(f"{VARIABLE}={forced}: there is no such level; use one of {', '.join(LEVELS)}")
    if find_spec("numba") is None:
        if forced and forced != "torch":
            raise ValueError(f"{VARIABLE}={forced} needs the package numba; {HINT}")
        return "torch"
    if forced and (missing := NEEDS.get(forced, set()) - cpu_features()):
        raise ValueError(f"{VARIABLE}={forced}: this CPU has no {', '.join(sorted(missing))}")
    return forced or next(name for name, needs in NEEDS.items() if needs <= cpu_features())


def forget() -> None:
    """Ask for the level again, as a new process would."""
    cpu_kernels.set(None)
    _own_level.cache_clear()
    cpu_features.cache_clear()
    say_what_is_missing.cache_clear()


def described(threads: int) -> str:
    """The level and the number of threads, for people; or why there is none."""
    try:
        own = level()
    except ValueError as error:
        return f"none: {error}"
    if own != "torch":
        return f"{own}, {count_of(threads)}"
    return f"none, torch's {count_of(threads)}; {HINT if find_spec('numba') is None else f'{VARIABLE}=torch'}"


def count_of(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


@lru_cache
def say_what_is_missing() -> None:
    """Once: what would make this CPU faster. ValueError as in `level`."""
    if level() == "torch" and find_spec("numba") is None:
        logger.warning("%s", HINT)


def has_kernels() -> bool:
    """Whether the CPU's kernels run here."""
    return level() != "torch"


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32."""
    return level() in ("amx", "avx512_bf16")


def has_matrices() -> bool:
    """Whether kernels use AMX, which multiplies tiles of bfloat16."""
    return level() == "amx"
