"""Ways to make a page that need no index by time, on the same keys as ours.

The app reads the newest posts of every followed author in one pipeline and merges them; a Lua
script or a module in C does that inside Valkey.

Each is given its best: the stock client with libvalkey, the list of follows for nothing (the app),
one script by its hash.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import Any

from valkey.asyncio import Valkey

REWRITTEN_EVERY_S = 0.1
MERGE = """
local base, top, need = ARGV[1], ARGV[2], tonumber(ARGV[3])
local found = {}
for _, author in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local rows = redis.call(
    'ZRANGE', base .. 'p:' .. author, top, '0', 'BYSCORE', 'REV', 'LIMIT', 0, need, 'WITHSCORES'
  )
  for i = 1, #rows, 2 do
    found[#found + 1] = {tonumber(rows[i + 1]), rows[i]}
  end
end
table.sort(found, function(a, b)
  if a[1] ~= b[1] then return a[1] > b[1] end
  return a[2] > b[2]
end)
local reply = {}
for i = 1, math.min(need, #found) do
  reply[i] = found[i][2]
end
return reply
"""


class Merges:
    """All of them, on the index that was built at `base` (`headrace:{f:0}:`)."""

    def __init__(self, valkey_url: str, base: str) -> None:
        self.client: Any = Valkey.from_url(valkey_url)
        self._base = base
        self._script: str | None = None

    async def in_app(self, follows: Sequence[int], need: int, top: str = "+inf") -> list[str]:
        """Ids of the page after merging in Python."""
        pipeline = self.client.pipeline(transaction=False)
        for author in follows:
            key = f"{self._base}p:{author}"
            pipeline.execute_command(
                "ZRANGE", key, top, "0", "BYSCORE", "REV", "LIMIT", 0, need, "WITHSCORES"
            )
        rows = [
            (float(reply[i + 1]), reply[i])
            for reply in await pipeline.execute()
            for i in range(0, len(reply), 2)
        ]
        return [post.decode() for _, post in heapq.nlargest(need, rows)]

    async def in_lua(self, viewer: int, need: int, top: str = "+inf") -> list[str]:
        """Ids of the page after merging in Valkey."""
        if self._script is None:
            self._script = await self.client.script_load(MERGE)
        key = f"{self._base}f:{viewer}"
        found = await self.client.evalsha(self._script, 1, key, self._base, top, need)
        return [post.decode() for post in found]

    async def in_module(self, follows: Sequence[int], need: int) -> list[str]:
        """Ids of the page after merging in the module ZREVMERGE."""
        keys = [f"{self._base}p:{author}" for author in follows]
        found = await self.client.execute_command("ZREVMERGE", need, 0, 0, len(keys), *keys)
        return [post.decode() for post in found[::2]]

    async def push(self, inboxes: int, posts: range, cap: int) -> None:
        """Write posts into inboxes in turn, at most `cap` in each, as a push feed does."""
        pipeline = self.client.pipeline(transaction=False)
        for number in posts:
            key = f"{self._base}inbox:{number % inboxes}"
            pipeline.zadd(key, {f"p{number:019d}": number})
            pipeline.zremrangebyrank(key, 0, -cap - 1)
        await pipeline.execute()

    async def read_inboxes(self, inboxes: int, need: int) -> int:
        """Read a page of each inbox; how many posts that were."""
        pipeline = self.client.pipeline(transaction=False)
        for number in range(inboxes):
            pipeline.zrevrange(f"{self._base}inbox:{number}", 0, need - 1)
        return sum(len(reply) for reply in await pipeline.execute())

    async def used_bytes(self) -> int:
        """Memory that Valkey uses, without the buffers of its connections and its file."""
        while True:
            info = await self.client.info()
            if not int(info["aof_rewrite_in_progress"]):
                break
            await asyncio.sleep(REWRITTEN_EVERY_S)
        return int(info["used_memory"] - info["mem_clients_normal"] - info["mem_aof_buffer"])

    async def close(self) -> None:
        """Disconnect."""
        await self.client.aclose()
