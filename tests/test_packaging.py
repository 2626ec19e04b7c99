"""The wheel contains only the package, the sdist the whole project; a clone is imported from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
FOLDERS = (".ci", ".github", "docs", "examples", "findings", "nanovllm", "tests", "tools")
FILES = ("LICENSE", "MANIFEST.in", "README.md", "bench.py", "example.py", "pyproject.toml", "constraints.txt")
FILES += (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "mkdocs.yml",
    "Dockerfile",
    "Dockerfile.gpu",
)
FILES += (".dockerignore", ".pre-commit-config.yaml")
JUNK = shutil.ignore_patterns("__pycache__", ".*_cache")


def project_files() -> set[str]:
    """All files of the project, as paths from its folder."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    names = {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}
    return names | set(FILES)


def package_data() -> dict[str, list[str]]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return settings["tool"]["setuptools"]["package-data"]


def test_the_package_says_that_it_is_typed() -> None:
    assert files("nanovllm").joinpath("py.typed").is_file()
    assert "py.typed" in package_data()["nanovllm"]


def test_every_file_of_the_package_is_installed() -> None:
    for path in (ROOT / "nanovllm").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            patterns = package_data().get(package, []) + package_data()["*"]
            assert any(fnmatch(path.name, pattern) for pattern in patterns), path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the project."""
    copy, folder = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("dist")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=JUNK)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    code = "import sys\nfrom setuptools.build_meta import build_sdist, build_wheel\n"
    code += "folder = sys.argv[1]\nbuild_wheel(folder)\nbuild_sdist(folder)"  # the builds use sys.argv
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=copy, check=True, capture_output=True)
    return folder


def test_the_wheel_is_the_package_alone(built: Path) -> None:
    [path] = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}
    assert names == {name for name in project_files() if name.startswith("nanovllm/")}
    assert {"nanovllm/py.typed", "nanovllm/demo_model/model.safetensors"} < names


def test_the_sdist_is_the_whole_project(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = [member.name.partition("/")[2] for member in archive if member.isfile()]
    made = {name for name in members if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    assert set(members) - made == project_files()


SCRIPT = """
from typing import TYPE_CHECKING

import nanovllm
from nanovllm import LLM
from tools import kept

print(nanovllm.__file__, LLM.__name__, kept.VALUE)
if TYPE_CHECKING:
    reveal_type(LLM("path").generate(["Hello"]))
"""


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clone `nanovllm`, a script, a folder `tools`, and an environment `venv` in which pip
    installed the clone, editable and without its dependencies."""
    folder = tmp_path_factory.mktemp("beside")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "nanovllm" / name, ignore=JUNK)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "nanovllm")
    (folder / "tools").mkdir()
    (folder / "tools/kept.py").write_text("VALUE = 7\n")
    (folder / "script.py").write_text(SCRIPT)
    builder = folder / "builder"  # setuptools alone
    builder.mkdir()
    found = distribution("setuptools")
    for name in {path.parts[0] for path in found.files or () if path.parts[0] != ".."}:
        (builder / name).symlink_to(Path(str(found.locate_file(name))))
    venv.create(folder / "venv", with_pip=True)
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"PYTHONPATH": str(builder)}
    done([*pip, "-e", folder / "nanovllm"], Path("/"), environment)
    return folder


def done(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, without an error; return what it prints."""
    result = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_mypy_finds_the_types_of_a_clone(beside: Path) -> None:
    mypy = [sys.executable, "-m", "mypy", "--python-executable", beside / "venv/bin/python", "script.py"]
    mypy += ["--ignore-missing-imports", "--follow-imports=silent", "--cache-dir", beside / "cache"]
    assert 'Revealed type is "list[nanovllm.answers.RequestOutput]"' in done(mypy, beside)


@pytest.mark.full
def test_a_clone_is_imported_from_any_folder(beside: Path) -> None:
    """Also from the one in which it lies: there its folder has the name of the package. The project's other
    folders hide none of a script."""
    [packages] = beside.glob("venv/lib/*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if "-packages" in path))
    python, package = beside / "venv/bin/python", f"{beside}/nanovllm/nanovllm/__init__.py"
    for folder in (beside, beside / "nanovllm", beside / "venv"):
        assert (
            done([python, "-c", "import nanovllm.config; print(nanovllm.__file__)"], folder) == f"{package}\n"
        )
    assert "run" in done([python, "-m", "nanovllm", "--help"], beside)
    assert done([python, "script.py"], beside) == f"{package} LLM 7\n"
