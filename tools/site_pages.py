"""Hooks of mkdocs.yml: pages of the site that lie beside `docs/`, and links between pages.

README.md is the first page. `mkdocs build --strict` ends at a link that leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {  # of the site, and their files
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "findings.md": "findings/README.md",
}
PAGES |= {
    f"doors/{path.parent.relative_to(ROOT / 'nanovllm').as_posix()}.md": path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("nanovllm/**/README.md"))
}
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_NAMED = re.compile(r"(?<![\[`])`([\w./-]+\.(?:md|ipynb))`(?![\]`])")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to the pages."""
    return linked(markdown, page.file.src_uri, {file.src_uri for file in files.documentation_pages()})


def linked(markdown: str, at: str, pages: set[str]) -> str:
    """`markdown`, of the page `at`: links to files of the project lead to their pages, or become plain text
    without a page, and so does each file in backticks that is a page, such as `docs/options.md`."""
    named = {f"docs/{page}": page for page in pages} | {source: page for page, source in PAGES.items()}
    folder = posixpath.dirname(PAGES.get(at, f"docs/{at}"))

    def way(page: str) -> str:
        return posixpath.relpath(page, posixpath.dirname(at) or ".")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        source = posixpath.normpath(posixpath.join(folder, target))
        if source in named:
            return f"[{text}]({way(named[source])}{anchor})"
        inside_docs = source.startswith("docs/") or not (ROOT / source).exists()
        return match[0] if inside_docs else text  # mkdocs refuses what does not exist

    def name(match: re.Match[str]) -> str:
        page = named.get(match[1])
        return match[0] if page is None or page == at else f"[{match[0]}]({way(page)})"

    return _NAMED.sub(name, _LINK.sub(link, markdown))
