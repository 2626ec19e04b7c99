"""Who may import whom, read from the source with `ast`: the table of docs/design.md, section 2."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# module (or package) -> (tower, level). "plan" never imports torch, "compute" never sees a Sequence, "both"
# may.
LEVELS = {
    "vllm_arguments": ("base", -1),
    "errors": ("base", 0),
    "config": ("base", 0),
    "sampling_params": ("base", 0),
    "outputs": ("base", 0),
    "engine.interrupts": ("base", 0),
    "engine.lifecycle": ("base", 1),
    "engine.batch": ("plan", 1),
    "engine.sequence": ("plan", 1),
    "engine.prompts": ("plan", 1),
    "engine.conversations": ("plan", 2),
    "engine.texts": ("plan", 2),
    "engine.channel": ("plan", 2),
    "engine.watch": ("plan", 2),
    "engine.progress": ("plan", 2),
    "engine.block_manager": ("plan", 2),
    "engine.scheduler": ("plan", 3),
    "device": ("compute", 1),
    "distributed": ("compute", 3),
    "kernels": ("compute", 2),
    "attention": ("compute", 3),
    "layers": ("compute", 4),
    "models": ("compute", 5),
    "engine.cuda_graph": ("compute", 6),
    "engine.memory": ("compute", 6),
    "engine.overlap": ("compute", 6),
    "engine.shared_prefixes": ("compute", 6),
    "engine.staging": ("compute", 2),
    "engine.model_runner": ("compute", 7),
    "engine.worker": ("both", 8),
    "engine.llm_engine": ("both", 9),
    "llm": ("both", 10),
    "": ("both", 11),  # nanovllm/__init__.py
}
PACKAGES = {"kernels", "attention", "layers", "models"}  # inside one of them, files import each other freely
SHARED_VALUES = {"engine.batch"}  # what crosses between the towers
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.stat().st_size)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def entry_of(module: str) -> str:
    """The line of the table that a module stands under."""
    head = module.split(".")[0]
    return head if head in PACKAGES else module


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node, node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_imports(path: Path) -> None:
    module = module_of(path)
    if module == "demo_model":
        return
    tree = ast.parse(path.read_text())
    tower, level = LEVELS[entry_of(module)]
    for node, name in imports(tree):
        if name.split(".")[0] == "torch":
            assert tower in ("compute", "both"), f"{module} is planned without torch"
            if name.startswith("torch.distributed"):
                assert module == "distributed"
        if name.split(".")[0] == "triton":
            assert entry_of(module) == "kernels"
        if name.split(".")[0] != "nanovllm":
            continue
        target = name.removeprefix("nanovllm").removeprefix(".")
        if module == "" and target == "llm":
            continue  # the one lazy import: `import nanovllm` stays cheap
        assert node in tree.body, f"{module}: the import of {name} is hidden in a block"
        if entry_of(target) == entry_of(module) and entry_of(module) in PACKAGES:
            continue
        target_tower, target_level = LEVELS[entry_of(target)]
        assert target_level < level, f"{module} (level {level}) imports {target} (level {target_level})"
        if tower != "both" and target not in SHARED_VALUES:
            assert target_tower in ("base", tower), f"{module} ({tower}) imports {target} ({target_tower})"


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_cuda_calls_have_one_home(path: Path) -> None:
    """Every call into torch.cuda is in `Device`, a kernel or the CUDA graphs; naming one of its types is
    free."""
    module = module_of(path)
    if entry_of(module) in ("device", "kernels", "engine.cuda_graph"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert not ast.unparse(node.func).startswith("torch.cuda"), f"{module}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module opens with what it owns and never does"


def test_packages_have_no_cycles() -> None:
    """Files of one package may import each other, but never in a circle."""
    graph = {
        module_of(path): {
            name.removeprefix("nanovllm.")
            for _, name in imports(ast.parse(path.read_text()))
            if name.startswith("nanovllm.")
        }
        for path in FILES
    }

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join([*trail, module])}"
        for target in graph.get(module, ()):
            visit(target, (*trail, module))

    for module in graph:
        if module:
            visit(module, ())
