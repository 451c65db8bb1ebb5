"""The house rules that a machine can see; each failure names the remedy."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHERS = sorted((ROOT / "examples").rglob("*.py")) + sorted((ROOT / "tools").rglob("*.py"))
EVERYTHING = [*SOURCES, *TESTS, *OTHERS]
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
POSITIONAL_MAX = 4
BANNED_NAMES = {"utils", "common", "helpers", "manager", "base", "misc"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
MOCKS = re.compile(r"\b(MagicMock|AsyncMock|unittest\.mock|fakeredis)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_a_module_is_of_a_readable_size_and_says_what_it_is_for(path):
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MODULE_LINES_MAX, f"{lines} lines: make it a folder of the same name"
    assert ast.get_docstring(ast.parse(text)), "say in a docstring what the module is for"
    assert path.stem not in BANNED_NAMES, f"{path.stem} is no name: use the field's own word"


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_a_function_is_of_a_readable_size(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name}: {lines} lines, split it"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_many_parameters_are_keyword_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            assert len(names) <= POSITIONAL_MAX, f"{node.name}{tuple(names)}: put a * before some"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_functions_and_classes_have_docstrings(path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named = node.name.startswith("_") or ast.get_docstring(node)
            assert named, f"{node.name}: say its effect or answer in one line"


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_nothing_is_left_unfinished(path):
    if path == Path(__file__):
        return
    text = path.read_text()
    assert not UNFINISHED.search(text), "finish it, or open an issue and remove the mark"
    assert not MOCKS.search(text), "use the real engine: tests/conftest.py has one running"


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_tests_do_not_sleep_to_let_things_settle(path):
    sleeps = re.findall(r"(?:asyncio|time)\.sleep\((?!0\))[^)]*\)", path.read_text())
    allowed = path == Path(__file__)
    assert allowed or not sleeps, f"{sleeps}: wait for a condition with a deadline (wait_until)"


def test_the_repository_speaks_of_the_product_alone():
    hosts = re.compile("pypi" + r"\.org|python" + r"hosted|registry\.npm|deb\." + "debian")
    for path in [*EVERYTHING, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]:
        found = hosts.search(path.read_text())
        assert not found, f"{name_of(path)} names a package registry: {found}"
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock, "the lock must work with whatever index pip is configured for"
