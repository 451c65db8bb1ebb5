"""Scopes of the routes of media."""

from __future__ import annotations

from typing import Final

READ: Final = {"scope": "media:read"}
WRITE: Final = {"scope": "media:write"}
