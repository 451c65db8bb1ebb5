"""The program between Headrace and a child: binds the child's life to ours, then becomes the child.

Run as `python -I -S launch.py <parent pid> <signal> <identity> (--check <path>... | -- <program>...)`;
it imports nothing of Headrace. It exists because a threaded process must not run Python between fork
and exec, and because the steps hold only in this order:

1. Take on the identity: `same`; `namespace:<uid>`, a user namespace in which our uid is called <uid>, so
   that PostgreSQL, which refuses root, runs as root's own files need it, and no user, file or permission
   of the host changes; or `user:<uid>:<gid>`, a plain change of user.
2. Ask for `signal` when the parent ends (PR_SET_PDEATHSIG): a change of credentials clears it, so after 1.
3. Look whether the parent still is the one that started us, since it may have ended before 2.
4. Become the program. execve keeps the request unless it raises privileges.

With `--check` it says instead, by exit code and on standard output, whether that identity can be taken on
and reaches the paths. Sources: prctl(2), user_namespaces(7), execve(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

CLONE_NEWUSER: Final = 0x10000000
PR_SET_PDEATHSIG: Final = 1
EXIT_REFUSED: Final = 3
EXIT_UNREACHABLE: Final = 4
EXIT_NOT_STARTED: Final = 126


def main(arguments: list[str]) -> int:
    """Become the program; returns only for `--check`, or when that failed."""
    parent, number, identity, mode, *rest = arguments
    try:
        take_on(identity)
    except OSError as error:
        sys.stdout.write(f"identity {identity} was refused: {error}\n")
        return EXIT_REFUSED
    if mode == "--check":
        return check_paths(rest)
    bind_to_parent(int(parent), int(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o077)
    try:
        os.execv(rest[0], rest)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{rest[0]} cannot be run: {error}\n")
    return EXIT_NOT_STARTED


def take_on(identity: str) -> None:
    """Become the user that `identity` names. Raises: OSError where the system refuses."""
    kind, *numbers = identity.split(":")
    if kind == "namespace":
        _enter_namespace(int(numbers[0]))
    elif kind == "user":
        uid, gid = (int(number) for number in numbers)
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def _enter_namespace(inner_uid: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    # A group map of our own may be written only once setgroups is given up (user_namespaces(7)).
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner_uid} {uid} 1"),
        ("gid_map", f"{inner_uid} {gid} 1"),
    ):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def bind_to_parent(parent: int, number: int) -> None:
    """End with `parent`, by signal `number`; ends at once if the parent is gone already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(EXIT_NOT_STARTED)


def check_paths(paths: list[str]) -> int:
    """Print the first folder or file on the way to `paths` that this identity cannot use."""
    for path in paths:
        parts = path.split("/")
        steps = ["/".join(parts[:count]) or "/" for count in range(1, len(parts) + 1)]
        for step in steps:
            wanted = os.X_OK if os.path.isdir(step) else os.R_OK  # noqa: PTH112 - pathlib costs 10 ms
            if not os.access(step, wanted):
                sys.stdout.write(f"{step}\n")
                return EXIT_UNREACHABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
