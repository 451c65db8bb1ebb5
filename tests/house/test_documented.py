"""Nothing is undocumented: the reference is what the code says, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.reference import FOLDER, pages

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.fixture(scope="module")
def written():
    return pages()


@pytest.mark.parametrize(
    "name", ["settings.md", "commands.md", "metrics.md", "http.md", "errors.md"]
)
def test_the_reference_is_what_the_code_says(written, name):
    assert (FOLDER / name).read_text() == written[name], "run `make reference`"


def test_every_route_says_which_scope_it_needs(written):
    open_routes = re.findall(r"`(GET [^`]+)` \| open", written["http.md"])
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`((?:src|tests|docs|examples|tools)/[\w/.-]+?)/?`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
