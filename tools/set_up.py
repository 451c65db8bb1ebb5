"""Set up a Python environment from a lock file, with lines of progress.

    python3 tools/set_up.py .venv requirements-demo.lock

Runs on the distribution's Python before anything is installed, so it uses the standard library
alone. pip verifies the hash of every package. Its output is kept and printed if it fails.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

PYTHON_MIN: Final = (3, 11)
SEEN: Final = ("Collecting ", "Processing ", "Requirement already satisfied: ", "Ignoring ")
"""How pip begins the line of each package."""
TERMINAL_EVERY_S: Final = 1.0
LINE_EVERY_S: Final = 10.0
CLEARED: Final = "\r\033[K"


def count_packages(lock: Path) -> int:
    """Number of packages that a lock file names."""
    return sum("==" in line and not line[0].isspace() for line in lock.read_text().splitlines())


class Progress:
    """The progress of the set-up, with the time that it has taken.

    On a terminal one line changes every second. Elsewhere a line is printed every ten seconds, so
    that a slow download looks different from one that hangs.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._begin_s = time.monotonic()
        self._is_terminal = sys.stdout.isatty()
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, daemon=True)
        self._print()
        self._ticking.start()

    def set(self, text: str) -> None:
        """Change the text, which is printed at the next tick."""
        self._text = text

    def end(self, text: str) -> None:
        """Print the last line."""
        self._ended.set()
        self._ticking.join()
        print(f"{CLEARED if self._is_terminal else ''}{text}", flush=True)

    @property
    def took_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin_s

    def _tick(self) -> None:
        while not self._ended.wait(TERMINAL_EVERY_S if self._is_terminal else LINE_EVERY_S):
            self._print()

    def _print(self) -> None:
        text = f"{self._text} ({self.took_s:.0f} s)"
        if self._is_terminal:
            print(f"{CLEARED}{text}", end="", flush=True)
        else:
            print(text, flush=True)


def install(python: Path, lock: Path, progress: Progress) -> None:
    """Install the packages of a lock file and this project; exits with pip's output on failure."""
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    packages = count_packages(lock)
    progress.set(f"Downloading: 0 of {packages} packages of {lock.name} ...")
    seen, is_unpacking = 0, False

    def show(line: str) -> None:
        nonlocal seen, is_unpacking
        seen += line.startswith(SEEN)
        is_unpacking |= line.startswith("Installing collected")
        if is_unpacking:
            progress.set(f"Unpacking {packages} packages ...")
        else:
            text = f"{min(seen, packages)} of {packages} packages of {lock.name}"
            progress.set(f"Downloading: {text} ...")

    run([*pip, "--progress-bar", "off", "--require-hashes", "-r", lock], progress, show)
    progress.set("Installing Headrace from this folder ...")
    run([*pip, "--no-deps", "--no-build-isolation", "--editable", "."], progress)
    progress.end(f"Set-up ended after {progress.took_s:.0f} s: {packages} packages")


def run(
    command: Sequence[str | Path], progress: Progress, show: Callable[[str], None] | None = None
) -> None:
    """Run a command of pip and `show` its lines; exit with all of them if it fails."""
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            lines.append(line)
            if show is not None:
                show(line)
    if running.returncode:
        progress.end("Set-up failed:")
        sys.exit("".join(lines))


def main() -> None:
    """Create the environment of the first argument with the lock file of the second."""
    if sys.version_info < PYTHON_MIN:
        sys.exit(
            f"Headrace needs Python 3.11 or newer, this is {sys.version.split()[0]}:"
            " name a newer one with make PYTHON=python3.x"
        )
    folder, lock = Path(sys.argv[1]), Path(sys.argv[2])
    progress = Progress(f"Creating the Python environment {folder} ...")
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError:
        progress.end("Set-up failed:")
        sys.exit("Python's venv has no pip: on Debian or Ubuntu run apt-get install python3-venv")
    install(folder / "bin" / "python", lock, progress)


if __name__ == "__main__":
    main()
