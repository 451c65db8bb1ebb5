"""The processes of a node, and how each serves its clients.

`headrace media serve` is a parent that keeps N workers and, where the node has disks, one filler (`crew`). A worker
is an epoll loop (`node`) of many small state machines (`connection`); what they share is its `plane`.

serving      `serve`: one worker in this process; `run_worker`: one of several, for its parent
crew         the parent: starts, restarts, drains, adds up the series
telling      what a child tells its parent
sockets      listening sockets; how many clients and workers
node         accepts, gives turns
connection   one client: its `states`, its deadlines, its bounds
exchange     one request and its answer, measured
plane        admission (hop, signature, key) and sources
shortcut     a head that was understood before: answered in one call, out of memory (`ways`: what it means)
passing      the same where another node keeps the object
opening      from an admitted request to its first bytes
bodies       spans of files and blocks on their way to a socket
channels     a socket, plain or under TLS
host, pacing, stages, tally, deadlines
"""

from __future__ import annotations

from headrace.media.worker.serving import serve

__all__ = ["serve"]
