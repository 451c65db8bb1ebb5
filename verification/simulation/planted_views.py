"""Bugs planted in views and the feed, which the simulation must find.

python -m verification.simulation.planted_views              search all; print the seed of each
python -m verification.simulation.planted_views NAME         one

A bug replaces text in a source file. Functions of a loaded module get the code of the changed file
while the bug is planted; a Lua library is sent in its changed form.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

from headrace.engines import functions
from verification.simulation.__main__ import SCENARIOS
from verification.simulation.run import Outcome, Scenario, run_seed
from verification.simulation.world import World, repository

TABLE: Final = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True)
class Bug:
    """A planted bug, and a seed that finds it."""

    name: str
    file: str
    old: str
    new: str
    room: str
    seeds_max: int
    seed: int = 0
    """0: none is known."""
    hours: float = 0.05


def bugs(table: Path = TABLE) -> list[Bug]:
    """All planted bugs of a table."""
    return [Bug(**fields) for fields in tomllib.loads(table.read_text())["bug"]]


def scenario_of(room: str) -> Callable[[World], Scenario]:
    """The class of a room's scenario."""
    module, _, name = SCENARIOS[room].partition(":")
    kind: Callable[[World], Scenario] = getattr(import_module(module), name)
    return kind


@contextmanager
def planting(bug: Bug) -> Iterator[None]:
    """Plant a bug in this interpreter until the end of the block."""
    path = repository() / bug.file
    text = path.read_text()
    assert text.count(bug.old) == 1, f"{bug.name}: expected its text once in {bug.file}"
    changed = text.replace(bug.old, bug.new.lstrip("\n"))
    put_back = (_plant_lua if path.suffix == ".lua" else _plant_python)(bug, text, changed)
    try:
        yield
    finally:
        put_back()


def _plant_lua(_bug: Bug, text: str, changed: str) -> Callable[[], Any]:
    found = functions.find_libraries

    def find_libraries(packages: tuple[str, ...]) -> list[functions.Library]:
        return [
            functions.Library(each.name, changed if each.code == text else each.code)
            for each in found(packages)
        ]

    functions.find_libraries = find_libraries
    return lambda: setattr(functions, "find_libraries", found)


def _plant_python(bug: Bug, text: str, changed: str) -> Callable[[], Any]:
    name = bug.file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    functions = dict(_functions(vars(import_module(name)), name))
    old, new = (dict(_codes(compile(each, bug.file, "exec"))) for each in (text, changed))
    names = [each for each in functions.keys() & new.keys() if _differ(old[each], new[each])]
    assert names, f"{bug.name}: no function of {bug.file} differs"
    before = [(functions[each], functions[each].__code__) for each in names]
    for each in names:
        functions[each].__code__ = new[each]

    def put_back() -> None:
        for function, code in before:
            function.__code__ = code

    return put_back


def _differ(old: CodeType, new: CodeType) -> bool:
    """Whether the instructions differ, or those of functions inside."""
    both = [(code.co_code, code.co_names, str(code.co_consts)) for code in (old, new)]
    return both[0] != both[1]


def _functions(owner: Any, module: str) -> Iterator[tuple[str, FunctionType]]:
    """The functions and methods of a module by their names in code."""
    for value in owner.values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield function.__qualname__, function
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module)


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """All code inside a module's code, by name."""
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield value.co_qualname, value
            yield from _codes(value)


def search(bug: Bug) -> Outcome | None:
    """The first seed up to `seeds_max` that finds the bug."""
    with planting(bug):
        for seed in range(1, bug.seeds_max + 1):
            outcome = run_seed(scenario_of(bug.room), seed, hours=bug.hours)
            if outcome.findings:
                return outcome
    return None


def main() -> int:
    """Search the bugs that the arguments name; return 1 if one is not found."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    is_missing = False
    for bug in bugs():
        if sys.argv[1:] and bug.name not in sys.argv[1:]:
            continue
        found = search(bug)
        is_missing = is_missing or found is None
        text = f"seed {found.seed}: {found.findings[0]}" if found is not None else "not found"
        print(f"{bug.name}: {text}", flush=True)
    return int(is_missing)


if __name__ == "__main__":
    sys.exit(main())
