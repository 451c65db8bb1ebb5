"""The data of a Valkey server: strings, hashes, sets, sorted sets and streams, and their commands.

`Data.execute` runs one command with words of bytes and returns what the server would reply. Each
write is also an effect: the command with its random and relative parts replaced (`XADD` with its
id, expiry as a moment), as the append-only file has it. So an older state can be replayed.

A HyperLogLog is an exact set here.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any, Final

from verification.simulation.valkey_values import (
    LAST,
    NOT_A_NUMBER,
    OK,
    WRONG_TYPE,
    ErrorReply,
    Members,
    Reply,
    Sketch,
    SortedSet,
    Status,
    Stream,
    Words,
    id_text,
    number_text,
    parse_id,
)


class Data:
    """All keys of a server."""

    def __init__(self, now_ms: Callable[[], int], chance: random.Random) -> None:
        self.keys: dict[bytes, Any] = {}
        self.expires_ms: dict[bytes, int] = {}
        self.used_ms: dict[bytes, int] = {}
        """When values were last read or written; only of strings."""
        self.effects: list[tuple[bytes, ...]] = []
        """Effects since the owner took them."""
        self._now_ms = now_ms
        self._chance = chance
        self._effect: tuple[bytes, ...] | None = None

    def copy(self) -> Data:
        """An equal copy."""
        other = Data(self._now_ms, self._chance)
        other.keys = {key: _copied(value) for key, value in self.keys.items()}
        other.expires_ms = dict(self.expires_ms)
        other.used_ms = dict(self.used_ms)
        return other

    def execute(self, words: Words) -> Reply:
        """Run one command. Raises: ErrorReply."""
        entry = COMMANDS.get(words[0].upper())
        if entry is None:
            raise ErrorReply(f"ERR unknown command '{words[0].decode()}'")
        run, is_write = entry
        self._effect = None
        reply = run(self, words)
        if is_write:
            self.effects.append(self._effect or tuple(words))
        return reply

    def replay(self, effect: tuple[bytes, ...]) -> None:
        """Repeat an effect."""
        COMMANDS[effect[0].upper()][0](self, list(effect))

    # Keys

    def find(self, key: bytes, kind: type[Any]) -> Any:
        """The value of a key, or None. Raises: ErrorReply if it has another type."""
        value = self.keys.get(key)
        if value is None:
            return None
        if self._has_expired(key):
            return None
        if type(value) is not kind:
            raise ErrorReply(WRONG_TYPE)
        return value

    def make(self, key: bytes, kind: type[Any]) -> Any:
        """The value of a key, created if it is missing."""
        value = self.find(key, kind)
        if value is None:
            value = self.keys[key] = kind()
        return value

    def remove(self, key: bytes) -> int:
        """Delete a key. Return 1 if it existed."""
        self._has_expired(key)
        self.expires_ms.pop(key, None)
        self.used_ms.pop(key, None)
        return int(self.keys.pop(key, None) is not None)

    def _has_expired(self, key: bytes) -> bool:
        at_ms = self.expires_ms.get(key)
        if at_ms is None or at_ms > self._now_ms():
            return False
        del self.expires_ms[key]
        self.keys.pop(key, None)
        self.used_ms.pop(key, None)
        return True

    def _drop_if_empty(self, key: bytes) -> None:
        if not self.keys[key]:
            self.remove(key)

    # Commands of keys and strings

    def _del(self, words: Words) -> int:
        return sum(self.remove(key) for key in words[1:])

    _unlink = _del

    def _exists(self, words: Words) -> int:
        return sum(key in self.keys and not self._has_expired(key) for key in words[1:])

    def _expire(self, words: Words) -> int:
        at_ms = self._now_ms() + int(words[2]) * 1000
        self._effect = (b"PEXPIREAT", words[1], b"%d" % at_ms)
        return self._pexpireat([b"PEXPIREAT", words[1], b"%d" % at_ms])

    def _pexpireat(self, words: Words) -> int:
        if words[1] not in self.keys:
            return 0
        self.expires_ms[words[1]] = int(words[2])
        return 1

    def _rename(self, words: Words) -> Reply:
        if not self._exists([b"", words[1]]):
            raise ErrorReply("ERR no such key")
        value, at_ms = self.keys[words[1]], self.expires_ms.get(words[1])
        self.remove(words[1])
        self.remove(words[2])
        self.keys[words[2]] = value
        if at_ms is not None:
            self.expires_ms[words[2]] = at_ms
        return OK

    def _get(self, words: Words) -> Reply:
        key = words[1]
        value = self.keys.get(key)
        if value is None or self._has_expired(key):
            return None
        self.used_ms[key] = self._now_ms()
        if type(value) is Sketch:
            return b"HYLL" + b",".join(sorted(value))
        if type(value) is not bytes:
            raise ErrorReply(WRONG_TYPE)
        return value

    def _mget(self, words: Words) -> Reply:
        found, now_ms = [], self._now_ms()
        for key in words[1:]:
            value = self.keys.get(key)
            if type(value) is not bytes or self._has_expired(key):
                found.append(None)
            else:
                self.used_ms[key] = now_ms
                found.append(value)
        return found

    def _set(self, words: Words) -> Reply:
        key, options = words[1], [word.upper() for word in words[3:]]
        if b"NX" in options and self._exists([b"", key]):
            self._effect = (b"PING",)
            return None
        self.expires_ms.pop(key, None)
        effect = [b"SET", key, words[2]]
        if b"EX" in options:
            at_ms = self._now_ms() + 1000 * int(words[4 + options.index(b"EX")])
            self.expires_ms[key] = at_ms
            effect += [b"PXAT", b"%d" % at_ms]
        if b"PXAT" in options:
            self.expires_ms[key] = int(words[4 + options.index(b"PXAT")])
        self.keys[key] = words[2]
        self.used_ms[key] = self._now_ms()
        self._effect = tuple(effect)
        return OK

    def _mset(self, words: Words) -> Reply:
        now_ms = self._now_ms()
        for at in range(1, len(words), 2):
            key = words[at]
            self.expires_ms.pop(key, None)
            self.keys[key], self.used_ms[key] = words[at + 1], now_ms
        return OK

    def _incrby(self, words: Words) -> int:
        value = self.find(words[1], bytes)
        try:
            number = int(value or b"0") + int(words[2])
        except ValueError:
            raise ErrorReply(NOT_A_NUMBER) from None
        self.keys[words[1]], self.used_ms[words[1]] = b"%d" % number, self._now_ms()
        return number

    def _incr(self, words: Words) -> int:
        return self._incrby([*words, b"1"])

    def _object(self, words: Words) -> int:
        if not self._exists([b"", words[2]]):
            raise ErrorReply("ERR no such key")
        # Seconds modulo 2^24: a value that was used before the clock was set back seems unused.
        return (self._now_ms() // 1000 - self.used_ms.get(words[2], 0) // 1000) % 2**24

    def _scan(self, words: Words) -> Reply:
        options = [word.upper() for word in words]
        pattern = words[options.index(b"MATCH") + 1].split(b"*")
        matches = re.compile(b".*".join(re.escape(part) for part in pattern), re.DOTALL).fullmatch
        found = [key for key in self.keys if matches(key)]
        return [b"0", [key for key in found if not self._has_expired(key)]]

    def _ping(self, _words: Words) -> Reply:
        return Status(b"PONG")

    # Hashes

    def _hget(self, words: Words) -> Reply:
        found = self.find(words[1], dict)
        return None if found is None else found.get(words[2])

    def _hmget(self, words: Words) -> Reply:
        found = self.find(words[1], dict) or {}
        return [found.get(name) for name in words[2:]]

    def _hset(self, words: Words) -> int:
        found, before = self.make(words[1], dict), len(self.keys.get(words[1]) or ())
        for at in range(2, len(words), 2):
            found[words[at]] = words[at + 1]
        return len(found) - before

    def _hsetnx(self, words: Words) -> int:
        found = self.make(words[1], dict)
        if words[2] in found:
            return 0
        found[words[2]] = words[3]
        return 1

    def _hdel(self, words: Words) -> int:
        found = self.find(words[1], dict)
        if found is None:
            return 0
        removed = sum(found.pop(name, None) is not None for name in words[2:])
        self._drop_if_empty(words[1])
        return removed

    # Sets

    def _sadd(self, words: Words) -> int:
        found = self.make(words[1], Members)
        before = len(found)
        found.update(dict.fromkeys(words[2:]))
        return len(found) - before

    def _srem(self, words: Words) -> int:
        found = self.find(words[1], Members)
        if found is None:
            return 0
        before = len(found)
        for name in words[2:]:
            found.pop(name, None)
        removed = before - len(found)
        self._drop_if_empty(words[1])
        return removed

    def _scard(self, words: Words) -> int:
        return len(self.find(words[1], Members) or ())

    def _sismember(self, words: Words) -> int:
        return int(words[2] in (self.find(words[1], Members) or ()))

    def _smembers(self, words: Words) -> Reply:
        return list(self.find(words[1], Members) or ())

    def _srandmember(self, words: Words) -> Reply:
        found = list(self.find(words[1], Members) or ())
        if len(words) == 2:
            return self._chance.choice(found) if found else None
        return self._chance.sample(found, min(len(found), int(words[2])))

    def _sinter(self, words: Words) -> Reply:
        one, other = (self.find(key, Members) or {} for key in words[1:3])
        return [name for name in one if name in other]

    def _sintercard(self, words: Words) -> int:
        one, other = (self.find(key, Members) or {} for key in words[2:4])
        limit = int(words[5]) if len(words) > 5 else 0
        count = sum(name in other for name in one)
        return min(count, limit) if limit else count

    # Sorted sets

    def _zadd(self, words: Words) -> int:
        found = self.make(words[1], SortedSet)
        return sum(found.add(float(words[at]), words[at + 1]) for at in range(2, len(words), 2))

    def _zrem(self, words: Words) -> int:
        found = self.find(words[1], SortedSet)
        if found is None:
            return 0
        removed = sum(found.remove(member) for member in words[2:])
        if not found.rows:
            self.remove(words[1])
        return removed

    def _zscore(self, words: Words) -> Reply:
        found = self.find(words[1], SortedSet)
        score = None if found is None else found.scores.get(words[2])
        return None if score is None else number_text(score)

    def _zcount(self, words: Words) -> int:
        found = self.find(words[1], SortedSet)
        if found is None:
            return 0
        first, last = found.between(words[2], words[3])
        return last - first

    def _zremrangebyscore(self, words: Words) -> int:
        found = self.find(words[1], SortedSet)
        if found is None:
            return 0
        first, last = found.between(words[2], words[3])
        for _, member in found.rows[first:last]:
            del found.scores[member]
        del found.rows[first:last]
        if not found.rows:
            self.remove(words[1])
        return last - first

    def _zrange(self, words: Words) -> Reply:
        found = self.find(words[1], SortedSet)
        if found is None:
            return []
        options = [word.upper() for word in words[4:]]
        is_reverse = b"REV" in options
        if b"BYSCORE" in options:
            low, high = (words[3], words[2]) if is_reverse else (words[2], words[3])
            first, last = found.between(low, high)
            rows = found.rows[first:last]
            if is_reverse:
                rows.reverse()
        else:
            rows = found.rows[::-1] if is_reverse else found.rows
            begin, end = (_index(word, len(rows)) for word in words[2:4])
            rows = rows[max(0, begin) : end + 1]
        if b"LIMIT" in options:
            at = 4 + options.index(b"LIMIT")
            skipped, count = int(words[at + 1]), int(words[at + 2])
            rows = rows[skipped:] if count < 0 else rows[skipped : skipped + count]
        if b"WITHSCORES" in options:
            return [word for score, member in rows for word in (member, number_text(score))]
        return [member for _, member in rows]

    # Streams

    def _xadd(self, words: Words) -> Reply:
        key, at = words[1], 2
        found = self.find(key, Stream)
        if words[at].upper() == b"NOMKSTREAM":
            at += 1
            if found is None:
                self._effect = (b"PING",)
                return None
        last = found.last if found is not None else (0, 0)
        entry = self._new_id(words[at], last)
        if entry <= last:
            raise ErrorReply(
                "ERR The ID specified in XADD is equal or smaller than the target stream top item"
            )
        found = self.make(key, Stream)
        found.ids.append(entry)
        found.lines.append(words[at + 1 :])
        found.last = entry
        self._effect = (b"XADD", key, id_text(entry), *words[at + 1 :])
        return id_text(entry)

    def _new_id(self, text: bytes, last: tuple[int, int]) -> tuple[int, int]:
        if text == b"*":
            now_ms = self._now_ms()
            return (now_ms, 0) if now_ms > last[0] else (last[0], last[1] + 1)
        if text.endswith(b"-*"):
            ms = int(text[:-2])
            return (ms, last[1] + 1) if ms == last[0] else (ms, 0)
        return parse_id(text)

    def _xdel(self, words: Words) -> int:
        found = self.find(words[1], Stream)
        removed = 0
        for text in words[2:] if found is not None else ():
            entry = parse_id(text)
            at = bisect_left(found.ids, entry)
            if found.ids[at : at + 1] == [entry]:
                del found.ids[at], found.lines[at]
                removed += 1
        return removed

    def _xrange(self, words: Words) -> Reply:
        return self._rows(words[1], words[2], words[3], words[4:], is_reverse=False)

    def _xrevrange(self, words: Words) -> Reply:
        return self._rows(words[1], words[3], words[2], words[4:], is_reverse=True)

    def _rows(
        self, key: bytes, low: bytes, high: bytes, options: Words, *, is_reverse: bool
    ) -> Reply:
        found = self.find(key, Stream)
        if found is None:
            return []
        is_open = low.startswith(b"(")
        begin = (0, 0) if low == b"-" else parse_id(low.lstrip(b"("))
        end = LAST if high == b"+" else parse_id(high, number=2**64 - 1)
        first = (bisect_right if is_open else bisect_left)(found.ids, begin)
        last = bisect_right(found.ids, end)
        count = int(options[1]) if options else last
        if is_reverse:
            first = max(first, last - count)
        else:
            last = min(last, first + count)
        rows = [[id_text(found.ids[at]), found.lines[at]] for at in range(first, last)]
        return rows[::-1] if is_reverse else rows

    def _xtrim(self, words: Words) -> int:
        """Trim exactly: what `~` permits at most."""
        found = self.find(words[1], Stream)
        if found is None:
            return 0
        removed = bisect_left(found.ids, parse_id(words[-1]))
        del found.ids[:removed], found.lines[:removed]
        return removed

    # Sketches

    def _pfadd(self, words: Words) -> int:
        is_new = words[1] not in self.keys
        found = self.make(words[1], Sketch)
        before = len(found)
        found.update(dict.fromkeys(words[2:]))
        return int(is_new or len(found) > before)

    def _pfcount(self, words: Words) -> int:
        return len(self.find(words[1], Sketch) or ())


def _index(text: bytes, length: int) -> int:
    at = int(text)
    return at + length if at < 0 else at


def _copied(value: Any) -> Any:
    if type(value) is bytes:
        return value
    if isinstance(value, Members | Sketch):
        return type(value)(value)
    return value.copy()


_READ_NAMES: Final = """
PING EXISTS GET MGET OBJECT SCAN HGET HMGET SCARD SISMEMBER SMEMBERS SRANDMEMBER SINTER
SINTERCARD ZSCORE ZCOUNT ZRANGE XRANGE XREVRANGE PFCOUNT
"""
_WRITE_NAMES: Final = """
DEL UNLINK EXPIRE PEXPIREAT RENAME SET MSET INCR INCRBY HSET HSETNX HDEL SADD SREM ZADD ZREM
ZREMRANGEBYSCORE XADD XDEL XTRIM PFADD
"""
COMMANDS: Final[dict[bytes, tuple[Callable[[Data, Words], Reply], bool]]] = {
    name.encode(): (getattr(Data, f"_{name.lower()}"), is_write)
    for names, is_write in ((_READ_NAMES, False), (_WRITE_NAMES, True))
    for name in names.split()
}
"""Commands that the product's libraries and clients use, and whether they write."""
