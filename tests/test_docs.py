"""The documents agree with the code."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import inside
import pytest
import torch
from options_table import shown, with_tables
from test_architecture import DOORS, FLOORS
from tiny_models import write_tiny_model

from nanovllm import LLM, demo_model_path
from nanovllm.chat.templates import Limits
from nanovllm.checks import MAX_TEXTS
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.device_facts import CPU_KV_CACHE_BYTES, SPARE_BYTES
from nanovllm.engine.startup import TABLE_BYTES
from nanovllm.extras import structured_outputs
from nanovllm.extras.structured_outputs import MAX_CHARS, MAX_CHOICES
from nanovllm.formats.json_files import MAX_DEPTH, MAX_JSON_BYTES, MAX_VOCABULARY_BYTES
from nanovllm.jobs import errors as job_errors
from nanovllm.jobs.job import engine_fields
from nanovllm.jobs.main import EPILOG, parse_args
from nanovllm.jobs.packed import MAX_RATIO, MAX_UNPACKED_FREELY
from nanovllm.jobs.params import row_seed
from nanovllm.jobs.parquet import MAX_UNPACKED
from nanovllm.jobs.sources import MAX_NESTING, MAX_ROW_BYTES
from nanovllm.models.registry import load_model_config
from nanovllm.sampling_params import MAX_N, SamplingParams
from nanovllm.vllm.arguments import (
    BEAM_SEARCH,
    BEAMS,
    CHAT,
    EMBED,
    ENGINE,
    GENERATE,
    POOLING,
    PROMPT,
    SAMPLING,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "findings/README.md",
]
DOORS_PAGES = [path for path in sorted(PACKAGE.rglob("README.md")) if path.parent.name != "demo_model"]
DESIGN = [ROOT / f"docs/{name}.md" for name in ("design", "prefixes", "sampling", "lifecycle", "adding")]
README = DOCS[0].read_text()
OPTIONS = (ROOT / "docs/options.md").read_text()
FIELDS = {
    "`LLM(model, ...)`": {field.name: field.default for field in fields(Config) if field.name != "model"},
    "`SamplingParams(...)`": {field.name: field.default for field in fields(SamplingParams)},
}


def section(text: str, heading: str) -> str:
    """The text under a heading of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def anchors(text: str) -> set[str]:
    """The targets that a link may have within `text`."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {"#" + re.sub(r"[^\w-]", "", line.replace(" ", "-")).lower() for line in headings}


def links(text: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(r"\]\(([^)]*)\)", text))


@pytest.mark.parametrize("heading", FIELDS)
def test_every_option_is_in_its_table_with_its_default(heading: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`[^|]+`) \|", section(OPTIONS, heading), re.M))
    assert rows == {name: shown(default) for name, default in FIELDS[heading].items()}


def test_the_table_of_options_is_written_from_them() -> None:
    """`python -m tools.options_table` writes it."""
    assert with_tables(OPTIONS) == OPTIONS
    assert with_tables(OPTIONS.replace("| `seed` | `0` |", "| `seed` | `1` |")) == OPTIONS
    assert with_tables(OPTIONS.replace("0 is greedy.", "1 is greedy.")) == OPTIONS
    for owner, names in zip((Config, SamplingParams), FIELDS.values(), strict=True):
        told = inspect.getdoc(owner) or ""
        assert re.findall(r"^(\w+): ", told, re.M) == list(names)
        assert "](#" not in told


def test_every_option_is_compared() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section(OPTIONS, "Against vLLM and nano-vLLM"), re.M)
    names = ["model", *(name for options in FIELDS.values() for name in options)]
    assert sorted(rows) == sorted(set(names))


def test_what_is_not_supported_is_what_is_refused() -> None:
    rows = re.findall(
        r"^\| ([^|]*) \| (`[^|]+) \|$", section(OPTIONS, "vLLM's arguments that are not supported"), re.M
    )
    tables = {"SamplingParams": SAMPLING, "LLM.generate": GENERATE, "LLM.chat": CHAT, "LLM": ENGINE}
    tables |= {
        "PoolingParams": POOLING,
        "BeamSearchParams": BEAMS,
        "TokensPrompt": PROMPT,
        "LLM.embed": EMBED,
        "LLM.beam_search": BEAM_SEARCH,
    }
    for owner, table in tables.items():
        cells = [names for of, names in rows if re.match(rf"`{owner}`(:|$| and)", of)]
        named = re.findall(r"`(\w+)`", " ".join(cells))
        refused = [name for name, each in table.items() if each.neutral is not None and each.used is None]
        assert sorted(named) == sorted(refused)


def test_lines_are_short() -> None:
    """At most 120 characters outside of tables."""
    folders = ("docs", "nanovllm", "tests", "tools")
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    assert len(paths) > len(DOCS)
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120 and not line.lstrip().startswith("|")
    ]
    assert not long


def page(path: Path) -> str:
    """Its id."""
    return "/".join(path.parts[-2:])


@pytest.mark.parametrize("path", [*DOCS, *DOORS_PAGES], ids=page)
def test_files_that_are_named_exist(path: Path) -> None:
    """Paths start at the project's folder, at the package or, on a page of a door, at the door or its
    kernels; a file that does not exist yet is called new."""
    folders = ROOT, PACKAGE, path.parent, path.parent / "kernels"
    text = re.sub(r"new `[^`]+`", "", path.read_text())
    quoted = re.findall(r"`([^`\n]+)`", text)
    named = re.findall(r"[\w./-]+\.(?:py|md|toml)\b", " ".join(quoted))
    for name in [*named, *(each for each in quoted if re.fullmatch(r"[\w/]+/", each))]:
        assert any((folder / name).exists() for folder in folders), name


@pytest.fixture(scope="module")
def words() -> set[str]:
    """All words of the code."""
    folders = [ROOT / folder for folder in ("nanovllm", "tools", "tests")]
    files = [ROOT / "bench.py", *(file for folder in folders for file in folder.rglob("*.py"))]
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}


@pytest.mark.parametrize("path", [*DESIGN, *DOORS_PAGES], ids=page)
def test_names_of_the_code_exist_in_the_design(path: Path, words: set[str]) -> None:
    """A class, function or constant in backticks exists in the code."""
    text = re.sub(r"new `[^`]+`", "", path.read_text())
    for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text):
        if not name.endswith((".py", ".md", ".svg")):
            assert set(name.split(".")) <= words, name


def test_the_design_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "docs/design.md").read_text().split()) <= 2500


def test_each_format_has_a_page() -> None:
    """One screen, which the page of all formats names."""
    formats = PACKAGE / "formats"
    index = set(links((formats / "README.md").read_text()))
    for folder in {path.parent for path in formats.glob("*/__init__.py")}:
        assert f"{folder.name}/README.md" in index
        assert len((folder / "README.md").read_text().splitlines()) <= 50


def test_the_floors_of_the_design_are_those_that_are_checked() -> None:
    text = section((ROOT / "docs/design.md").read_text(), "Rooms and floors")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M)
    named = [set(re.findall(r"`(\w+)(?:\.py|/)`", cell)) for _, cell in rows]
    assert [int(number) for number, _ in rows] == list(range(1, len(FLOORS)))
    assert named == list(FLOORS[:-1])  # the last one is nanovllm/__init__.py
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.M)) == DOORS


@pytest.mark.parametrize("path", [*DOCS[1:], *(ROOT / "docs/log").glob("*.md"), *DOORS_PAGES], ids=page)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in links(text):
        if not target.startswith("https://"):
            file, _, _ = target.partition("#")
            assert (path.parent / file).exists() if file else target in anchors(text), target


@pytest.mark.parametrize("path", sorted((ROOT / "docs/pictures").iterdir()), ids=lambda path: path.name)
def test_pictures_are_shown_and_name_files_that_exist(path: Path) -> None:
    assert f"](pictures/{path.name})" in (ROOT / "docs/design.md").read_text()
    picture = ElementTree.parse(path).getroot()
    width, height = (float(size) for size in picture.attrib["viewBox"].split()[2:])
    card = picture.find("{http://www.w3.org/2000/svg}rect")  # its background, on a light and on a dark page
    assert card is not None and card.attrib["class"] == "card"
    assert float(card.attrib["width"]) >= width - 2 and float(card.attrib["height"]) >= height - 2
    text = " ".join(picture.itertext())
    for name in re.findall(r"\w+\.py", text):
        assert list(PACKAGE.rglob(name)), name


def test_the_loop_over_steps_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", section(OPTIONS, "Step by step"), re.S)
    names: dict[str, Any] = {"LLM": LLM, "SamplingParams": SamplingParams, "demo_model_path": demo_model_path}
    exec(code, names)
    names["llm"].close()
    assert len(names["answers"]) == 2 and all(names["answers"].values())


def test_the_class_of_logits_processors_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", section(OPTIONS, "Against vLLM and nano-vLLM"), re.S)
    names: dict[str, Any] = {}
    exec(code.replace("demo_model_path(),", "demo_model_path(), device='cpu',"), names)
    with names["llm"]:
        assert names["answer"]["token_ids"] == [42] * 3


def test_one_answer_again() -> None:
    [code] = re.findall(r"```python\n(.*?)```", section(OPTIONS, "One answer again"), re.S)
    names: dict[str, Any] = {"LLM": LLM, "SamplingParams": SamplingParams, "row_seed": row_seed}
    names["prompts"] = ["What is 2 + 3?", "Sort: d b a", "Count from 3 to 9:", "Spell AB."]
    exec(code.replace("path/to/Qwen3-0.6B", demo_model_path()), names)
    with names["llm"]:
        assert names["again"]["token_ids"] == names["outputs"][2]["token_ids"]
        names["params"].seed = None  # hot enough that another seed gives another answer
        others = [names["llm"].generate("Count from 3 to 9:", names["params"])[0]["text"] for _ in range(4)]
        assert len(set(others)) > 1


def test_how_memory_is_divided(tmp_path: Path) -> None:
    text = section(OPTIONS, "How memory is divided")
    assert f"| {SPARE_BYTES / 2**30} GiB for CUDA graphs" in text
    assert f"| {CPU_KV_CACHE_BYTES // 2**30} GiB, at most half of what is free" in text
    assert f"at most\n{TABLE_BYTES // 2**30} GiB" in text
    assert "28 layers, 8 KV heads of 128 values" in text and "\n28 MiB for 256 tokens" in text
    assert 2 * 28 * 8 * 128 * 2 * 256 == 28 * 2**20
    free, total = 70 * 2**30, 80 * 2**30
    device = Device("cpu")
    device.memory = lambda: (free, total)  # type: ignore[method-assign]
    assert device.kv_cache_budget(0.9, 0, 0)[0] == CPU_KV_CACHE_BYTES
    device.torch = torch.device("cuda", 0)
    held, reserve = 10 * 2**30, 3 * 2**30
    assert device.kv_cache_budget(0.5, held, reserve)[0] == total // 2 - held - reserve
    assert device.kv_cache_budget(1.0, 0, reserve)[0] == free - reserve - min(SPARE_BYTES, total // 16)
    with LLM(write_tiny_model(tmp_path), device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4) as llm:
        config = llm.model_config
        values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * inside.runner(llm).block_size
        assert inside.runner(llm).measure_kv_cache(0).per_block == 4 * values


def test_the_example_of_other_config_values_acts(tmp_path: Path) -> None:
    [shown] = re.findall(r"--hf-overrides \\\n    '(.*?)'\n", section(OPTIONS, "Values of config.json"))
    folder = write_tiny_model(tmp_path, max_position_embeddings=32768)
    assert load_model_config(folder).max_position_embeddings == 32768
    assert load_model_config(folder, overrides=json.loads(shown)).max_position_embeddings == 131_072


def test_limits_in_the_page_on_security_are_those_of_the_code() -> None:
    text = " ".join((ROOT / "SECURITY.md").read_text().split())
    mib, limits = 2**20, Limits()
    for sentence in (
        f"most {MAX_JSON_BYTES // mib} MiB (vocabularies {MAX_VOCABULARY_BYTES // mib} MiB) and {MAX_DEPTH}",
        f"A row has at most {MAX_ROW_BYTES // mib} MiB and its JSON at most {MAX_NESTING} levels",
        f"at most about {MAX_UNPACKED // 2**30} GiB is unpacked at once",
        f"unpacks to more than {MAX_UNPACKED_FREELY // 2**30} GiB and {MAX_RATIO:,} times its size",
        f"has {limits.seconds:.0f} s of a CPU, {limits.memory_bytes // mib} MiB of memory (on Linux) and "
        f"{limits.output_bytes // mib} MiB of output",
        f"`n` is at most {MAX_N:,}, and there are at most {MAX_TEXTS['stop']:,} stop strings",
        f"and {MAX_TEXTS['bad_words']:,} bad words",
        f"at most {MAX_CHARS:,} characters, {MAX_CHOICES:,} choices and {structured_outputs.MAX_DEPTH} l",
    ):
        assert sentence in text


def test_every_test_file_belongs_to_a_room() -> None:
    """Exactly one row of the table says how to run it."""
    cells = re.findall(r"^\| [^|]+ \| `(tests/[^`]+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    paths = [path for cell in cells for word in cell.split() for path in sorted(ROOT.glob(word))]
    files = [file for path in paths for file in (path.glob("test_*.py") if path.is_dir() else [path])]
    assert sorted(files) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_exit_codes_of_jobs_are_those_of_the_code() -> None:
    codes = {value for name, value in vars(job_errors).items() if name.isupper() and name[0] != "_"}
    cells = re.findall(
        r"^\| ([\d, ]+) \|", section((ROOT / "docs/jobs.md").read_text(), "Resuming a job"), re.M
    )
    assert {int(code) for cell in cells for code in cell.split(",")} == codes
    assert {int(code) for code in re.findall(r"^  (\d+) ", EPILOG, re.M)} == codes


@pytest.mark.parametrize("command", ["run", "check"])
def test_the_help_speaks_of_a_command_line(command: str) -> None:
    """Whole sentences, and no value that only Python has."""
    text = " ".join(help_of(command, "--help-options").split()).replace("- ", "-")
    assert "None" not in text and "torch." not in text and "transformers tokenizer" not in text
    assert "each on its own --tensor-parallel-size devices" in text and "it replaces --gpu-mem" in text
    assert 'config.json, such as {"rope_theta": 1000000}.' in text
    assert not set(FIELDS["`LLM(model, ...)`"]) & set(re.findall(r"\w+_\w+(?!\w|\.json)", text))
    options = text.partition("options of LLM (")[2].partition("exit codes:")[0]
    assert "](#" not in options and "`" not in options
    about = re.split(r"--[a-z][\w-]+(?: VALUE|, --no-[\w-]+) ", options)[1:]
    assert len(about) >= 30
    for each in about:
        assert re.search(r"\.( \(default: [^)]+\))?$", each.strip()), each


def test_every_flag_of_jobs_is_one() -> None:
    text = (ROOT / "docs/jobs.md").read_text() + section(README, "A file of prompts")
    known = {flag for name in ("run", "check") for flag in flags_of(name)}
    assert {flag.replace("--no-", "--") for flag in re.findall(r"(?<!\w)--[a-z][\w-]+", text)} <= known


def flags_of(command: str) -> set[str]:
    """The flags of a command, from its help."""
    return set(re.findall(r"--[a-z][\w-]*", help_of(command)))


def help_of(command: str, flag: str = "--help") -> str:
    with pytest.raises(SystemExit), redirect_stdout(StringIO()) as out:
        parse_args([command, flag])
    return out.getvalue()


def test_the_help_fits_two_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of("run")
    assert len(text.splitlines()) <= 2 * 50
    for group in ("rows:", "prompts:", "the job:", "options of LLM:", "exit codes:"):
        assert f"\n{group}\n" in text
    assert {"--" + name.replace("_", "-") for name in engine_fields()} <= flags_of("run")


def test_every_flag_of_run_has_an_example() -> None:
    text = (ROOT / "docs/jobs.md").read_text()
    shown = Counter(flag.replace("--no-", "--") for flag in re.findall(r"^\| `(--[a-z-]+)[ `]", text, re.M))
    assert set(shown) == flags_of("run") - {"--help", "--help-options", "--output"}
    assert set(shown.values()) == {1}
