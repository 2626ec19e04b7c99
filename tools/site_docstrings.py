"""Docstrings as Markdown, for the API page of the site: an extension of griffe, which reads them."""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # tests read docstrings without it
    Extension = object

_ARGUMENT = re.compile(r"^[a-z_]\w*(?:, \w+)*: ")


def as_markdown(docstring: str) -> str:
    """Paragraphs of lines `argument: meaning` become lists, and examples with `>>>` become code."""
    return "\n\n".join(map(_paragraph, re.split(r"\n\s*\n", docstring)))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines and lines[0].startswith(">>> "):
        return f"```python\n{text}\n```"
    if not any(map(_ARGUMENT.match, lines)):
        return text
    found: list[str] = []
    for line in lines:
        argument = _ARGUMENT.match(line)
        if argument:
            found += [""] if not any(each.startswith("- ") for each in found) else []
            found.append(f"- `{argument[0][:-2]}`: {line[argument.end() :]}")
        else:
            found.append(f"    {line.strip()}" if any(each.startswith("- ") for each in found) else line)
    return "\n".join(found).lstrip("\n")


class Docstrings(Extension):  # type: ignore[misc,valid-type,unused-ignore]
    def on_object(self, *, obj: Any, **others: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
