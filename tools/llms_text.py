"""A hook of MkDocs: writes `llms.txt` and `llms-full.txt`, the site for language models.

`llms.txt` follows llmstxt.org: the product in a paragraph, then each page with a link and its first
sentence. `llms-full.txt` has the text of all pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE: Final = re.compile(r"(.+?[\w)`*])[.:](\s|$)", re.DOTALL)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write both files into the site; MkDocs calls this when all pages are built."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    (site / "llms.txt").write_text(short(docs, config["nav"]))
    (site / "llms-full.txt").write_text(
        "\n\n".join((docs / path).read_text() for _, _, path in pages(config["nav"]))
    )


def short(docs: Path, nav: list[Any]) -> str:
    """The text of `llms.txt`: a section for each section of `nav`."""
    lines = ["# Headrace", "", f"> {first_paragraph((docs / 'index.md').read_text())}"]
    before = None
    for section, title, path in pages(nav):
        if section != before:
            lines += ["", f"## {section}", ""]
            before = section
        sentence = SENTENCE.match(first_paragraph((docs / path).read_text()))
        url = path.replace("README.md", "index.md").removesuffix(".md") + ".html"
        lines.append(f"- [{title}]({url}): {sentence[1] if sentence else title}.")
    return "\n".join(lines) + "\n"


def pages(nav: list[Any], section: str = "Start") -> Iterator[tuple[str, str, str]]:
    """Section, title and path of each page of `nav`, in its order.

    The title of a page without one in `nav` is its name.
    """
    for entry in nav:
        named = {Path(entry).stem: entry} if isinstance(entry, str) else entry
        for title, below in named.items():
            if isinstance(below, str):
                yield section, title, below
            else:
                yield from pages(below, title)


def first_paragraph(text: str) -> str:
    """The first paragraph of a page that is plain text, as one line without links."""
    for block in FENCE.sub("", text).split("\n\n"):
        if re.match(r"\s*[^\s#|<!-]", block) and not block.startswith("Written by"):
            return " ".join(LINK.sub(r"\1", block).split())
    return ""
