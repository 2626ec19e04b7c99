"""Only inside.py and inside_kinds.py reach behind the public names of the package; read with `ast`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
INSIDE = ("inside.py", "inside_kinds.py", "test_inside.py")
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name not in INSIDE)
# Private names of Python, torch, triton, multiprocessing, IPython and ray.
OTHERS = {"_asdict", "_replace", "_exit", "_getframe"} | {"_C", "_autograd", "_profiler_enabled", "_schema"}
OTHERS |= {"_semlock", "_repr_svg_", "_logical_plan", "_patch_lang", "_args_from_interpreter_flags"}
OTHERS |= {"_get_np_dtype"}
ENGINES = r"\b(?:llm|engine|second)\._[a-z]\w*"  # in scripts for other processes
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "object"}  # "object": of mock.patch


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.AST) -> set[str]:
    """The names that the classes of a file define; they may use them of `self`."""
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and name_of(node.value) == "self"
        and isinstance(node.ctx, ast.Store)
    }
    return stored | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """What reads, sets or imports a private name of something else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OTHERS:
            if not (name_of(node.value) in ("self", "cls") and node.attr in own):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from (f"{node.lineno}: {ast.unparse(node)}" for name in names if is_private(name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanovllm"):
            names = [alias.name for alias in node.names]
            yield from (f"{node.lineno}: {name} of {node.module}" for name in names if is_private(name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: {found}" for found in re.findall(ENGINES, node.value))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_other_file_reads_a_private_name(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert list(private_uses(tree, own_names(tree))) == [], "give tests/inside.py a function for it"


@pytest.mark.parametrize(
    "line",
    [
        "llm._runner.model",
        "del llm._runner",
        "llm._scheduler = None",
        "super()._step()",
        "self._runner",
        "patch.setattr(llm, '_step', None)",
        "mock.patch.object(matmul, '_TILES', ())",
        "getattr(llm, '_runner')",
        "from nanovllm.kernels.matmul import Tile, _TILES",
        "script = 'print(llm._runner)'",
    ],
)
def test_each_way_is_found(line: str) -> None:
    assert len(list(private_uses(ast.parse(line), {"_own"}))) == 1


@pytest.mark.parametrize(
    "line", ["self._own", "row._replace(a=1)", "os._exit(0)", "llm.__class__", "_, x = y"]
)
def test_what_is_allowed(line: str) -> None:
    assert not list(private_uses(ast.parse(line), {"_own"}))
