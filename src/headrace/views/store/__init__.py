"""The truth of views in PostgreSQL: one function a named query, rows in, model out; begins no transaction itself.

The moves that must hold together (a flush, a deletion, a change of class) are functions of the database, each one
statement; all of them hold the row of the shard, so they come one after the other.
"""

from __future__ import annotations

from headrace.views.store import series, shards, totals

__all__ = ["series", "shards", "totals"]
