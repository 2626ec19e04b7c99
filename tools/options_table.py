"""Write the tables of options in docs/options.md from `Config` and `SamplingParams`, which tell each once.

python -m tools.options_table
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from nanovllm.config import Config
from nanovllm.params import SamplingParams

PAGE = Path(__file__).parent.parent / "docs/options.md"
_HEAD = "| {} | default | meaning | refused |\n|---|---|---|---|\n"


def shown(default: object) -> str:
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def with_tables(page: str) -> str:
    """The text of the page with the tables of today's options. ValueError if it has no such table."""
    for kind, owner in (("option", Config), ("field", SamplingParams)):
        head = _HEAD.format(kind)
        before, found, rest = page.partition(head)
        if not found:
            raise ValueError(f"{PAGE} has no table that begins with {head!r}")
        told = [(each, each.metadata["option"]) for each in fields(owner) if "option" in each.metadata]
        rows = [
            f"| `{each.name}` | {shown(each.default)} | {about.meaning} | {about.refused} |"
            for each, about in told
        ]
        page = before + head + "\n".join(rows).replace("|  |", "| |") + "\n\n" + rest.partition("\n\n")[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
