"""Set up a Python environment from a lock file, with one line of progress.

    python3 tools/set_up.py .venv requirements-demo.lock

Runs on the distribution's Python before anything is installed, so it uses the standard library
alone. pip verifies the hash of every package. Its output is kept and printed if it fails.
"""

from __future__ import annotations

import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Final

PYTHON_MIN: Final = (3, 11)
SEEN: Final = ("Collecting ", "Processing ", "Requirement already satisfied: ", "Ignoring ")
"""How pip begins the line of each package."""


def count_packages(lock: Path) -> int:
    """Number of packages that a lock file names."""
    return sum("==" in line and not line[0].isspace() for line in lock.read_text().splitlines())


def show(text: str, *, is_last: bool = False) -> None:
    """Print the progress: on a terminal over the last line, else only the final one."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="\n" if is_last else "", flush=True)
    elif is_last:
        print(text, flush=True)


def install(python: Path, lock: Path) -> None:
    """Install the packages of a lock file and this project; exits with pip's output on failure."""
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    packages, begin_s = count_packages(lock), time.monotonic()
    commands = [
        [*pip, "--progress-bar", "off", "--require-hashes", "-r", lock],
        [*pip, "--no-deps", "--no-build-isolation", "--editable", "."],
    ]
    if not sys.stdout.isatty():
        print(f"Installing {packages} packages of {lock.name} ...", flush=True)
    seen = 0
    for command in commands:
        lines = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running:
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                seen += line.startswith(SEEN)
                if line.startswith("Installing collected"):
                    show("Unpacking ...")
                else:
                    show(f"Downloading: {min(seen, packages)} of {packages} packages ...")
        if running.returncode:
            show("Set-up failed:", is_last=True)
            sys.exit("".join(lines))
    show(
        f"Set-up ended after {time.monotonic() - begin_s:.0f} s: {packages} packages", is_last=True
    )


def main() -> None:
    """Create the environment of the first argument with the lock file of the second."""
    if sys.version_info < PYTHON_MIN:
        sys.exit(
            f"Headrace needs Python 3.11 or newer, this is {sys.version.split()[0]}:"
            " name a newer one with make PYTHON=python3.x"
        )
    folder, lock = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError:
        sys.exit("Python's venv has no pip: on Debian or Ubuntu run apt-get install python3-venv")
    install(folder / "bin" / "python", lock)


main()
