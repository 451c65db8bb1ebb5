"""The gate for errors that nobody looks at can fail."""

from __future__ import annotations

import textwrap

import pytest
from tests.kit.processes import HeadraceProcess

FORGETS = """
import asyncio
from headrace import Headrace
app = Headrace()

async def fail():
    raise ValueError("nobody looks")

async def forget():
    task = asyncio.create_task(fail())
    await asyncio.wait({task})

asyncio.run(forget())
"""


def test_a_process_that_forgot_an_error_fails_its_test(tmp_path):
    (tmp_path / "forgets.py").write_text(textwrap.dedent(FORGETS))
    process = HeadraceProcess(["work", "forgets:app"], folder=tmp_path)
    process.wait_exit()
    with pytest.raises(AssertionError, match="never read"):
        process.end()
