"""Write to a feed at random and record the answers, until the process is killed.

Writes that are refused while an engine is down are not repeated.

python written_feed.py POSTGRES_URL VALKEY_URL PREFIX FILE SEED
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from tests.kit.waiting import wait_true

from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.feed import Feed, FeedConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.kernel.errors import Unavailable
from headrace.kernel.signing import derive_key

VIEWERS = range(1, 9)
AUTHORS = range(1, 31)
KEY = derive_key("a secret of the tests, 32 characters", "cursor")


def open_feed(postgres_url, valkey_url, prefix, folder):
    """A feed and its engines."""
    config = ValkeyConfig(prefix=prefix, timeout_s=1.0)
    postgres = Postgres(postgres_url, PostgresConfig())
    line, valkey = Multiplexer(valkey_url, config), Valkey(valkey_url, config)
    engines = Engines(postgres, valkey, line, Blobs((folder / "blobs").as_uri()))
    registry = Registry()
    jobs = Jobs(postgres, JobsConfig(), registry)
    registry.bind(lambda: jobs)
    feed = Feed(engines, jobs, FeedConfig(shards=2), make_key=lambda: KEY)
    feed.register(registry)
    return feed, engines


class Writer:
    """Random writes; `told` gets a line after each answer."""

    def __init__(self, feed, seed, told):
        self.feed, self.random, self.told = feed, random.Random(seed), told
        self.name, self.made = f"w{seed}", 0
        self.posts: list[str] = []

    async def write(self):
        """One write."""
        viewer, author = self.random.choice(VIEWERS), self.random.choice(AUTHORS)
        verb = self.random.choices(
            ["post", "delete", "follow", "unfollow", "mute", "unmute"], [6, 2, 4, 2, 1, 1]
        )[0]
        if verb == "post":
            self.made += 1
            post = f"{self.name}-{self.made}"
            await self.feed.post(author, post)
            self.posts.append(post)
            self.told(f"posted {post}")
        elif verb == "delete" and self.posts:
            post = self.posts.pop(self.random.randrange(len(self.posts)))
            self.told(f"deleting {post}")
            await self.feed.delete(post)
            self.told(f"deleted {post}")
        elif verb != "delete":
            await getattr(self.feed.follows, verb)(viewer, author)


async def _is_back(feed):
    try:
        await feed.pages.marker(1)
    except Unavailable:
        return False
    return True


async def write(words):
    """Write for ever; each line is written in one write before it is true for anybody."""
    postgres_url, valkey_url, prefix, file, seed = words
    feed, _ = open_feed(postgres_url, valkey_url, prefix, Path(file).parent)
    out = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    async def write_on(number):
        writer = Writer(
            feed, int(seed) * 10 + number, lambda line: os.write(out, f"{line}\n".encode())
        )
        while True:
            try:
                await writer.write()
            except Unavailable:
                await wait_true(lambda: _is_back(feed), what="PostgreSQL is back")

    await asyncio.gather(*[write_on(number) for number in range(4)])


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1:]))
