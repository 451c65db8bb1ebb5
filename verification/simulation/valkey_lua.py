"""Function libraries of Valkey: the product's real Lua files, run by Lua 5.1 on a model's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from lupa import lua51

from verification.simulation.valkey_values import ErrorReply, Reply, Status

_BIT: Final = 0xFFFFFFFF


def _signed(number: int) -> int:
    """The result of Lua's `bit` library: a signed number of 32 bits."""
    number &= _BIT
    return number - (1 << 32) if number >> 31 else number


class Libraries:
    """The loaded libraries of one server start; their upvalues end with it."""

    def __init__(self, execute: Callable[[list[bytes]], Reply]) -> None:
        self.codes: dict[str, bytes] = {}
        self._execute = execute
        self._lua: Any = lua51.LuaRuntime(encoding=None, register_eval=False)
        self._table = self._lua.table_from
        self._functions: dict[bytes, tuple[Any, bool]] = {}
        world = self._lua.globals()
        world[b"bit"] = self._lua.table_from(
            {
                b"bxor": lambda a, b: _signed(int(a) ^ int(b)),
                b"band": lambda a, b: _signed(int(a) & int(b)),
                b"bnot": lambda a: _signed(~int(a)),
                b"rshift": lambda a, n: _signed((int(a) & _BIT) >> int(n)),
            }
        )
        world[b"redis"] = self._lua.table_from(
            {
                b"call": self._call,
                b"pcall": self._pcall,
                b"error_reply": lambda text: self._table({b"err": text}),
                b"register_function": self._register,
            }
        )

    def load(self, code: bytes) -> bytes:
        """Load a library; return its name. Raises: ErrorReply."""
        header, _, body = code.partition(b"\n")
        name = header.partition(b"name=")[2].strip()
        self._lua.execute(b"\n" + body)
        self.codes[name.decode()] = code
        return name

    def run(self, name: bytes, keys: list[bytes], words: list[bytes], *, reads: bool) -> Reply:
        """Call a function. Raises: ErrorReply."""
        found = self._functions.get(name)
        if found is None:
            raise ErrorReply("ERR Function not found")
        function, is_read_only = found
        if reads and not is_read_only:
            raise ErrorReply("ERR Can not execute a script with write flag using *_ro command.")
        return self._to_reply(function(self._table(keys), self._table(words)))

    def _register(self, options: Any) -> None:
        flags = options[b"flags"]
        is_read_only = flags is not None and b"no-writes" in list(flags.values())
        self._functions[bytes(options[b"function_name"])] = (options[b"callback"], is_read_only)

    def _call(self, *words: Any) -> Any:
        return self._to_lua(self._execute([_text(word) for word in words]))

    def _pcall(self, *words: Any) -> Any:
        try:
            return self._call(*words)
        except ErrorReply as error:
            return self._table({b"err": str(error).encode()})

    def _to_lua(self, reply: Reply) -> Any:
        kind = type(reply)
        if kind is bytes or kind is int:
            return reply
        if reply is None:
            return False
        if kind is list:
            return self._table([self._to_lua(each) for each in reply])
        return self._table({b"ok": bytes(reply)})

    def _to_reply(self, value: Any) -> Reply:
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, int | float):
            return int(value)
        if isinstance(value, bytes):
            return value
        error = value[b"err"]
        if error is not None:
            raise ErrorReply(error.decode())
        status = value[b"ok"]
        if status is not None:
            return Status(status)
        found, at = [], 1
        while (each := value[at]) is not None:
            found.append(self._to_reply(each))
            at += 1
        return found


def _text(word: Any) -> bytes:
    """An argument as Valkey converts it."""
    if type(word) is bytes:
        return word
    if isinstance(word, float) and word != int(word):
        return f"{word:.17g}".encode()
    return b"%d" % int(word)


def encode(reply: Reply) -> bytes:
    """A reply in the protocol RESP2."""
    kind = type(reply)
    if kind is int:
        return b":%d\r\n" % reply
    if kind is bytes:
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if reply is None:
        return b"$-1\r\n"
    if kind is Status:
        return b"+%b\r\n" % reply
    parts: Sequence[bytes] = [encode(each) for each in reply]
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def encode_error(error: ErrorReply) -> bytes:
    """An error in the protocol RESP2."""
    return b"-%b\r\n" % str(error).replace("\n", " ").encode()
