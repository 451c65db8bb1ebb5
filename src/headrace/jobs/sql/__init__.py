"""The named queries of the jobs room."""

from __future__ import annotations

from typing import Any, Final

from headrace.engines.sql import load_queries

SQL: Final[Any] = load_queries("headrace.jobs")
