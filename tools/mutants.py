"""Measure how many small faults the tests detect in the modules that carry the promises.

A mutant is a copy of the package with one operator, number or keyword changed. It is killed if one
of the tests that `mutants.toml` lists for its module fails. A survivor is a line that no test
checks, or a change without effect. The choice is by seed, so a run can be repeated.

    python -m tools.mutants leases --sample 25 --seed 1

"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
MAP: Final = Path(__file__).with_suffix(".toml")
SWAPS: Final = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "<>": "=",
    "~=": "==",
    "+": "-",
    "-": "+",
    "+=": "-=",
    "-=": "+=",
    "and": "or",
    "or": "and",
    "min": "max",
    "max": "min",
    "least": "greatest",
    "greatest": "least",
    "true": "false",
    "false": "true",
    "not": "",
}
TOKEN: Final = re.compile(
    r"""
    (?P<skip> \"\"\".*?\"\"\" | '''.*?''' | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
      | ^[ \t]*(?:from|import|def|async[ ]def|class|local[ ]function|CREATE|DROP|COMMENT)\b[^\n]*
      | ->|=>|::|/\*.*?\*/ )
    | (?P<operator> <=|>=|==|!=|<>|~=|\+=|-=|<|>|\+|-
      | \b(?:and|or|not|min|max|least|greatest|true|false)\b )
    | (?P<number> (?<![\w.$])\d+(?![\w.]) )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
COMMENTS: Final = {
    ".py": re.compile(r"\#[^\n]*"),
    ".sql": re.compile(r"--[^\n]*"),
    ".lua": re.compile(r"--[^\n]*"),
}


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file."""

    path: Path
    start: int
    old: str
    new: str

    def text(self) -> str:
        """The file's text with the change."""
        source = self.path.read_text()
        return source[: self.start] + self.new + source[self.start + len(self.old) :]

    def describe(self) -> str:
        """Place, change and line."""
        source = self.path.read_text()
        line = source.count("\n", 0, self.start) + 1
        here = source.splitlines()[line - 1].strip()
        name = self.path.relative_to(ROOT)
        return f"{name}:{line}: {self.old!r} -> {self.new!r} in `{here}`"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change of a file that still compiles."""
    source = path.read_text()
    comment = COMMENTS[path.suffix]
    blank = (
        comment.sub(lambda found: " " * len(found[0]), source) if path.suffix != ".py" else source
    )
    if path.suffix == ".py":
        blank = _without_comments(source)
    for found in TOKEN.finditer(blank):
        if found["operator"]:
            old = found["operator"]
            new = SWAPS[old.lower()]
            new = new.capitalize() if old in {"True", "False"} else new
        elif found["number"]:
            old = found["number"]
            new = str(int(old) + 1)
        else:
            continue
        mutant = Mutant(path, found.start(), old, new)
        if path.suffix != ".py" or _compiles(mutant.text()):
            yield mutant


def _without_comments(source: str) -> str:
    """The source with comments blanked; `#` inside a string stays."""
    pattern = re.compile(
        r'""".*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\#[^\n]*', re.DOTALL
    )
    return pattern.sub(lambda m: " " * len(m[0]) if m[0][0] == "#" else m[0], source)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def run_tests(tests: list[str], source: Path, timeout_s: float) -> bool:
    """Whether all `tests` pass on the package in `source`.

    A run over `timeout_s` counts as failed.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s) == 0
    except subprocess.TimeoutExpired:
        # The cleanup process of the run ends what the tests started.
        process.kill()
        process.wait()
        return False


def measure(
    heart: dict[str, Any], sample: int, seed: int, folder: Path
) -> tuple[int, list[Mutant]]:
    """Number of mutants tried, and the survivors.

    Raises: RuntimeError if the tests fail on the unchanged package.
    """
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    began_s = time.monotonic()
    if not run_tests(heart["tests"], source, 3600):
        raise RuntimeError(f"{heart['tests']}: the tests fail on the unchanged package")
    timeout_s = 60 + 4 * (time.monotonic() - began_s)
    every = [mutant for name in heart["sources"] for mutant in mutants_of(ROOT / "src" / name)]
    chosen = random.Random(seed).sample(every, min(sample, len(every)))
    survivors = []
    for mutant in chosen:
        target = source / mutant.path.relative_to(ROOT / "src")
        target.write_text(mutant.text())
        survived = run_tests(heart["tests"], source, timeout_s)
        shutil.copy(mutant.path, target)
        print("survived" if survived else "killed  ", mutant.describe(), flush=True)
        if survived:
            survivors.append(mutant)
    return len(chosen), survivors


def main() -> None:
    """Print a line per mutant, and the share that was killed per module."""
    hearts = tomllib.loads(MAP.read_text())
    parser = argparse.ArgumentParser(description="Measure how many small faults the tests detect.")
    parser.add_argument("hearts", nargs="*", metavar="NAME", help=f"one of {', '.join(hearts)}")
    parser.add_argument("--sample", type=int, default=25, help="mutants per name (25)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in options.hearts or hearts:
        with tempfile.TemporaryDirectory() as folder:
            tried, survivors = measure(hearts[name], options.sample, options.seed, Path(folder))
        print(f"{name}: {tried - len(survivors)} of {tried} killed", flush=True)


if __name__ == "__main__":
    main()
