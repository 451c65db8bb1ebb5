"""Nothing is undocumented: the reference is what the code says, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
    expected = {"/healthz", "/readyz"}
    assert {route.removeprefix("GET ") for route in open_routes} == expected


TOLD = [*PAGES, *(path for path in ROOT.glob("deploy/**/*") if path.is_file())]


def found_on(pages, search):
    """A line for each thing that `search` finds on a page."""
    assert pages
    return "\n".join(
        f"{page.relative_to(ROOT)}: {found}" for page in pages for found in search(page)
    )


def test_an_application_has_no_name_of_the_standard_library():
    """`site:app` can never be imported: Python has a module `site` of its own, loaded before."""

    def taken(page):
        named = re.findall(r"\b([a-z_]\w*)(?:\.\w+)*:app\b", page.read_text())
        return sys.stdlib_module_names & set(named)

    assert found_on(TOLD, taken) == ""


def test_no_page_installs_from_a_package_index():
    """Nothing is published yet, so a package of this name there would be another project."""

    def strangers(page):
        told = r"pip install [^`\n]*(?<=[ '\"])headrace(?:\[[\w,]+\])?['\"\s`]"
        return re.findall(told, page.read_text())

    assert found_on(TOLD, strangers) == ""


def test_links_lead_somewhere():
    def lost(page):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                yield target

    assert found_on(PAGES, lost) == ""


def test_files_that_are_named_exist():
    named = r"`((?:src|tests|docs|examples|tools)/[\w/.-]+?)/?`"

    def missing(page):
        return [name for name in re.findall(named, page.read_text()) if not (ROOT / name).exists()]

    assert found_on(PAGES, missing) == ""


def test_the_short_suite_names_files_that_exist():
    names = re.search(
        r"^SHORT := (.*?)\n[A-Z]", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL
    )
    assert names
    paths = [ROOT / name for name in names[1].replace("\\", " ").split()]
    assert [str(path) for path in paths if not path.exists()] == []
