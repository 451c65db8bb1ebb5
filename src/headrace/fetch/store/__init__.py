"""Queries of fetch: one function per named query, values in, values out.

A function takes a pool or a caller's transaction and starts no transaction itself; `OutcomeStore`
does.
"""

from __future__ import annotations

from headrace.fetch.store import outcomes, results, runs

__all__ = ["outcomes", "results", "runs"]
