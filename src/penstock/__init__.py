"""Penstock, the high-load backbone of a content platform: jobs, fetch, views, feed, media."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.app import Penstock as Penstock

__version__ = "0.1.0"
__all__ = ["Penstock", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import penstock` costs nothing."""
    if name == "Penstock":
        from penstock.app import Penstock

        return Penstock
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
