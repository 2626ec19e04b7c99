"""Write the table of the options of `LLM` in docs/options.md from `Config`, which tells each option once.

python -m tools.options_table
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from nanovllm.config import Config

PAGE = Path(__file__).parent.parent / "docs/options.md"
_HEAD = "| option | default | meaning | refused |\n|---|---|---|---|\n"


def shown(default: object) -> str:
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def with_table(page: str) -> str:
    """The text of the page with the table of today's options. ValueError if it has no such table."""
    before, head, rest = page.partition(_HEAD)
    if not head:
        raise ValueError(f"{PAGE} has no table that begins with {_HEAD!r}")
    rows = [
        f"| `{each.name}` | {shown(each.default)} | {about.meaning} | {about.refused} |".replace(
            "|  |", "| |"
        )
        for each in fields(Config)[1:]
        for about in [each.metadata["option"]]
    ]
    return before + head + "\n".join(rows) + "\n\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
