"""Engines and folder of a test, in the environment where documented programs look for them."""

from __future__ import annotations

import pytest


@pytest.fixture
def surroundings(running_engines, database_url, tmp_path, monkeypatch):
    """Set the environment and the working folder; return the URL of the database."""
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", database_url)
    monkeypatch.setenv("HEADRACE_VALKEY_URL", running_engines.endpoints.valkey_url)
    monkeypatch.setenv("HEADRACE_VALKEY_PREFIX", f"test-{tmp_path.name}")
    monkeypatch.setenv("HEADRACE_DATA_FOLDER", str(tmp_path / "data"))
    monkeypatch.setenv("HEADRACE_JOBS_POLL", "200ms")
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.chdir(tmp_path)
    return database_url
