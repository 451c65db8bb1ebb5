"""The program between Headrace and a child: binds the child's life to ours, then becomes the child.

Run as `python -I -S launcher.py PARENT_PID SIGNAL IDENTITY (--check PATH... | -- PROGRAM...)`;
it imports nothing of Headrace. A threaded process must not run Python between fork and exec, and
these steps work only in this order:

1. Assume the identity: `same`; `namespace:<uid>`, a user namespace in which our uid has the name of
   <uid>, without a change on the host; or `user:<uid>:<gid>`, a plain change of user.
2. Request `signal` at the end of the parent (PR_SET_PDEATHSIG). A change of credentials clears the
   request, so it follows step 1.
3. Check that the parent is still the starter, because it may have ended before step 2.
4. Execute the program. execve keeps the request unless it raises privileges.

With `--check` the exit code and standard output report whether the identity is available and can
access the paths. Sources: prctl(2), user_namespaces(7), execve(2).
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
    """Replace this process by the program; return only for `--check` or a failure."""
    parent, number, identity, mode, *rest = arguments
    try:
        assume_identity(identity)
    except OSError as error:
        sys.stdout.write(f"identity {identity} was refused: {error}\n")
        return EXIT_REFUSED
    if mode == "--check":
        return check_paths(rest)
    bind_to_parent(int(parent), int(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o077)
    try:
        os.execv(rest[0], rest)  # noqa: S606 - no shell is used
    except OSError as error:
        sys.stderr.write(f"{rest[0]} cannot be started: {error}\n")
    return EXIT_NOT_STARTED


def assume_identity(identity: str) -> None:
    """Switch to the user or namespace of `identity`. Raises: OSError."""
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
    # The group map may be written only after setgroups is denied (user_namespaces(7)).
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
    """Request signal `number` at the end of `parent`; exit if the parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(EXIT_NOT_STARTED)


def check_paths(paths: list[str]) -> int:
    """Print the first folder or file of `paths` that this identity cannot access."""
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
