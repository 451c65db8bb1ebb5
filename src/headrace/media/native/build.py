"""Compile the native data plane with the machine's C compiler, or one from a wheel; check OpenSSL.

A wheel that was built beside a C compiler contains the library (`tools/build_backend.py`).
Otherwise it is compiled once per version of the sources, in about two seconds, into the user's
cache folder. It needs no Python headers. `ziglang` is a C compiler that pip can install, for
machines that have none. The build backend loads this module alone, so it imports only the kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from headrace.kernel.errors import Unavailable

FOLDER: Final = Path(__file__).parent
FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread")
WARNINGS: Final = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
COMPILE_S_MAX: Final = 120.0


class NativePlaneMissing(Unavailable):
    """The compiled code that serves media is not installed and cannot be compiled here."""

    code = "media.native_plane_missing"


def library_path() -> Path:
    """The built library, compiled now if necessary. Raises: NativePlaneMissing."""
    return built_library() or build_library(_cache_folder() / library_name())


def built_library() -> Path | None:
    """The built library; None if it can be compiled here. Raises: NativePlaneMissing."""
    name = library_name()
    for folder in (FOLDER, _cache_folder()):
        if (folder / name).is_file():
            return folder / name
    _compiler()
    return None


def library_name() -> str:
    """The library's file name, which differs by sources and machine."""
    return f"plane-{_digest()}-{platform.machine()}.so"


def native_tls_missing() -> str:
    """Why the library cannot serve HTTPS here; empty if it can.

    Raises: NativePlaneMissing, OSError.
    """
    return _reason("tls_missing")


def kernel_tls_missing() -> str:
    """Why the kernel does not encrypt; empty if it can. Raises: NativePlaneMissing, OSError."""
    return _reason("tls_kernel_missing")


def build_library(target: Path, *extra: str) -> Path:
    """Compile the library to `target`; `extra` are further flags. Raises: NativePlaneMissing."""
    sources = [str(path) for path in sorted(FOLDER.glob("*.c"))]
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several workers may compile at once: each its own file, the last rename wins.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            draft = Path(folder) / target.name
            command = [*_compiler(), *FLAGS, *extra, "-o", str(draft), *sources]
            made = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False
            )
            if made.returncode != 0:
                raise NativePlaneMissing(
                    f"the C code that serves media does not compile: {made.stderr}"
                )
            draft.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativePlaneMissing(
            f"the C code that serves media was not compiled: {error}"
        ) from error
    return target


def _reason(function: str) -> str:
    called = getattr(ctypes.CDLL(str(library_path())), function)
    called.restype = ctypes.c_char_p
    return (called() or b"").decode()


def _compiler() -> list[str]:
    """The command line of a C compiler. Raises: NativePlaneMissing."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NativePlaneMissing(
        "no C compiler was found for the code that serves media: install gcc, or pip install"
        " ziglang"
    )


def _cache_folder() -> Path:
    """The user's cache folder. Raises: NativePlaneMissing."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    except RuntimeError as error:
        raise NativePlaneMissing(
            "the C code that serves media has no folder to be compiled into: set XDG_CACHE_HOME"
        ) from error


def _digest() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
