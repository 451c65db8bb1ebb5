"""Switch off each security control in turn, and require that its tests fail.

`planted.toml` lists the controls of `docs/reference/security-controls.md`. Each has patches: a
file, the text that carries the control, and a text without it. The tests run on a copy of the
repository with one patch applied. A patch that all tests survive is a control without a test.

    python -m tools.planted [NAME ...]

"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
MAP: Final = Path(__file__).with_suffix(".toml")
TIMEOUT_S: Final = 900
LEFT_OUT: Final = (".git", ".venv*", ".*_cache", "__pycache__", ".hypothesis", "build", "*-data")
"""Parts of the repository that no test of a control needs."""


@dataclass(frozen=True)
class Patch:
    """A control that is switched off: `old` occurs once in `file`."""

    control: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def text(self) -> str:
        """The file's text without the control. Raises: ValueError if `old` is not there once."""
        source = (ROOT / self.file).read_text()
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.control}: {self.file} has the patched text {source.count(self.old)} times:"
                f" correct {MAP.name}: {self.old!r}"
            )
        return source.replace(self.old, self.new)


def patches() -> list[Patch]:
    """All patches, in the order of the file."""
    return [
        Patch(name, tests=tuple(one.pop("tests")), **one)
        for name, control in tomllib.loads(MAP.read_text()).items()
        for one in control["patch"]
    ]


def log_of(folder: Path) -> Path:
    """The output of the last tests."""
    return folder.with_name("tests.log")


def do_pass(tests: tuple[str, ...], folder: Path) -> bool:
    """Whether all `tests` pass in a copy of the repository. A run over TIMEOUT_S has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    with log_of(folder).open("wb") as log:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder / "src")},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        # The cleanup process of the run ends what the tests started.
        process.kill()
        process.wait()
        return False


def is_detected(patch: Patch, folder: Path) -> bool:
    """Apply a patch in the copy, run its tests, and undo it."""
    target = folder / patch.file
    target.write_text(patch.text())
    try:
        return not do_pass(patch.tests, folder)
    finally:
        shutil.copy(ROOT / patch.file, target)


def main() -> None:
    """Print a line per patch; exit with 1 if a control can be switched off unnoticed."""
    parser = argparse.ArgumentParser(description="Switch off each security control in turn.")
    parser.add_argument("controls", nargs="*", metavar="NAME", help="default: all of them")
    names = parser.parse_args().controls
    chosen = [patch for patch in patches() if not names or patch.control in names]
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "headrace"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        tests = tuple(dict.fromkeys(test for patch in chosen for test in patch.tests))
        if not do_pass(tests, folder):
            sys.exit(f"the tests fail on the unchanged repository:\n{log_of(folder).read_text()}")
        missed = []
        for patch in chosen:
            found = is_detected(patch, folder)
            print("detected" if found else "missed  ", f"{patch.control}: {patch.file}", flush=True)
            missed += [] if found else [patch.control]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} detected", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
