"""Scopes of the routes of the feed."""

from __future__ import annotations

from typing import Final

READ: Final = {"scope": "feed:read"}
WRITE: Final = {"scope": "feed:write"}
