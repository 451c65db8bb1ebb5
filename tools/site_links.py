"""A hook of MkDocs.

A link that leaves docs/ becomes the name of the file, for the site has only docs/.

In the repository, where the pages are read as plain Markdown, such links lead to the file itself.

"""

from __future__ import annotations

import posixpath
import re
from typing import Any, Final

LINK: Final = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s#:]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with links out of docs/ written as names; MkDocs calls this for each page."""
    return named(markdown, page.file.src_uri)


def named(markdown: str, page: str) -> str:
    """`markdown` of `page`, a path below docs/, with every link out of docs/ written as a name."""

    def written(link: re.Match[str]) -> str:
        mark, text, target, _ = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if not path.startswith("../") and not path.endswith(".sql"):
            return link[0]
        path = path.removeprefix("../") if path.startswith("../") else f"docs/{path}"
        return f"`{path}`" if mark or text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(written, markdown)
