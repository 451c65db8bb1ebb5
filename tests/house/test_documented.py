"""The documentation is complete: reference, glossary, links, named files, and the built site."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tools.diagrams import DIAGRAMS, FOLDER, drawn
from tools.site_links import named

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DEPLOYED = [*PAGES, *(path for path in ROOT.glob("deploy/**/*") if path.is_file())]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ROOMS = ["jobs", "fetch", "views", "feed", "media"]
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^\s>]+")

CODE = re.compile(r"<pre\b.*?</pre>", re.DOTALL)
RUN_IN = re.compile(r"^(?:<p>)?(?:[-*]|\d+\.) .{,40}", re.MULTILINE)
"""A list on the site that is the text of a paragraph."""


def run(*words, **env):
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def found_on(pages, search):
    """A line for each result of `search` on a page."""
    assert pages
    return "\n".join(
        f"{page.relative_to(ROOT)}: {found}" for page in pages for found in search(page)
    )


def test_the_reference_is_generated_from_the_code():
    """In a separate process: click keeps the help options of the last command."""
    ran = run("tools.reference", "--check")
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}: run `make reference`"
    page = (ROOT / "docs" / "reference" / "http.md").read_text()
    assert set(re.findall(r"`GET ([^`]+)` \| open", page)) == {
        "/healthz",
        "/readyz",
        "/v1/fetch/sellers/{token}",
    }


def test_no_term_is_defined_twice():
    terms = Counter(term.lower() for term in re.findall(r"\*\*([^*]+)\*\*", GLOSSARY))
    assert [term for term, count in terms.items() if count > 1] == []


def test_the_glossary_has_every_exported_class_and_no_other():
    exported, classes = set(), set()
    for room in ROOMS:
        package = importlib.import_module(f"headrace.{room}")
        exported |= set(package.__all__)
        values = {name: getattr(package, name) for name in package.__all__}
        classes |= {
            name
            for name, value in values.items()
            if inspect.isclass(value) and not issubclass(value, Exception)
        }
    assert classes - set(re.findall(r"`(\w+)`", GLOSSARY)) == set()
    assert set(re.findall(r"`([A-Z]\w+)`", GLOSSARY)) - exported == set()


def test_no_application_is_named_as_a_module_of_the_standard_library():
    """`site:app` can never be imported, because Python has loaded its own module `site`."""

    def taken(page):
        names = re.findall(r"\b([a-z_]\w*)(?:\.\w+)*:app\b", page.read_text())
        return sys.stdlib_module_names & set(names)

    assert found_on(DEPLOYED, taken) == ""


def test_no_page_installs_from_a_package_index():
    """Nothing is published yet, so a package of this name there would be another project."""

    def installs(page):
        pattern = r"pip install [^`\n]*(?<=[ '\"])headrace(?:\[[\w,]+\])?['\"\s`]"
        return re.findall(pattern, page.read_text())

    assert found_on(DEPLOYED, installs) == ""


def test_the_codes_of_errors_on_the_pages_exist():
    """Codes of `entry` are those of an example's load balancer."""
    errors = (ROOT / "docs" / "reference" / "errors.md").read_text()
    known = set(re.findall(r"^\| `([\w.]+)` \|", errors, re.MULTILINE))
    assert known

    def unknown(page):
        codes = re.findall(r'"code": ?"(\w+\.\w+)"', page.read_text())
        return [code for code in codes if code not in known and not code.startswith("entry.")]

    assert found_on(PAGES, unknown) == ""


def test_links_and_named_files_exist():
    pattern = r"`((?:src|tests|docs|examples|tools)/[\w/.-]+?)/?`"

    def missing(page):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (page.parent / target).exists():
                yield target
        yield from (name for name in re.findall(pattern, text) if not (ROOT / name).exists())

    assert found_on(PAGES, missing) == ""
    text = (ROOT / "Makefile").read_text()
    short = re.search(r"^SHORT_TESTS := (.*?)\n[A-Z]", text, re.MULTILINE | re.DOTALL)
    names = short[1].replace("\\", " ").split()
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_site_builds_has_all_pages_and_loads_nothing_from_elsewhere(tmp_path):
    for page, text, shown in (
        ("feed.md", "[the plot](../bench/results/x.svg)", "the plot (`bench/results/x.svg`)"),
        ("feed.md", "[`bench/x.md`](../bench/x.md)", "`bench/x.md`"),
        ("a/why.md", "[views](../views.md#once)", "[views](../views.md#once)"),
        ("a/why.md", "[code](../../src/x.py)", "code (`src/x.py`)"),
        ("views.md", "[there](https://example.com/a)", "[there](https://example.com/a)"),
    ):
        assert named(text, page) == shown
    options = ("--strict", "--quiet", "--site-dir", str(tmp_path))
    ran = run("mkdocs", "build", *options, NO_MKDOCS_2_WARNING="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    built = {path.relative_to(tmp_path).with_suffix(""): path for path in tmp_path.rglob("*.html")}
    docs = ROOT / "docs"
    for path in docs.rglob("*.md"):
        name = path.relative_to(docs).with_suffix("")
        assert {name, name.with_name("index")} & built.keys(), f"{name} is not in the site"
    html = {name: path.read_text() for name, path in built.items()}
    assert [name for name, text in html.items() if LOADED.findall(text)] == []
    prose = {str(name): CODE.sub("", text) for name, text in html.items()}
    run_in = {name: found for name, text in prose.items() if (found := RUN_IN.findall(text))}
    assert run_in == {}, "a list needs an empty line before it, a list inside it four spaces"
    listed = re.findall(
        r"^- \[.+\]\((.+)\.html\): .+\.$", (tmp_path / "llms.txt").read_text(), re.MULTILINE
    )
    assert len(listed) > 30
    assert {name for name in listed if Path(name) not in built} == set()


def test_diagrams_are_drawn_from_their_code():
    for name, diagram in DIAGRAMS.items():
        path = FOLDER / f"{name}.svg"
        assert path.read_text() == drawn(diagram), f"run python -m tools.diagrams: {path}"
        assert f"diagrams/{name}.svg" in (ROOT / "docs" / f"{name}.md").read_text()
