"""Rules of the code that a test can check. Each failure names the files and the fix."""

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
MODULE_LINES_MIN = 60
LINE_CHARACTERS_MAX = 100
FUNCTION_LINES_MAX = 70
POSITIONAL_MAX = 4
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BANNED_NAMES = {"utils", "common", "helpers", "manager", "base", "misc"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
SMALL = {
    "headrace/__main__.py": "the command; Python gives the name",
    "headrace/feed/service.py": "the public attributes of the room",
    "headrace/fetch/http/requests.py": "parsing shared by all routes of the room",
    "headrace/media/worker/worker_api.py": "a protocol",
}
"""Modules under the minimum, with the reason."""
MOCKS = re.compile(r"\b(MagicMock|AsyncMock|unittest\.mock|fakeredis)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Module(NamedTuple):
    """The properties of a module that the rules check."""

    has_docstring: bool
    functions: tuple[tuple[str, int, tuple[str, ...]], ...]
    """Names, lines, and the parameters that may be positional."""
    undocumented: tuple[str, ...]
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
    undocumented = [node.name for node in public if not ast.get_docstring(node)]
    return Module(
        has_docstring=bool(ast.get_docstring(tree)),
        functions=tuple(functions),
        undocumented=tuple(name for name in undocumented if not name.startswith("_")),
    )


def faults_in(paths, faults_of):
    """One line per fault of a file. A rule is one test, because a test per file is slow."""
    assert paths
    return "\n".join(f"{name_of(path)}: {fault}" for path in paths for fault in faults_of(path))


def test_a_module_is_of_a_readable_size_and_says_what_it_is_for():
    def faults(path):
        lines = path.read_text().count("\n")
        if lines > MODULE_LINES_MAX:
            yield f"{lines} lines: move an idea of its own to another module"
        if not module_of(path).has_docstring:
            yield "add a docstring with the purpose of the module"
        if path.stem in BANNED_NAMES:
            yield f"{path.stem} is not a name: use the field's term"

    assert faults_in(EVERYTHING, faults) == ""


def test_small_modules_have_a_reason():
    """A module with a single importer usually belongs to that importer."""
    sizes = {path: path.read_text().count("\n") for path in SOURCES if path.name != "__init__.py"}
    small = {
        str(path.relative_to(ROOT / "src"))
        for path, lines in sizes.items()
        if lines < MODULE_LINES_MIN
    }
    assert small == set(SMALL), "merge it into its importer, or give the reason in SMALL"


def test_lines_of_sql_and_lua_are_short():
    """Ruff checks those of Python."""

    def faults(path):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > LINE_CHARACTERS_MAX:
                yield f"line {number} has {len(line)} characters, at most {LINE_CHARACTERS_MAX}"

    sources = [path for kind in ("sql", "lua") for path in (ROOT / "src").rglob(f"*.{kind}")]
    assert faults_in(sources, faults) == ""


def test_a_function_is_of_a_readable_size():
    def faults(path):
        for name, lines, _ in module_of(path).functions:
            if lines > FUNCTION_LINES_MAX:
                yield f"{name}: {lines} lines, split it"

    assert faults_in(EVERYTHING, faults) == ""


def test_many_parameters_are_keyword_only():
    def faults(path):
        for name, _, names in module_of(path).functions:
            if len(names) > POSITIONAL_MAX:
                yield f"{name}{names}: put a * before some"

    assert faults_in(SOURCES, faults) == ""


def test_public_functions_and_classes_have_docstrings():
    def faults(path):
        for name in module_of(path).undocumented:
            yield f"{name}: add a docstring with its effect or value"

    assert faults_in(SOURCES, faults) == ""


def test_nothing_is_left_unfinished():
    def faults(path):
        text = path.read_text()
        if UNFINISHED.search(text):
            yield "finish it, or open an issue and remove the mark"
        if MOCKS.search(text):
            yield "use the real engine: tests/conftest.py has one running"

    assert faults_in([path for path in EVERYTHING if path != Path(__file__)], faults) == ""


def test_tests_do_not_sleep_to_let_things_settle():
    def faults(path):
        for sleep in re.findall(r"(?:asyncio|time)\.sleep\((?!0\))[^)]*\)", path.read_text()):
            yield f"{sleep}: wait for a condition with a deadline (wait_until)"

    waits = {ROOT / "tests" / "kit" / name for name in ("processes.py", "waiting.py")}
    assert faults_in([path for path in TESTS if path not in {Path(__file__), *waits}], faults) == ""


def test_the_repository_speaks_of_the_product_alone():
    hosts = re.compile("pypi" + r"\.org|python" + r"hosted|registry\.npm|deb\." + "debian")
    for path in [*EVERYTHING, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]:
        found = hosts.search(path.read_text())
        assert not found, f"{name_of(path)} names a package registry: {found}"
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock, "the lock must work with whatever index pip is configured for"
