"""What the README promises is what the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HEADINGS = re.findall(r"^#+ (.*)$", README, re.M)


def test_every_option_is_in_the_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", README, re.M))
    options = {field.name: field.default for field in fields(Config) if field.name != "model"}
    assert rows.keys() == options.keys()
    for name, default in options.items():
        if default is not None:  # a None is described in words
            assert rows[name].strip("`").strip('"') == str(default), name


def test_every_sampling_parameter_is_named() -> None:
    for field in fields(SamplingParams):
        assert f"`{field.name}`" in README


def test_links_lead_somewhere_on_a_package_index_too() -> None:
    """There only the text of README.md is shown: a link to a file of the project leads nowhere."""
    headings = {re.sub(r"[^\w-]", "", line.replace(" ", "-")).lower() for line in HEADINGS}
    for target in re.findall(r"\]\(([^)]*)\)", README):
        assert target.startswith("https://") or target.removeprefix("#") in headings, target


def test_the_documents_it_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.md)`", README))
    assert {"docs/design.md", "docs/benchmarks.md", "docs/performance.md"} < named
    for name in named:
        assert (ROOT / name).is_file(), name


def test_it_says_how_long_the_tests_take() -> None:
    assert re.search(r"python -m pytest\n```\n\nwhich takes about \d+ minutes", README)


def test_the_module_map_names_files_that_exist() -> None:
    package = ROOT / "nanovllm"
    table = README.split("| file | what it owns |")[1].split("\n\n")[0]
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", table):
        assert (package / name).exists(), name
