"""Helpers for tests of applications: run due jobs, and check what was enqueued.

    await send_mail.enqueue(to="ann", text="hi")
    await assert_enqueued(app, "mail", payload={"to": "ann", "text": "hi"})
    assert await drain(app) == {"done": 1}

They use the real queue tables. From synchronous code call `app.sync(drain)(app)`.
"""

from __future__ import annotations

from headrace.testing.jobs import assert_enqueued, drain, refute_enqueued

__all__ = ["assert_enqueued", "drain", "refute_enqueued"]
