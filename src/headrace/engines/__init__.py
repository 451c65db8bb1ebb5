"""The engines' floor: the only importer of drivers. Three engines and no more.

postgres   rows, the truth (asyncpg)            sql        named statements in files
valkey     hot keys, may be lost (valkey-py)    functions  its versioned Lua libraries
multiplex  the same over one shared connection, for what is asked thousands of times a second
slots      which primary of a Valkey Cluster has a key
blobs      bytes, in a folder or S3 (obstore)   migrate    schema changes, `pre` and `post`
marked     a folder made once is never made anew
embedded   all three on a new machine, out of PyPI wheels, in one data folder

`Engines` is the opened set that rooms are given (`opened`). It opens nothing by itself, and is imported on first use: a
process that only serves media never connects to PostgreSQL, nor loads its driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engines.opened import Engines as Engines


def __getattr__(name: str) -> Any:
    """Import the drivers of all engines on first use: who needs one engine imports its module."""
    if name == "Engines":
        from headrace.engines.opened import Engines

        return Engines
    raise AttributeError(f"module 'headrace.engines' has no attribute {name!r}")
