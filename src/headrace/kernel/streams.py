"""Answers without an end: what a room marks, and the server that stops reads.

A stream of events lasts as long as its reader listens. A server that stops gives requests under way some seconds to end; one
that never ends would take them all. So its handler marks the scope of the request, and the server closes such
connections at once; their readers come again, to a server that runs.
"""

from __future__ import annotations

from typing import Final

ENDLESS: Final = "headrace.endless"
"""The key in an ASGI scope."""
