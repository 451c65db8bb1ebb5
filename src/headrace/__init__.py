"""Headrace, the high-load backbone of a content platform: jobs, fetch, views, feed, media."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.app import Headrace as Headrace

__version__ = "0.1.0"
__all__ = ["Headrace", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import headrace` costs nothing."""
    if name == "Headrace":
        from headrace.app import Headrace

        return Headrace
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
