"""What the README promises is what the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

README = (Path(__file__).parent.parent / "README.md").read_text()


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


def test_the_module_map_names_files_that_exist() -> None:
    package = Path(__file__).parent.parent / "nanovllm"
    table = README.split("| file | what it owns |")[1].split("\n\n")[0]
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", table):
        assert (package / name).exists(), name
