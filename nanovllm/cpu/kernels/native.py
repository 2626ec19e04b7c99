"""Compiles functions to machine code, once for a CPU: numba turns Python into LLVM's language, and the object
file is kept on disk. Later starts load that with llvmlite and import no numba.

Knows no kernel, no thread and no tensor.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.checking import CHECK_SYMBOL, CHECKED, check_code
from nanovllm.cpu.kernels.quick_typing import typed_quickly

logger = logging.getLogger("nanovllm")

_Function = TypeVar("_Function", bound=Callable[..., Any])
CACHE_VARIABLE = "NANOVLLM_CACHE_DIR"
_TARGETS = {
    "amx": "sapphirerapids",
    "avx512_bf16": "sapphirerapids",
    "avx512": "skylake-avx512",
    "avx2": "haswell",
    "generic": "generic",
}
_lock = RLock()  # LLVM compiles in one thread at a time, and no process forks meanwhile
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_DIGEST = 32  # bytes at the start of a file
_MOST_BYTES = 2**26  # of a file; a larger one is none of ours
_said: list[str] = []  # the line about compiling was printed


def cache_folder() -> Path | None:
    """The folder of compiled kernels; None if it cannot be written, or if other users could write to it."""
    asked = os.environ.get(CACHE_VARIABLE)
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "nanovllm" / "kernels"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(folder.stat()):
            logger.warning("compiled kernels are not kept: other users can write to %s, or own it", folder)
            return None
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # a home that does not exist, a disk that is full or read-only
        return None


def _is_own(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and no other can write to it. Code is loaded from it."""
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _read(path: Path) -> bytes | None:
    """The object code that `_write` wrote; None if there is none, or if it is damaged or not this user's."""
    try:
        with open(
            os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)), "rb"
        ) as file:
            found = os.fstat(file.fileno())
            if not (stat.S_ISREG(found.st_mode) and _is_own(found) and found.st_size < _MOST_BYTES):
                return None
            digest, code = file.read(_DIGEST), file.read()
    except OSError:
        return None
    return code if digest == hashlib.sha256(path.name.encode() + code).digest() else None


def function_address(make: Callable[..., Callable[..., Any]], *variant: object, results: str = "void") -> int:
    """The address of the compiled function `make(*variant)`, whose arguments are all int64.

    As numba calls functions: int32 (int64 *result, void **unused, int64 ...). results: "void" or "int64".
    """
    return _found(make, variant, results, isa.level())[0]


def address_and_note(make: Callable[..., Callable[..., Any]], *variant: object) -> tuple[int, str]:
    """As `function_address`, and the attribute `note` of the function, which is kept with its code: a start
    that finds the code need not call `make`."""
    return _found(make, variant, "void", isa.level())


@cache
def _found(
    make: Callable[..., Any], variant: tuple[object, ...], results: str, level: str
) -> tuple[int, str]:
    with _lock:
        symbol, path = _place(make, variant, level)
        content = None if path is None else _read(path)
        if content is None:
            note, module, machine = _module(make, variant, results, symbol, level)
            content = note.encode() + b"\n" + bytes(machine.emit_object(module))
            if path is not None:
                _write(path, content)
        first, _, code = content.partition(b"\n")
        return _load(code, symbol), first.decode()


def _place(make: Callable[..., Any], variant: tuple[object, ...], level: str) -> tuple[str, Path | None]:
    """The name of a compiled function, and its file; None if none can be kept."""
    what = "-".join(map(_name, (make, *variant)))
    symbol = "k" + hashlib.sha256(f"{_sources()} {level} {what}".encode()).hexdigest()[:32]
    folder = cache_folder()
    return symbol, None if folder is None else folder / f"{symbol}.o"


def is_kept(kernel: tuple[Any, ...]) -> bool:
    """Whether the code of a kernel, its `make` and the variant, is on the disk, for the level of now."""
    path = _place(kernel[0], kernel[1:], isa.level())[1]
    return path is not None and _read(path) is not None


def _name(part: object) -> str:
    """What identifies a function, or another value of a variant. `_sources` knows the code of this folder."""
    if not inspect.isfunction(part):
        return str(part)
    name = f"{part.__module__}.{part.__qualname__}"
    if part.__module__.startswith(__package__ + "."):
        return name
    return name + hashlib.sha256(Path(inspect.getfile(part)).read_bytes()).hexdigest()


def assembly(make: Callable[..., Any], variant: tuple[object, ...], results: str, level: str) -> str:
    """The machine code of `make(*variant)` as text, for CPUs of `level`, perhaps not this one."""
    _, module, machine = _module(make, variant, results, "kernel", level)
    return str(machine.emit_assembly(module))


def jit(function: _Function) -> _Function:
    """A function that kernels call, and Python never does; compiled with each kernel."""
    from numba import njit

    any_njit: Any = njit  # whose types lack two of the options
    compiled: _Function = any_njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
    return compiled


def _module(
    make: Callable[..., Any], variant: tuple[object, ...], results: str, symbol: str, level: str
) -> tuple[str, Any, Any]:
    """The function's note, its code in LLVM's language, and a machine that makes machine code of it."""
    from llvmlite import binding
    from numba import types

    say_once()
    with _numba_for(level), isa.compiling_for(level), typed_quickly():
        function = make(*variant)
        kinds = tuple(types.int64 for _ in range(function.__code__.co_argcount))
        signature = getattr(types, results)(*kinds)
        compiled: Any = jit(function)
        compiled.compile(signature)
    (entry,) = compiled.overloads.values()
    module = binding.parse_assembly(compiled.inspect_llvm(kinds))
    for each in module.functions:
        if each.name == entry.fndesc.llvm_func_name:
            each.name = symbol
        elif not each.is_declaration:
            each.linkage = "internal"
    machine = _machine(level)
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()  # numba's own functions, which nothing calls
    passes.add_strip_dead_prototype_pass()
    passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
    return getattr(function, "note", ""), module, machine


@contextmanager
def _numba_for(level: str) -> Iterator[None]:
    """Let numba generate code for CPUs of `level`, perhaps not this one."""
    from numba.core import config
    from numba.core.registry import cpu_target

    context = cpu_target.target_context
    own = context._internal_codegen
    names = {} if level == isa.level() else {"CPU_NAME": _TARGETS[level], "CPU_FEATURES": ""}
    before = {name: getattr(config, name) for name in names}
    try:
        for name, value in names.items():
            setattr(config, name, value)
        context._internal_codegen = _code_generator(level)
        yield
    finally:
        context._internal_codegen = own
        for name, value in before.items():
            setattr(config, name, value)


@cache
def _code_generator(level: str) -> Any:
    """numba's, without machine code for each function that a kernel calls: the kernel's own contains them."""
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen

    class Library(JITCodeLibrary):  # type: ignore[misc]
        def get_pointer_to_function(self, name: str) -> int:
            self._ensure_finalized()
            return 0

        def _finalize_specific(self) -> None:
            """There is nothing to load."""

    class CodeGenerator(JITCPUCodegen):  # type: ignore[misc]
        _library_class = Library

        def _add_module(self, module: Any) -> None:
            """It is never run."""

        def set_env(self, name: str, environment: Any) -> None:
            """Only Python's own functions have an environment."""

    return CodeGenerator(f"nanovllm for {level}")


def say_once(count: int | None = None) -> None:
    """Once: that kernels are compiled, and how many, if that is known."""
    if not _said:
        _said.append("compiling")
        what = "kernels" if count is None else f"{count} kernels"
        logger.warning(
            "compiling %s for this CPU: some seconds, once; later starts read them from disk", what
        )


def _write(path: Path, code: bytes) -> None:
    """Write a file that another process may read or write at the same time."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(hashlib.sha256(path.name.encode() + code).digest() + code)
        os.replace(file.name, path)
    except OSError as error:  # a full disk: the next start compiles again
        logger.info("the kernel %s is not kept: %s", path, error)


@cache
def _sources() -> str:
    """What the code of a kernel depends on, besides its name and level."""
    from llvmlite import binding

    folder = Path(__file__).parent
    texts = [path.read_bytes() for path in sorted([*folder.glob("*.py"), Path(isa.__file__)])]
    names = "numba", "llvmlite"
    host = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    known = [*map(version, names), *host, CHECKED]
    return hashlib.sha256(b"".join(texts) + repr(known).encode()).hexdigest()


@cache
def _machine(level: str) -> Any:
    """A target machine for CPUs of `level`: this one, if the level is its own."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    own = next(name for name, needs in isa.NEEDS.items() if needs <= isa.cpu_features())
    if level != own:
        cpu, features = _TARGETS[level], ""
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True)


@cache
def _engine() -> Any:
    from llvmlite import binding

    module = binding.parse_assembly(check_code() if CHECKED else "")
    engine = binding.create_mcjit_compiler(module, _machine(isa.level()))
    if CHECKED:
        engine.finalize_object()
        binding.add_symbol(CHECK_SYMBOL, engine.get_function_address(CHECK_SYMBOL))
    return engine


def _load(code: bytes, symbol: str) -> int:
    from llvmlite import binding

    engine = _engine()
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))
