"""Build backend: flit's, whose wheels contain the native data plane built for this machine.

`pyproject.toml` names this module. `build_wheel` compiles the library with the C compiler of the
machine, adds it to flit's wheel and tags the wheel for the platform: `manylinux_2_34_x86_64` if its
newest symbol is of glibc 2.34. The tag has no Python version, because the library uses none of
Python. Without a C compiler the wheel is flit's, for any platform; the library is then compiled at
the first start. The sdist contains the sources only.

A wheel also has the demo, `examples/bazaar`, below `headrace/demo`, for `headrace demo`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import platform
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from flit_core import buildapi
from flit_core.buildapi import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src"
DEMO: Final = "examples/bazaar"
NATIVE: Final = "headrace/media/native"
ANY: Final = "py3-none-any"
GLIBC: Final = re.compile(rb"GLIBC_2\.([0-9]+)")
GLIBC_LEAST: Final = 17
"""The oldest glibc that installers know a tag for."""


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel of this platform, or of any if no C compiler is here. Return its name."""
    pure = Path(wheel_directory) / buildapi.build_wheel(
        wheel_directory, config_settings, metadata_directory
    )
    added = {f"headrace/demo/{path.relative_to(ROOT)}": path.read_bytes() for path in _demo_files()}
    tag = ANY
    build = _load_build()
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build.build_library(Path(folder) / build.library_name())
        except build.NativePlaneMissing as error:
            print(f"the wheel has no native data plane: {error}", file=sys.stderr)
        else:
            added[f"{NATIVE}/{library.name}"] = content = library.read_bytes()
            tag = f"py3-none-{platform_of(content)}"
    return _completed(pure, added, tag).name


def _demo_files() -> list[Path]:
    """The demo's files, in an order that gives equal wheels."""
    found = (path for path in (ROOT / DEMO).rglob("*") if path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _load_build() -> ModuleType:
    """The module that compiles the library, without the libraries that its package needs."""
    if str(SOURCE) not in sys.path:
        sys.path.insert(0, str(SOURCE))
    spec = importlib.util.spec_from_file_location("native_build", SOURCE / NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def platform_of(library: bytes) -> str:
    """The platform that can load a library of this machine, as a wheel's tag names it."""
    machine = platform.machine()
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or not os.confstr("CS_GNU_LIBC_VERSION"):
        return f"linux_{machine}"
    newest = max([GLIBC_LEAST, *(int(found) for found in GLIBC.findall(library))])
    return f"manylinux_2_{newest}_{machine}"


def _completed(pure: Path, added: dict[str, bytes], tag: str) -> Path:
    """The wheel with further files and the tag of its platform, in place of `pure`."""
    draft, target = pure.with_suffix(".new"), pure.with_name(pure.name.replace(ANY, tag))
    with zipfile.ZipFile(pure) as old, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith(".dist-info/WHEEL"):
                data = data.replace(ANY.encode(), tag.encode())
                if tag != ANY:
                    data = data.replace(b"Purelib: true", b"Purelib: false")
                wheel = data
            elif info.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines()
                kept = [line for line in lines if ".dist-info/WHEEL," not in line]
                label = info.filename.replace("RECORD", "WHEEL")
                own = [_record(name, content) for name, content in added.items()]
                own.append(_record(label, wheel))
                data = "\n".join([*kept[:-1], *own, kept[-1], ""]).encode()
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
        for name, content in added.items():
            entry = zipfile.ZipInfo(name, new.infolist()[0].date_time)
            entry.external_attr = (0o100755 if name.startswith(NATIVE) else 0o100644) << 16
            new.writestr(entry, content, zipfile.ZIP_DEFLATED)
    pure.unlink()
    return draft.rename(target)


def _record(name: str, data: bytes) -> str:
    """The line of a file in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"
