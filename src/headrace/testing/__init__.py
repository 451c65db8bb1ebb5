"""Helpers for tests of applications: run due jobs, and check what was enqueued.

    async def test_mail(headrace_app):
        await send_mail.enqueue(to="ann", text="hi")
        await assert_enqueued(headrace_app, "mail", payload={"to": "ann", "text": "hi"})
        assert await drain(headrace_app) == {"done": 1}

They use the real queue tables. From synchronous code call `app.sync(drain)(app)`. The fixture
`headrace_app` is of the pytest plugin (`headrace.testing.plugin`), which pytest loads by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.jobs import assert_enqueued, drain, refute_enqueued

__all__ = ["assert_enqueued", "drain", "refute_enqueued"]


def __getattr__(name: str) -> Any:
    """Import the helpers on first use: pytest loads this package in every project."""
    if name in __all__:
        from headrace.testing import jobs

        return getattr(jobs, name)
    raise AttributeError(f"module 'headrace.testing' has no attribute {name!r}")
