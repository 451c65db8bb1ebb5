"""The verbs of fetch, by what they are about. `Fetch` is the door to all of them."""

from __future__ import annotations

from headrace.fetch.service.fetch import Fetch

__all__ = ["Fetch"]
