"""The processes of a node, and how each serves its clients.

`headrace media serve` starts a supervisor with N workers and, on a node with disks, one filler. A
worker is an epoll loop (`node`) with a state machine for each client (`connection`). Requests share
a `request_context`.

    serving          `serve`: one worker in this process; `run_worker`: one of several
    supervisor       the parent: checks the setup, starts and restarts processes, adds up metrics
    ipc_reports      reports of child processes to the parent
    socket_io        a client's socket and its rate limit; listening sockets
    tls_io           a client's socket with TLS; the certificate
    node             accepts clients and schedules them
    connection       one client: states, deadlines, bounds
    timing           measures of one request and its answer
    access_log       one line for each answer, written by a thread
    request_context  admission (hop, signature, key) and sources
    native_plane     the control side of the native data plane, and its peers
    native_library   its C library
    open_request     from an admitted request to its first bytes
    variants         makes missing variants of images, in `variant_child`
    bodies           spans of files and blocks
"""

from __future__ import annotations

from headrace.media.worker.serving import serve

__all__ = ["serve"]
