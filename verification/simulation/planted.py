"""Planted bugs: faults that a simulation must find, each a change of a few lines of one file.

python -m verification.simulation.planted              search all; print the seed of each
python -m verification.simulation.planted NAME         one

`plant` installs an import hook for a Python file, so it must run before the file is imported; a Lua
library is sent in its changed form. The table is `planted.toml`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_name("planted.toml")
SEEDS_MAX: Final = 40
"""Where a search ends; a later pinned seed is run too."""
SEARCH_MAX_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one file."""

    file: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """The module of the file."""
        return self.file.removeprefix("src/").removesuffix(".py").replace("/", ".")

    def apply(self, text: str) -> str:
        """The changed text of the file."""
        count = text.count(self.old)
        assert count == 1, f"{self.old!r} is {count} times in {self.file}"
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug(Change):
    """A planted bug, and the seed that is known to find it."""

    name: str
    room: str
    seed: int
    hours: float
    finding: str
    """The kind of the finding that it causes."""
    also: Sequence[Mapping[str, str]] = ()
    """Further changes, of lines that prevent the same harm."""


def bugs() -> list[Bug]:
    """All planted bugs."""
    return [Bug(**row) for row in tomllib.loads(TABLE.read_text())["bug"]]


def plant(name: str) -> None:
    """Change the bug's files for this interpreter. Raises: KeyError for an unknown name."""
    bug = {one.name: one for one in bugs()}[name]
    for change in (bug, *(Change(**each) for each in bug.also)):
        if change.file.endswith(".lua"):
            _plant_lua(change)
        else:
            assert change.module not in sys.modules, f"{change.module} is imported already"
            sys.meta_path.insert(0, _Finder(change))


def _plant_lua(change: Change) -> None:
    from headrace.engines import functions

    text, found = (ROOT / change.file).read_text(), functions.find_libraries
    changed = change.apply(text)

    def find_libraries(packages: tuple[str, ...]) -> list[functions.Library]:
        return [
            functions.Library(each.name, changed if each.code == text else each.code)
            for each in found(packages)
        ]

    functions.find_libraries = find_libraries


class _Loader(SourceFileLoader):
    def __init__(self, change: Change, path: str) -> None:
        super().__init__(change.module, path)
        self._change = change

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source; the cached file has the real one."""
        changed = self._change.apply(Path(self.path).read_text())
        code: CodeType = compile(changed, self.path, "exec")
        return code


class _Finder(MetaPathFinder):
    def __init__(self, change: Change) -> None:
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any | ModuleSpec | None:
        """The changed module alone."""
        if fullname != self._change.module:
            return None
        file = str(ROOT / self._change.file)
        return spec_from_file_location(fullname, file, loader=_Loader(self._change, file))


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the simulation in an interpreter of its own."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "verification.simulation", *arguments],
        capture_output=True,
        text=True,
        timeout=SEARCH_MAX_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )


def simulate_bug(bug: Bug, seeds: str) -> subprocess.CompletedProcess[str]:
    """Run seeds with the bug, until one finds something."""
    words = ("--seeds", seeds, "--hours", str(bug.hours), "--plant", bug.name, "--no-shrink")
    return simulate(bug.room, *words)


def main() -> int:
    """Search the bugs that the arguments name; return 1 if one is not found."""
    are_all_found = True
    for bug in bugs():
        if sys.argv[1:] and bug.name not in sys.argv[1:]:
            continue
        ended = simulate_bug(bug, f"1-{SEEDS_MAX}")
        if ended.returncode == 0 and bug.seed > SEEDS_MAX:
            ended = simulate_bug(bug, str(bug.seed))
        lines = ended.stdout.splitlines()
        places = [place for place, line in enumerate(lines) if " findings" in line]
        is_found = ended.returncode == 1 and bool(places)
        are_all_found = are_all_found and is_found
        text = "\n  ".join(lines[places[-1] : places[-1] + 3]) if is_found else "not found"
        print(f"{bug.name}: {text}{'' if places else ended.stderr}", flush=True)
    return int(not are_all_found)


if __name__ == "__main__":
    sys.exit(main())
