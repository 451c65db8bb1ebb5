"""Wheel and sdist of this tree, and environments with the libraries of an extra.

Nothing is downloaded: the libraries of an environment are links to those that run the tests, of the
distributions that `headrace[EXTRA]` requires, directly or not. So a library that is used but not
required is missing there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LIBRARIES = Path(sysconfig.get_path("purelib"))
BUILD = (
    "import sys; sys.path.insert(0, 'tools'); import build_backend;"
    " print(getattr(build_backend, sys.argv[1])(sys.argv[2]))"
)


def build(hook: str, folder: Path) -> Path:
    """The wheel or sdist (`hook` of PEP 517) of this tree."""
    command = [sys.executable, "-c", BUILD, hook, str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return folder / ran.stdout.split()[-1]


def required_by(*extras: str) -> dict[str, Requirement]:
    """The direct requirements in pyproject.toml, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = list(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for text in project["optional-dependencies"][waiting.pop()]:
            needed = Requirement(text)
            if needed.name == project["name"]:
                waiting += needed.extras
            else:
                texts.append(text)
    found = [Requirement(text) for text in texts]
    return {canonicalize_name(needed.name): needed for needed in found}


def closure(*extras: str) -> set[str]:
    """The distributions that `headrace[extras]` installs, without Headrace."""
    found: set[str] = set()
    waiting = list(required_by(*extras).values())
    while waiting:
        wanted = waiting.pop()
        found.add(name := canonicalize_name(wanted.name))
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            applies = needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in {"", *wanted.extras}
            )
            if applies and (canonicalize_name(needed.name) not in found or needed.extras):
                waiting.append(needed)
    return found


def tops_of(name: str) -> set[str]:
    """The entries of a distribution in the folder of libraries."""
    return {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}


def modules_of(name: str) -> set[str]:
    """The top-level modules of a distribution."""
    return {top.partition(".")[0] for top in tops_of(name) if not top.endswith(".dist-info")}


def environment(folder: Path, *extras: str) -> Path:
    """An environment with the libraries of `extras` alone; its Python."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    site = next(folder.glob("lib/python3*/site-packages"))
    for name in closure(*extras):
        for top in tops_of(name):
            if (LIBRARIES / top).exists() and not (site / top).exists():
                (site / top).symlink_to(LIBRARIES / top)
    return folder / "bin" / "python"


def install(python: Path, wheel: Path) -> None:
    """Put the wheel there, with no index and none of its requirements."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*command, *options, str(wheel)], check=True, timeout=120)


def copy_package(source: Path, target: Path) -> None:
    """Link the Headrace of one environment into another."""
    [there] = source.parents[1].glob("lib/python3*/site-packages")
    [here] = target.parents[1].glob("lib/python3*/site-packages")
    for path in there.glob("headrace*"):
        (here / path.name).symlink_to(path)


def run(
    python: Path, *words: str, folder: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of that environment in `folder`, without access to this tree."""
    outside = ("HEADRACE_", "PYTHON")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outside)} | (env or {})
    command = [str(python), *words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
    )
