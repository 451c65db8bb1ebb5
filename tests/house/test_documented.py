"""Nothing is undocumented: the reference is what the code says, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_reference_is_what_the_code_says():
    """In a process of its own: click remembers the help options of whoever ran a command last."""
    command = [sys.executable, "-m", "tools.reference", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}: run `make reference`"


def test_every_route_says_which_scope_it_needs():
    page = (ROOT / "docs" / "reference" / "http.md").read_text()
    open_routes = re.findall(r"`(GET [^`]+)` \| open", page)
    expected = {
        "/",
        "/healthz",
        "/metrics",
        "/openapi.json",
        "/problems",
        "/problems/{code}",
        "/readyz",
    }
    assert {route.removeprefix("GET ") for route in open_routes} == expected


TOLD = [*PAGES, *(path for path in ROOT.glob("deploy/**/*") if path.is_file())]


@pytest.mark.parametrize("page", TOLD, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_application_has_no_name_of_the_standard_library(page):
    """`site:app` can never be imported: Python has a module `site` of its own, loaded before."""
    named = re.findall(r"\b([a-z_]\w*)(?:\.\w+)*:app\b", page.read_text())
    assert not sys.stdlib_module_names & set(named)


@pytest.mark.parametrize("page", TOLD, ids=lambda page: str(page.relative_to(ROOT)))
def test_nobody_is_told_to_install_a_stranger_s_package(page):
    """What is called `penstock` in the public index is another project."""
    assert not re.search(
        r"pip install [^`\n]*(?<=[ '\"])penstock(?:\[[\w,]+\])?['\"\s`]", page.read_text()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`((?:src|tests|docs|examples|tools)/[\w/.-]+?)/?`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
