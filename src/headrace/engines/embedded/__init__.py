"""PostgreSQL 18 and Valkey 9 out of their wheels, as children of one process, in one data folder.

What a user may trust: one starter a folder; unix sockets inside the folder and no TCP; the engines end
with their starter however it ends; after `kill -9` of everything the next start recovers by itself; no
file, user, permission or shared memory file outside the folder is touched. All processes carry it out
without a monitor: the kernel's parent-death signal, one record lock, and checks of /proc by exact
executable and working directory before any process is ended.

    <folder>/layout            marks the folder as ours, with the version of this layout
    <folder>/lock              held for the starter's life; its pid inside
    <folder>/postgres, valkey  the engines' data       <folder>/blobs   objects
    <folder>/run               the two sockets, 0700   <folder>/logs    one log an engine
    <folder>/object-store      which store of objects is expected (`engines.marked`)

pair.py             start, stop, restart, wait      identity.py  which user may run PostgreSQL
postgres_server.py  initdb, settings, command       launch.py    the program between us and an engine
valkey_server.py    command                         spawn.py     one engine process and its log
folder.py, lock.py  the data folder                 leftovers.py what an earlier run left behind
machine.py          settings for memory and cores   sockets.py   paths longer than a socket's limit
"""

from __future__ import annotations

from headrace.engines.embedded.errors import (
    EngineMissing,
    FolderInUse,
    FolderUnusable,
    LeftoverAlive,
    NotRunning,
    RootRefused,
    StartFailed,
    WrongVersion,
)
from headrace.engines.embedded.pair import EmbeddedEngines, running_endpoints

__all__ = [
    "EmbeddedEngines",
    "EngineMissing",
    "FolderInUse",
    "FolderUnusable",
    "LeftoverAlive",
    "NotRunning",
    "RootRefused",
    "StartFailed",
    "WrongVersion",
    "running_endpoints",
]
