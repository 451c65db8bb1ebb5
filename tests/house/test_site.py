"""The documentation builds without warnings, contacts no other host, and includes all pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.site_links import named

ROOT = Path(__file__).parents[2]
ASKED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^\s>]+")


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("feed.md", "[the plot](../bench/results/x.svg)", "the plot (`bench/results/x.svg`)"),
        ("feed.md", "[`bench/x.md`](../bench/x.md)", "`bench/x.md`"),
        ("a/why.md", "[views](../views.md#once)", "[views](../views.md#once)"),
        ("a/why.md", "[code](../../src/x.py)", "code (`src/x.py`)"),
        ("views.md", "[there](https://example.com/a)", "[there](https://example.com/a)"),
    ],
)
def test_links_out_of_the_site_become_names(page, text, shown):
    assert named(text, page) == shown


@pytest.mark.slow
def test_the_site_is_whole_and_asks_nobody_else(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    docs = ROOT / "docs"
    for path in docs.rglob("*.md"):
        name = path.relative_to(docs).with_suffix("")
        assert {name, name.with_name("index")} & pages, f"{name} is not in the site"
    for path in tmp_path.rglob("*.html"):
        assert not ASKED.findall(path.read_text()), path.name
