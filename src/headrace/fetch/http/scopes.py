"""Scopes that the routes of fetch ask for."""

from __future__ import annotations

from typing import Final

READ: Final = {"scope": "fetch:read"}
WRITE: Final = {"scope": "fetch:write"}
