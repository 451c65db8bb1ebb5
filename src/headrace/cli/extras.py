"""Which extras a role needs, and the one error that names all missing ones."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import click

from headrace.kernel.errors import needing

LIBRARIES: Final = {
    "web": ("litestar", "jinja2", "httptools"),
    "media": ("httptools", "xxhash"),
    "variants": ("pyvips",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""Libraries of an extra that the roles of a room need."""


def require_libraries(*extras: str, unless_alone: tuple[str, ...] = ()) -> None:
    """Raise ExtraMissing with all of `extras` whose libraries are not installed.

    Extras in `unless_alone` are missing, but have an error of their own with more advice.
    """
    missing = [
        extra for extra in extras if not all(map(_is_installed, LIBRARIES.get(extra, ("",))))
    ]
    if missing:
        command = click.get_current_context().command_path
        raise needing(command, *missing, *unless_alone)


def _is_installed(library: str) -> bool:
    """Whether `library` can be imported; an empty name is never installed."""
    try:
        return bool(library) and find_spec(library) is not None
    except ModuleNotFoundError:
        return False
