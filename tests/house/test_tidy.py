"""Rules of the code that a test can check. Each failure names the files and the fix.

`make layers` checks the imports, ruff the rest.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from headrace.engines.functions import find_libraries
from headrace.engines.migrate import find_migrations
from headrace.engines.sql import parse_queries

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "headrace"
SOURCES = sorted(SRC.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHERS = [
    path
    for name in ("examples", "tools", "verification")
    for path in sorted((ROOT / name).rglob("*.py"))
]
EVERYTHING = [*SOURCES, *TESTS, *OTHERS]
ELSEWHERE = [path for path in EVERYTHING if path != Path(__file__)]
PACKAGES = tuple(
    sorted({f"headrace.{path.parts[-4]}" for path in SRC.glob("*/sql/migrations/*.sql")})
)
MODULE_LINES_MAX, MODULE_LINES_MIN = 500, 60
LINE_CHARACTERS_MAX = 100
FUNCTION_LINES_MAX = 70
POSITIONAL_MAX = 4
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BANNED_NAMES = {"utils", "common", "helpers", "manager", "base", "misc"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
MOCKS = re.compile(r"\b(MagicMock|AsyncMock|unittest\.mock|fakeredis)\b")
SLEEPS = re.compile(r"(?:asyncio|time)\.sleep\((?!0\))[^)]*\)")
REGISTRIES = re.compile("pypi" + r"\.org|python" + r"hosted|registry\.npm|deb\." + "debian")
REGISTERED = re.compile(r"^register\('(\w+)'", re.MULTILINE)
SMALL = {
    "headrace/cli/extras.py": "extras of roles, which `up` checks before it imports any role",
    "headrace/__main__.py": "the command; Python gives the name",
    "headrace/feed/service.py": "the public attributes of the room",
    "headrace/fetch/http/requests.py": "parsing shared by all routes of the room",
}
"""Modules under the minimum, with the reason."""


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


def require_none(paths, faults_of):
    """Fail with a line per fault. A rule is one test, because a test per file is slow."""
    assert paths
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in paths for fault in faults_of(path)]
    assert faults == [], "\n".join(faults)


def test_modules_and_functions_have_a_readable_size_and_modules_a_purpose():
    def faults(path):
        lines = path.read_text().count("\n")
        if lines > MODULE_LINES_MAX:
            yield f"{lines} lines: move one idea to another module"
        if not module_of(path).has_docstring:
            yield "add a docstring with the purpose of the module"
        if path.stem in BANNED_NAMES:
            yield f"{path.stem} is not a name: use the field's term"
        for name, lines, _ in module_of(path).functions:
            if lines > FUNCTION_LINES_MAX:
                yield f"{name}: {lines} lines, split it"

    require_none(EVERYTHING, faults)


def test_public_functions_have_docstrings_and_few_positional_parameters():
    def faults(path):
        for name in module_of(path).undocumented:
            yield f"{name}: add a docstring with its effect or value"
        for name, _, names in module_of(path).functions:
            if len(names) > POSITIONAL_MAX:
                yield f"{name}{names}: put a * before some"

    require_none(SOURCES, faults)


def test_small_modules_have_a_reason():
    """A module with a single importer usually belongs to that importer."""
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    small = {p for p in modules if p.read_text().count("\n") < MODULE_LINES_MIN}
    names = {str(path.relative_to(ROOT / "src")) for path in small}
    assert names == set(SMALL), "merge it into its importer, or give the reason in SMALL"


def test_lines_of_sql_and_lua_are_short():
    """Ruff checks those of Python."""

    def faults(path):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > LINE_CHARACTERS_MAX:
                yield f"line {number} has {len(line)} characters, at most {LINE_CHARACTERS_MAX}"

    require_none([path for kind in ("sql", "lua") for path in SRC.rglob(f"*.{kind}")], faults)


def test_nothing_is_left_unfinished():
    def faults(path):
        text = path.read_text()
        if UNFINISHED.search(text):
            yield "finish it, or open an issue and remove the mark"
        if MOCKS.search(text):
            yield "use the real engine: tests/conftest.py has one running"

    require_none(ELSEWHERE, faults)


def test_tests_do_not_sleep_until_something_has_happened():
    def faults(path):
        for sleep in SLEEPS.findall(path.read_text()):
            yield f"{sleep}: wait for a condition with a deadline (wait_until)"

    waits = {ROOT / "tests" / "kit" / name for name in ("processes.py", "waiting.py")}
    # Sleeps in virtual time take none.
    waits |= set((ROOT / "tests" / "simulation").glob("*.py"))
    require_none([path for path in TESTS if path not in {Path(__file__), *waits}], faults)


def test_no_file_names_a_package_registry():
    def faults(path):
        for found in REGISTRIES.findall(path.read_text()):
            yield f"remove {found}"

    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    require_none([*EVERYTHING, *pages], faults)
    for lock in ROOT.glob("requirements*.lock"):
        assert "://" not in lock.read_text(), f"{lock.name} must work with pip's configured index"


def test_the_demo_installs_a_part_of_what_the_tests_install():
    def pins(name):
        return set(re.findall(r"^\S+==\S+", (ROOT / name).read_text(), re.MULTILINE))

    whole, demo = pins("requirements.lock"), pins("requirements-demo.lock")
    assert demo <= whole, f"run `make lock`: {sorted(demo - whole)}"
    assert len(demo) < len(whole) / 2


def test_every_query_and_lua_function_is_used_and_migrations_have_no_gap():
    def faults(path):
        code = "\n".join(module.read_text() for module in path.parents[1].rglob("*.py"))
        for query in parse_queries(path.read_text()):
            if not re.search(rf"SQL\.{query.name}\b", code):
                yield f"{query.name} is used nowhere: delete it"

    require_none(sorted(SRC.glob("*/sql/*.sql")), faults)
    code = "\n".join(path.read_text() for path in SOURCES)
    names = [name for lib in find_libraries(PACKAGES) for name in REGISTERED.findall(lib.code)]
    assert names
    assert [name for name in names if name not in code] == []
    for package in PACKAGES:
        numbers = [migration.number for migration in find_migrations((package,))]
        assert numbers == list(range(1, len(numbers) + 1)), package
