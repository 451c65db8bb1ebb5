"""The full form of the matrix.

The rooms' own tests and the promises on servers as they are installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.own_postgres import missing_server
from tests.kit.stock_valkey import program_of

TESTS = Path(__file__).parents[1]
FOLDERS = ("promises", "jobs", "fetch", "views", "feed")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("postgres", "valkey"), [("15", "redis7"), ("16", "valkey9"), ("15", "valkey8")]
)
def test_the_rooms_tests_and_the_promises_hold(postgres, valkey):
    reason = missing_server(postgres)
    if reason or program_of(valkey) is None:
        pytest.skip(reason or f"{valkey} is not installed")
    words = ["-n", "2", "--postgres", postgres, "--valkey", valkey]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *(str(TESTS / folder) for folder in FOLDERS)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=3300,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
