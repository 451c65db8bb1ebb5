"""The verbs of media, by what they are about. `Media` is the door to all of them."""

from __future__ import annotations

from headrace.media.service.media import Media

__all__ = ["Media"]
