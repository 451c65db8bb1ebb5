"""Older code of this repository that works with the present schema: there is no release yet.

It is the oldest code since a migration or a script of Valkey last changed, out of the history of
git. Side by side with the present code it is what an upgrade host by host is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.kit.processes import ROOT

GIT: Final = ("git", "-C", str(ROOT))
SCHEMA: Final = [f":(glob)src/headrace/*/{name}/**" for name in ("sql/migrations", "lua")]
IMPORTS: Final = "import headrace.cli.roles, headrace.media.worker"
TRIED: Final = 10


def find_old_code() -> list[str]:
    """Commits whose code differs from the present one and has its schema, the oldest first."""
    changes = _git("log", "-1", "--format=%H", "--", *SCHEMA).split()
    if not changes or _git("diff", "--name-only", changes[0], "--", *SCHEMA):
        return []
    later = _git("log", "--reverse", "--format=%H", f"{changes[0]}..HEAD", "--", "src").split()
    found = [changes[0], *later][:TRIED]
    return [one for one in found if _git("diff", "--name-only", one, "--", "src")]


def missing_old_code() -> str | None:
    """Why there is no older code, or None."""
    return None if find_old_code() else "git has no older code with the present schema"


def extract_old_code(folder: Path) -> Path:
    """Write the older package to `folder`; return the folder for PYTHONPATH."""
    for commit in find_old_code():
        folder.mkdir()
        archive = subprocess.run([*GIT, "archive", commit, "src"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        code = folder / "src"
        # A commit within a change may not work by itself.
        env = {"PYTHONPATH": str(code)}
        words = [sys.executable, "-c", IMPORTS]
        if not subprocess.run(words, env=env, capture_output=True, check=False).returncode:
            return code
        shutil.rmtree(folder)
    raise AssertionError(f"none of the first {TRIED} commits since the schema changed works")


def _git(*words: str) -> str:
    return subprocess.run([*GIT, *words], capture_output=True, check=False).stdout.decode()
