"""A stand-in for `docker`, which the harness calls: it runs its PostgreSQL and adapters natively.

The harness uses these commands only: `docker compose up|stop|start|down|exec` for PostgreSQL,
`docker build` and `docker run`. `run` replaces this process by the adapter's own command with the
environment of the call, so a signal of the harness reaches the adapter itself.

It runs as a program of its own, with the settings that `checkout.Checkout` writes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

SETTINGS_VARIABLE = "OUTSIDE_SETTINGS"
"""The JSON file with PostgreSQL's folders and the commands of the adapters."""
STOP_S = "10"
"""As long as `docker stop` waits."""


def main(words: list[str]) -> None:
    """Carry out one command of docker."""
    settings = json.loads(Path(os.environ[SETTINGS_VARIABLE]).read_text())
    match words:
        case ["compose", "up", *_]:
            Server(settings).create()
        case ["compose", "start", *_]:
            Server(settings).start()
        case ["compose", "stop", *_]:
            Server(settings).stop()
        case ["compose", "down", *_]:
            Server(settings).remove()
        case ["compose", "exec", *_, "pg_isready", "-U", _]:
            sys.exit(Server(settings).status())
        case ["build", *_]:
            pass  # `checkout` has installed what the images hold
        case ["run", *rest]:
            run(settings, rest)
        case _:
            sys.exit(f"bench.outside has no stand-in for `docker {' '.join(words)}`")


def run(settings: dict[str, Any], words: list[str]) -> NoReturn:
    """Become the adapter of the image, with variables and mounted folders of the call."""
    env, mounts = dict(os.environ), {}
    flags = iter(words)
    for flag in flags:
        if flag == "-e":
            name, _, value = next(flags).partition("=")
            env[name] = value
        elif flag == "-v":
            host, _, inside = next(flags).partition(":")
            mounts[inside] = host
        elif flag == "--network":
            next(flags)
        elif not flag.startswith("-"):
            break
    image = settings["images"][flag]
    for name, value in env.items():
        for inside, host in mounts.items():
            if value.startswith(f"{inside}/"):
                env[name] = host + value.removeprefix(inside)
    os.chdir(image["folder"])
    os.execvpe(image["command"][0], image["command"], env | image["env"])


class Server:
    """The PostgreSQL of the harness: its version, its postgresql.conf, its port, on loopback."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._programs = Path(settings["postgres_programs"])
        self._conf = settings["postgres_conf"]
        self._folder = Path(settings["postgres_folder"])
        self._port = settings["postgres_port"]
        user = settings["postgres_user"]
        self._as_user = ["setpriv", "--reuid", user, "--clear-groups"] if user else []

    def create(self) -> None:
        """Create the cluster if it is missing, and start it if it does not run."""
        if not (self._folder / "data" / "PG_VERSION").exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._as_user:
                shutil.chown(self._folder, self._as_user[2])
            self._call("initdb", "-U", "bench", "-A", "trust", "--no-sync")
        if self.status():
            self.start()

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        options = {
            "config_file": self._conf,
            "data_directory": self._folder / "data",
            "hba_file": self._folder / "data" / "pg_hba.conf",
            "ident_file": self._folder / "data" / "pg_ident.conf",
            "port": self._port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self._folder,
        }
        words = " ".join(f"-c {name}={value}" for name, value in options.items())
        self._call("pg_ctl", "-o", words, "-l", str(self._folder / "log"), "-t", "60", "start")

    def stop(self) -> None:
        """Stop it as the image does: SIGINT, and SIGQUIT after ten seconds."""
        if self.status() == 0 and self._call("pg_ctl", "-m", "fast", "-t", STOP_S, "stop", check=0):
            self._call("pg_ctl", "-m", "immediate", "-t", STOP_S, "stop")

    def remove(self) -> None:
        """Stop it and remove its data."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def status(self) -> int:
        """0 if it runs."""
        return self._call("pg_ctl", "status", check=False)

    def _call(self, program: str, *words: str, check: bool | int = True) -> int:
        command = [*self._as_user, str(self._programs / program), "-D", f"{self._folder}/data"]
        done = subprocess.run(
            [*command, *words], stdout=subprocess.DEVNULL, check=bool(check), cwd="/"
        )
        return done.returncode


if __name__ == "__main__":
    main(sys.argv[1:])
