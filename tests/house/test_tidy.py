"""The house rules that a machine can see; each failure names the files and the remedy."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHERS = sorted((ROOT / "examples").rglob("*.py")) + sorted((ROOT / "tools").rglob("*.py"))
EVERYTHING = [*SOURCES, *TESTS, *OTHERS]
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
POSITIONAL_MAX = 4
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BANNED_NAMES = {"utils", "common", "helpers", "manager", "base", "misc"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
MOCKS = re.compile(r"\b(MagicMock|AsyncMock|unittest\.mock|fakeredis)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Module(NamedTuple):
    """What the rules ask of a module; its whole tree is not kept."""

    says: bool
    functions: tuple[tuple[str, int, tuple[str, ...]], ...]
    """Names, lines, and those parameters that may be positional."""
    silent: tuple[str, ...]
    """Public functions and classes without a docstring."""


@cache
def module_of(path):
    tree = ast.parse(path.read_text())
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            lines = (node.end_lineno or 0) - node.lineno + 1
            names = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
            functions.append((node.name, lines, names))
    public = [node for node in tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    silent = [node.name for node in public if not ast.get_docstring(node)]
    return Module(
        says=bool(ast.get_docstring(tree)),
        functions=tuple(functions),
        silent=tuple(name for name in silent if not name.startswith("_")),
    )


def told(paths, faults_of):
    """A line for each fault of a file. A rule is one test: one a file and rule cost more than all else here."""
    assert paths
    return "\n".join(f"{name_of(path)}: {fault}" for path in paths for fault in faults_of(path))


def test_a_module_is_of_a_readable_size_and_says_what_it_is_for():
    def faults(path):
        lines = path.read_text().count("\n")
        if lines > MODULE_LINES_MAX:
            yield f"{lines} lines: make it a folder of the same name"
        if not module_of(path).says:
            yield "say in a docstring what the module is for"
        if path.stem in BANNED_NAMES:
            yield f"{path.stem} is no name: use the field's own word"

    assert told(EVERYTHING, faults) == ""


def test_a_function_is_of_a_readable_size():
    def faults(path):
        for name, lines, _ in module_of(path).functions:
            if lines > FUNCTION_LINES_MAX:
                yield f"{name}: {lines} lines, split it"

    assert told(EVERYTHING, faults) == ""


def test_many_parameters_are_keyword_only():
    def faults(path):
        for name, _, names in module_of(path).functions:
            if len(names) > POSITIONAL_MAX:
                yield f"{name}{names}: put a * before some"

    assert told(SOURCES, faults) == ""


def test_public_functions_and_classes_have_docstrings():
    def faults(path):
        for name in module_of(path).silent:
            yield f"{name}: say its effect or answer in one line"

    assert told(SOURCES, faults) == ""


def test_nothing_is_left_unfinished():
    def faults(path):
        text = path.read_text()
        if UNFINISHED.search(text):
            yield "finish it, or open an issue and remove the mark"
        if MOCKS.search(text):
            yield "use the real engine: tests/conftest.py has one running"

    assert told([path for path in EVERYTHING if path != Path(__file__)], faults) == ""


def test_tests_do_not_sleep_to_let_things_settle():
    def faults(path):
        for sleep in re.findall(r"(?:asyncio|time)\.sleep\((?!0\))[^)]*\)", path.read_text()):
            yield f"{sleep}: wait for a condition with a deadline (wait_until)"

    waits = {ROOT / "tests" / "kit" / name for name in ("processes.py", "waiting.py")}
    assert told([path for path in TESTS if path not in {Path(__file__), *waits}], faults) == ""


def test_the_repository_speaks_of_the_product_alone():
    hosts = re.compile("pypi" + r"\.org|python" + r"hosted|registry\.npm|deb\." + "debian")
    for path in [*EVERYTHING, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]:
        found = hosts.search(path.read_text())
        assert not found, f"{name_of(path)} names a package registry: {found}"
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock, "the lock must work with whatever index pip is configured for"
