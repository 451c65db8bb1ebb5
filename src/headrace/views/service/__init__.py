"""The verbs of views, by what they are about. `Views` is the door to all of them."""

from __future__ import annotations

from headrace.views.service.views import Views

__all__ = ["Views"]
