"""The allowed imports, read from the source with `ast`: the table in "Rooms and floors" of docs/design.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from choices import choices

from nanovllm import doors

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# The floors of the core's rooms, lowest first. Each folder or file is on one floor and imports only lower
# floors and doors. Files of the first floor, and files of one folder, may import each other.
FLOORS = (
    {
        "errors",
        "lifecycle",
        "config",
        "params",
        "inputs",
        "answers",
        "metrics",
        "device",
        "device_facts",
        "batch",
        "pooling_params",
    }
    | {"checks", "names", "doors", "kv_group"},
    {"text", "plan", "kernels"},
    {"attention", "quantization"},
    {"layers"},
    {"models"},
    {"runner"},
    {"engine"},
    {"llm", "outputs", "sampling_params", "utils"},  # with these two the front
    {"", "__main__"},  # nanovllm/__init__.py and `python -m nanovllm`
)
# A door imports the core and other doors, but no file imports itself through others.
DOORS = {"chat", "cpu", "extras", "families", "formats", "moe", "parallel", "residency", "vllm", "windows"}
DOORS |= {"drafts", "cuda_graphs", "shared_prefixes", "states", "streams"}
DOORS |= {
    "flash_attn",
    "hub",
    "integrations",
    "jobs",
    "order",
    "pooling_heads",
    "precompile",
    "reasoning",
    "report",
    "stats",
    "tables",
    "tune",
}
# What these reach through imports never needs torch. Only `engine` and what imports it reach them.
WINGS = {"text", "plan"}
NO_TORCH = WINGS | (FLOORS[0] - {"device", "device_facts"})
COMPUTE = {"attention", "quantization", "layers", "models", "runner", "kernels"}
COMPUTE |= {"families", "flash_attn", "formats", "moe", "cpu", "cuda_graphs", "shared_prefixes"}
USES_TORCH_DISTRIBUTED = {"parallel"}
COMPILERS = {"numba", "llvmlite"}
# Others import them where they compile.
ALWAYS_COMPILE = {
    f"cpu.kernels.{name}"
    for name in ("vectors", "vector_math", "emitting", "tiles", "attention_tiles", "matrices")
} | {f"cpu.kernels.int_{name}" for name in ("vectors", "numbers")}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.stat().st_size)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree_of(path))]


@pytest.fixture(autouse=True, scope="module")
def _trees_end_with_this_file() -> Iterator[None]:
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()


# What every prompt passes through. Everything else is a door, and the core shall import none. `tools/way.py`
# measures both. The three numbers only fall. The front (`nanovllm`, its `llm`, `outputs`, `utils` and
# `sampling_params`, `python -m nanovllm`) is neither: it joins them, because the names that users import are
# those of features.
CORE = {
    *(
        "batch",
        "checks",
        "config",
        "device",
        "device_facts",
        "doors",
        "errors",
        "inputs",
        "kv_group",
        "lifecycle",
    ),
    *("answers", "names", "params"),
    *(f"engine.{name}" for name in ("core", "executor", "generate", "llm_engine")),
    *("engine.requests", "engine.startup", "engine.stats"),
    *(f"plan.{name}" for name in ("block_manager", "prefix_tree", "scheduler")),
    "plan.sequence",
    *(f"runner.{name}" for name in ("batch_runner", "inputs", "memory", "model_runner", "protocols")),
    *(f"runner.{name}" for name in ("ranks", "start")),
    *(f"models.{name}" for name in ("config", "decoder", "registry")),
    "models.weights",
    *(f"layers.{name}" for name in ("linear", "stream", "weights")),
    *("attention.backends", "attention.base", "attention.reference", "attention.rotary"),
    *(f"quantization.{name}" for name in ("base", "config", "shards", "unquantized")),
    *(f"text.{name}" for name in ("characters", "detokenizer", "processor", "prompts")),
    "kernels",
    *(f"kernels.{name}" for name in ("activation", "attention_reference", "compat", "copy_cells", "gemv")),
    *(f"kernels.{name}" for name in ("decode_attention", "filters", "kinds", "last_tokens", "logits")),
    *(f"kernels.{name}" for name in ("matmul", "merge_chunks", "paged", "prefill_attention", "random_bits")),
    *(f"kernels.{name}" for name in ("fp8", "rms_norm", "rotary", "sampling")),
}
CORE_FILES, CORE_LINES = 50, 9_122  # without kernels
CORE_IMPORTS_OF_DOORS = 0


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room_of(module: str) -> str:
    return module.split(".")[0]


def floor_of(room: str) -> int:
    return next(floor for floor, rooms in enumerate(FLOORS) if room in rooms)


def imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for name in {_module(node.module or "", alias.name) for alias in node.names}:
                yield node, name


def _module(package: str, name: str) -> str:
    """What `from package import name` imports: a module of that name, or the package."""
    file = PACKAGE.parent / package.replace(".", "/") / f"{name}.py"
    return f"{package}.{name}" if file.exists() else package


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_imports(path: Path) -> None:
    module = module_of(path)
    if module == "demo_model":
        return
    tree = tree_of(path)
    room = room_of(module)
    for node, name in imports(path):
        if name.startswith("torch.distributed"):
            assert room in USES_TORCH_DISTRIBUTED
        if name.split(".")[0] == "triton":
            assert "kernels" in path.parts
        if name.split(".")[0] in COMPILERS:
            assert module.startswith("cpu.kernels.") or (module, name) == ("cpu.isa", "llvmlite.binding")
            assert module in ALWAYS_COMPILE or node not in tree.body, f"{module}: a start would import {name}"
        if name.split(".")[0] != "nanovllm":
            continue
        target = room_of(name.removeprefix("nanovllm").removeprefix("."))
        if module == "" and target == "llm":
            continue  # the only lazy import, so that `import nanovllm` stays cheap
        if of_compilers := name.removeprefix("nanovllm.") in ALWAYS_COMPILE:
            assert module in ALWAYS_COMPILE or node not in tree.body, f"{module}: a start would import {name}"
        assert of_compilers or node in tree.body, f"{module}: the import of {name} is hidden in a block"
        if "kernels" in path.parts:
            is_value = target in FLOORS[0] or name in ("nanovllm.cpu.isa", "nanovllm.extras.columns")
            assert is_value or "kernels" in name.split("."), f"a kernel imports {name}"
        if room in DOORS or target in DOORS or target == room or (floor_of(room) == 0 == floor_of(target)):
            continue
        assert floor_of(target) < floor_of(room), f"{module} imports {name}, which is not below it"


@cache
def graph() -> dict[str, set[str]]:
    """The modules of the package that each one imports."""
    found = {}
    for path in FILES:
        names = {name for _, name in imports(path) if name.startswith("nanovllm")}
        found[module_of(path)] = {name.removeprefix("nanovllm").removeprefix(".") for name in names}
    return found


def reached(start: set[str]) -> set[str]:
    """What modules of these rooms import, directly or through others; they themselves too."""
    edges = graph()
    todo = [module for module in edges if room_of(module) in start]
    found = set(todo)
    while todo:
        new = edges.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def test_values_plan_and_text_never_need_torch() -> None:
    for module in reached(NO_TORCH) & graph().keys():
        path = next(path for path in FILES if module_of(path) == module)
        names = {name.split(".")[0] for _, name in imports(path)}
        assert "torch" not in names, module


def test_compute_knows_no_sequence_and_no_text() -> None:
    assert [each for each in reached(COMPUTE) if room_of(each) in WINGS | {"engine", "llm"}] == []


def is_core(path: Path) -> bool:
    return module_of(path) in CORE


def core_imports_of_doors() -> set[tuple[str, str]]:
    """(module of the core, door that it imports): the core runs without any door."""
    found = {
        (module, each) for module, targets in graph().items() if module in CORE for each in targets - CORE
    }
    return {(module, target) for module, target in found if target != "demo_model"}


def places() -> set[str]:
    """The kernels for CPUs that others find by name; `tests/test_way.py` has the tables of doors.py."""
    found: set[str] = set()
    for path in FILES:
        text = path.read_text()
        if not any(name in text for name in ("by_device", "cpu_kernel")):
            continue  # each worker collects these tests, and parses little
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("by_device", "cpu_kernel"):
                names = (each.value for each in node.args if isinstance(each, ast.Constant))
                found |= {f"{doors.CPU_KERNELS}.{name.replace('.', ':')}" for name in names if name}
    return found


@pytest.mark.parametrize("place", sorted(places()))
def test_a_place_is_there(place: str) -> None:
    """It is at the top of its module, which may need a compiler to be imported."""
    module, _, name = place.partition(":")
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    named = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    targets = [each for node in tree.body if isinstance(node, ast.Assign) for each in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert name.split(".")[0] in named | {*map(ast.unparse, targets)}


def test_modules_are_found_by_name_in_one_place() -> None:
    found = {module_of(path) for path in FILES if is_core(path) and "import_module" in path.read_text()}
    assert found == {"doors"}


def test_the_core_has_a_budget() -> None:
    """The core's files and lines, without kernels, and its imports of doors only fall."""
    core = [path for path in FILES if is_core(path) and "kernels" not in path.parts]
    assert {module_of(path) for path in core} == {name for name in CORE if not name.startswith("kernels")}
    assert len(core) <= CORE_FILES
    assert sum(len(path.read_text().splitlines()) for path in core) <= CORE_LINES
    assert len(core_imports_of_doors()) <= CORE_IMPORTS_OF_DOORS, core_imports_of_doors()


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_cuda_calls_are_in_one_place(path: Path) -> None:
    """Only `Device`, kernels and the CUDA graphs call torch.cuda; its types may be named anywhere."""
    module = module_of(path)
    allowed = {"device", "device_facts", "cuda_graphs.graphs", "cuda_graphs.prefill"}
    if "kernels" in path.parts or module in allowed:
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            assert not ast.unparse(node.func).startswith("torch.cuda"), f"{module}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), "a module opens with what it owns and never does"


def test_packages_have_no_cycles() -> None:
    """No file imports itself, directly or through others."""
    edges = graph()
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join([*trail, module])}"
        for target in edges.get(module, set()) - done:
            visit(target, (*trail, module))
        done.add(module)

    for module in edges:
        if module:
            visit(module, ())


PRODUCTS = {"linear", "gemv", "matmul", "mm", "bmm", "addmm", "addmm_", "einsum"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_products_are_in_one_place(path: Path) -> None:
    """A layer or a model multiplies only through a `LinearMethod`."""
    multiplies = (
        room_of(module_of(path)) in ("quantization", "formats", "cpu") or module_of(path) == "moe.experts"
    )
    if multiplies or "kernels" in path.parts:
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func).split(".")[-1] not in PRODUCTS, ast.unparse(node)
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), ast.unparse(node)


# Where a kind is chosen: of an activation, a dtype, a way to store weights, ... In kernels every single
# comparison counts; elsewhere many ask for what one kind has more than the others, so chains count.
CHOOSES = {"attention", "quantization", "layers", "runner", "cpu", "formats", "moe", "parallel", "residency"}
CHOOSES |= {"flash_attn", "cuda_graphs", "shared_prefixes"}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if "kernels" in path.parts or room_of(module_of(path)) in CHOOSES],
    ids=module_of,
)
def test_no_bare_else_picks_a_kind(path: Path) -> None:
    """A kind that nobody has taught to this code is an error, not the kind that comes last."""
    least = 1 if "kernels" in path.parts else 2
    found = [each for each in choices(tree_of(path)) if each.branches >= least]
    assert [each for each in found if not each.closed] == []


@pytest.mark.parametrize(
    ("code", "closed"),
    [
        ("if kind == 'a':\n    x = 1\nelse:\n    x = 2", False),
        ("if kind == 'a':\n    x = 1\nelif kind == 'b':\n    x = 2", False),
        (
            "if kind == 'a':\n    x = 1\nelif kind == 'b':\n    x = 2\nelse:\n    raise unknown('x', kind)",
            True,
        ),
        ("if KIND == 1:\n    x = 1\nelse:\n    x = 2", False),
        ("if KIND == 1:\n    x = 1\nelse:\n    tl.static_assert(False)", True),
        ("def f():\n    if x.dtype == torch.int8:\n        return 1\n    return 2", False),
        ("def f():\n    if x.dtype == torch.int8:\n        return 1\n    return TABLE[x.dtype]", True),
        ("def f():\n    if x in ('a', 'b'):\n        return 1\n    raise unknown('x', x)", True),
        ("x = 1 if stored is Stored.ROWS else 2", False),
        ("x = {'a': 1}.get(kind, 2)", False),
        ("if kind == 'a':\n    x += 1", True),
    ],
)
def test_choices_by_kind_are_found(code: str, closed: bool) -> None:
    (choice,) = choices(ast.parse(code))
    assert choice.closed is closed


MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 400, 60, 8


def test_files_are_short() -> None:
    root = PACKAGE.parent
    folders = (root / name for name in ("nanovllm", "tests", "tools"))
    files = [*root.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    lengths = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path) or "nanovllm")
def test_functions_and_calls_are_short(path: Path) -> None:
    """Many arguments should be one value. A kernel is one function and gets its arguments one by one."""
    for node in nodes_of(path) if "kernels" not in path.parts else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION, node.name
        elif isinstance(node, ast.Call):
            assert len(node.args) <= MAX_ARGUMENTS, f"{ast.unparse(node.func)} in line {node.lineno}"


def test_kernels_read_fields_of_their_constants() -> None:
    """Triton 3.9 gives a kernel the fields of a NamedTuple, no properties; its interpreter does."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in nodes_of(path)]
    tuples = [node for node in nodes if isinstance(node, ast.ClassDef) and "NamedTuple" in ast.dump(node)]
    methods = {each.name for node in tuples for each in node.body if isinstance(each, ast.FunctionDef)}
    assert "group" in methods  # of `Heads`
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and "jit" in "".join(map(ast.dump, node.decorator_list)):
            names = {each.arg for each in node.args.args}
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                    assert each.value.id not in names or each.attr not in methods, (node.name, each.attr)
