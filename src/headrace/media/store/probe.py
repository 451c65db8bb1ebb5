"""Does a block that a socket still sends stay as it was when its frame is written anew? Asked of each disk at its start.

sendfile hands pages of the page cache to the socket, it copies nothing. What is safe with punching before writing on one file
system and kernel (4 KiB pages or folios within a block) is wrong on another (a folio over the border of two blocks: the punch
zeroes its part in place). No list of kernels can tell, so each disk is tried: two neighbouring blocks are sent to clients that
do not read, both are written anew, and then the clients read. A disk where they see anything else is served by copying.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import closing

from headrace.media.model import BLOCK_BYTES
from headrace.media.store.files import DiskFiles


def keeps_sent_bytes(files: DiskFiles, write_block: Callable[[int, bytes], None]) -> bool:
    """Whether bytes given to sockets outlive `write_block(frame, data)`. About 10 ms; writes probe blocks only."""
    first = files.superblock.frames
    try:
        return all(
            _is_kept(files, write_block, first, is_cold=is_cold) for is_cold in (False, True)
        )
    except OSError:
        # No punching there, or no loopback to try with: copying is right everywhere.
        return False


def _is_kept(
    files: DiskFiles, write_block: Callable[[int, bytes], None], first: int, *, is_cold: bool
) -> bool:
    blocks = {frame: os.urandom(4096) * (BLOCK_BYTES // 4096) for frame in (first, first + 1)}
    for frame, data in blocks.items():
        write_block(frame, data)
    if is_cold:
        os.fdatasync(files.blocks)
        offset = files.offset_of(first)
        os.posix_fadvise(files.blocks, offset, 2 * BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    sent: list[tuple[socket.socket, bytes]] = []
    try:
        for frame, data in blocks.items():
            client, count = _send_unread(files.reader, files.offset_of(frame))
            sent.append((client, data[:count]))
        for frame in blocks:
            write_block(frame, b"\xaa" * BLOCK_BYTES)
        return all(_receive(client, len(data)) == data for client, data in sent)
    finally:
        for client, _ in sent:
            client.close()


def _send_unread(descriptor: int, offset: int) -> tuple[socket.socket, int]:
    """A client that was sent a block, or as much of it as fits, and has read nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=5)
        server, _ = listener.accept()
    with closing(server):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BLOCK_BYTES)
        server.setblocking(False)
        count = 0
        try:
            while count < BLOCK_BYTES:
                moved = os.sendfile(
                    server.fileno(), descriptor, offset + count, BLOCK_BYTES - count
                )
                count += moved
                if not moved:
                    break
        except BlockingIOError:
            pass
    return client, count


def _receive(client: socket.socket, count: int) -> bytes:
    parts = []
    while count and (part := client.recv(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
