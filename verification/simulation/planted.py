"""Planted bugs: faults that a simulation must find, each a change of one line of one file.

`plant` installs an import hook, so it must run before the file is imported. The table is
`planted.toml`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_name("planted.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A planted bug, and the seed that is known to find it."""

    name: str
    room: str
    file: str
    old: str
    new: str
    seed: int
    hours: float
    finding: str
    """The kind of the finding that it causes."""

    @property
    def module(self) -> str:
        """The module of the file."""
        return self.file.removeprefix("src/").removesuffix(".py").replace("/", ".")


def bugs() -> list[Bug]:
    """All planted bugs."""
    return [Bug(**row) for row in tomllib.loads(TABLE.read_text())["bug"]]


def plant(name: str) -> Bug:
    """Change the bug's file for this interpreter. Raises: KeyError for an unknown name."""
    bug = {one.name: one for one in bugs()}[name]
    assert bug.module not in sys.modules, f"{bug.module} is imported already"
    sys.meta_path.insert(0, _Finder(bug))
    return bug


class _Loader(SourceFileLoader):
    def __init__(self, bug: Bug, path: str) -> None:
        super().__init__(bug.module, path)
        self._bug = bug

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source; the cached file has the real one."""
        text = Path(self.path).read_text()
        count = text.count(self._bug.old)
        assert count == 1, f"bug {self._bug.name}: its line is {count} times in {self.path}"
        code: CodeType = compile(text.replace(self._bug.old, self._bug.new), self.path, "exec")
        return code


class _Finder(MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any | ModuleSpec | None:
        """The changed module alone."""
        if fullname != self._bug.module:
            return None
        file = str(ROOT / self._bug.file)
        return spec_from_file_location(fullname, file, loader=_Loader(self._bug, file))
