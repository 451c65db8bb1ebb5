"""A server that violates Valkey's protocol as a test requires; never replaces the real one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from libvalkey import Reader, pack_command

GREETINGS = {
    b"PING": b"+PONG\r\n",
    b"CLUSTER": b"-ERR This instance has cluster support disabled\r\n",
}


class Peer:
    """Answers each command with what `answer(peer, words)` gives: bytes, or None for nothing.

    `pieces` cuts what is sent; `writers` are the accepted connections, oldest first.
    """

    def __init__(self, answer):
        self.answer = answer
        self.pieces = lambda data: [data]
        self.asked = []
        self.writers = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.greets = True

    async def serve(self, reader, writer):
        """One connection."""
        self.writers.append(writer)
        parser = Reader()
        try:
            while True:
                await self.reading.wait()
                data = await reader.read(65536)
                if not data:
                    return
                parser.feed(data)
                while (words := parser.gets()) is not False:
                    self.asked.append(words)
                    greeting = GREETINGS.get(words[0]) if self.greets else None
                    reply = greeting or self.answer(self, words)
                    if asyncio.iscoroutine(reply):
                        reply = await reply
                    for piece in self.pieces(reply) if reply else ():
                        writer.write(piece)
                        await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    def cut(self):
        """End the newest connection."""
        self.writers[-1].transport.abort()


def bulk(text):
    """`text` as a reply."""
    return pack_command((text,)).split(b"\r\n", 1)[1]


def echo(_peer, words):
    """The last word back."""
    return bulk(words[-1])


@asynccontextmanager
async def hostile_peer(answer=echo):
    """The peer, with its address in `url`."""
    peer = Peer(answer)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.port = server.sockets[0].getsockname()[1]
    peer.url = f"valkey://127.0.0.1:{peer.port}"
    try:
        yield peer
    finally:
        server.close()
        for writer in peer.writers:
            writer.transport.abort()
