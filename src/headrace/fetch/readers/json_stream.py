"""An incremental JSON parser: walk a document of any size, one value at a time.

The buffer holds the text that is not consumed yet: one block, or as much as one value needs, up to
1 MiB plus a block. A longer value is not decoded but can be skipped. Values are decoded by the
standard library, which also returns where a value ends.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from headrace.fetch.errors import CatalogueBroken
from headrace.fetch.readers.rows import Fault, Truncated, broken

BLOCK_BYTES: Final = 128 * 1024
VALUE_CHARACTERS_MAX: Final = 2**20
DEPTH_MAX: Final = 32
LITERAL_CHARACTERS_MAX: Final = 20
"""A decoder that fails this close to the end may have met a cut literal, such as `tru`."""
_SPACES: Final = re.compile(r"[ \t\n\r]*")
_WORD: Final = re.compile(r'[^\s,:\[\]{}"]*')
_TOKEN: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[\]{}"]', re.DOTALL)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=str, parse_int=str, parse_constant=_refuse_constant
)


class Unreadable(Exception):
    """The next value cannot be decoded. It is not consumed and can be skipped.

    `raw` is its text, if its end was found.
    """

    def __init__(self, code: str, text: str, *, most: int = 0, raw: str = "") -> None:
        super().__init__(text)
        self.raw = raw
        self.fault = Fault("row", code, {"most": most} if most else {})


class JsonText:
    """The unread text of a stream.

    Every read may raise CatalogueBroken, Truncated or CatalogueTooLarge.
    """

    def __init__(self, stream: io.BufferedReader, encoding: str) -> None:
        self._stream = stream
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._text = ""
        self._at = 0
        self._line = 1
        self._counted = 0
        self._is_end = False
        self.has_empty_array = False

    @property
    def line(self) -> int:
        """The line number of the next value."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def peek(self) -> str:
        """Skip white space; return the next character, empty at the end of the file."""
        while True:
            self._at = _SPACES.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def members(self) -> Iterator[str]:
        """The keys of the next object; the caller consumes each value."""
        self._take("{")
        while self.peek() != "}":
            if self.peek() not in ('"', ""):
                raise self._malformed("expected a key in double quotes")
            try:
                key = self.value()
            except Unreadable as unreadable:
                raise self._malformed(str(unreadable)) from None
            self._take(":")
            yield key
            self._take_comma("}")
        self._take("}")

    def elements(self) -> Iterator[int]:
        """The line of each element of the next array; the caller consumes each element."""
        self._take("[")
        while self.peek() != "]":
            yield self.line
            self._take_comma("]")
        self._take("]")

    def is_array_of_objects(self) -> bool:
        """Whether the next value is an array whose first element is an object."""
        if self.peek() != "[":
            return False
        while True:
            start = _SPACES.match(self._text, self._at + 1).end()  # type: ignore[union-attr]
            if start < len(self._text) or not self._more():
                break
        first = self._text[start : start + 1]
        self.has_empty_array |= first == "]"
        return first == "{"

    def value(self) -> Any:
        """Decode and consume one value. Raises: Unreadable."""
        if self.peek() not in ("{", "[", '"'):
            return self._decode_word()
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise Unreadable("too_deep", "it is nested too deep", most=DEPTH_MAX) from None
            except ValueError as error:
                end, depth = self._scan(self._at, 0)
                if depth == 0:
                    raw = self._text[self._at : end]
                    raise Unreadable("invalid_json", _reason(error), raw=raw) from None
                self._extend(error)
            else:
                self._at = end
                return found

    def skip(self) -> None:
        """Consume one value of any length by matching brackets; its content is not checked."""
        if self.peek() not in ("{", "[", '"'):
            self._at = self._word_end()
            return
        depth = 0
        while True:
            self._at, depth = self._scan(self._at, depth)
            if depth == 0:
                return
            if len(self._text) - self._at > VALUE_CHARACTERS_MAX:
                raise broken("text_too_long", self.line, most=VALUE_CHARACTERS_MAX)
            self._require_more()

    def leave(self, depth: int) -> None:
        """Consume the rest of `depth` nested objects, the innermost first."""
        for _ in range(depth):
            while self._take_comma("}"):
                self.value_of_key()
            self._take("}")

    def value_of_key(self) -> None:
        """Consume one key and its value."""
        self.skip()
        self._take(":")
        self.skip()

    def expect_end(self) -> None:
        """Require that only white space follows. Raises: CatalogueBroken."""
        if self.peek():
            raise self._malformed("expected the end of the file")

    def _scan(self, at: int, depth: int) -> tuple[int, int]:
        """Match brackets from `at`; return the position reached and the depth there.

        The depth is 0 at the end of the value. A string that is not closed in the buffer stops the
        scan before it, at a depth other than 0.
        """
        for token in _TOKEN.finditer(self._text, at):
            mark = token[0]
            if mark == '"':
                return token.start(), depth or -1
            if mark in ("{", "["):
                depth = max(depth, 0) + 1
            elif mark in ("}", "]"):
                depth -= 1
            if depth <= 0:
                return token.end(), 0
        return len(self._text), depth or -1

    def _extend(self, error: ValueError) -> None:
        """Read a block if the end of the buffer may cut the value. Raises: Unreadable."""
        fault_at = getattr(error, "pos", self._at)
        line = self.line + self._text.count("\n", self._at, fault_at)
        is_cut = _may_be_cut(error, len(self._text) - fault_at)
        is_over = len(self._text) - self._at > VALUE_CHARACTERS_MAX
        if is_over and is_cut:
            text = f"it is over {VALUE_CHARACTERS_MAX:,} characters"
            raise Unreadable("row_too_large", text, most=VALUE_CHARACTERS_MAX)
        if is_over or not self._more():
            if is_cut:
                raise Truncated("truncated_json", line)
            around = self._text[max(self._at, fault_at - 20) : fault_at + 20]
            raise broken(
                "malformed_json", line, detail=_reason(error), snippet=" ".join(around.split())
            )

    def _decode_word(self) -> Any:
        end = self._word_end()
        word = self._text[self._at : end]
        try:
            found, length = DECODER.raw_decode(word)
        except ValueError as error:
            raise Unreadable("invalid_json", _reason(error)) from None
        if length != len(word):
            raise Unreadable("invalid_json", f"{word[:40]!r} is not a JSON value")
        self._at = end
        return found

    def _word_end(self) -> int:
        while True:
            end = _WORD.match(self._text, self._at).end()  # type: ignore[union-attr]
            if end - self._at > VALUE_CHARACTERS_MAX:
                raise self._malformed("a value without quotes has no end")
            if end < len(self._text) or not self._more():
                break
        if end == self._at:
            if not self._text[end:]:
                raise Truncated("truncated_json", self.line)
            raise self._malformed("expected a value")
        return end

    def _take(self, mark: str) -> None:
        found = self.peek()
        if not found:
            raise Truncated("truncated_json", self.line)
        if found != mark:
            raise self._malformed(f"expected {mark}")
        self._at += 1

    def _take_comma(self, closing: str) -> bool:
        """Consume a comma and return True; return False at `closing`, which is not consumed."""
        if self.peek() == closing:
            return False
        self._take(",")
        if self.peek() == closing:
            raise self._malformed("expected a value after the comma")
        return True

    def _malformed(self, text: str) -> CatalogueBroken:
        found = self._text[self._at : self._at + 20]
        return broken("malformed_json", self.line, detail=text, snippet=found)

    def _require_more(self) -> None:
        if not self._more():
            raise Truncated("truncated_json", self.line)

    def _more(self) -> bool:
        """Append the next block to the buffer; return False at the end of the file."""
        if self._is_end:
            return False
        line = self.line
        self._text = self._text[self._at :]
        self._at = self._counted = 0
        block = self._stream.read(BLOCK_BYTES)
        self._is_end = not block
        try:
            self._text += self._decoder.decode(block, final=self._is_end)
        except UnicodeDecodeError as error:
            line += self._text.count("\n") + error.object[: error.start].count(b"\n")
            if self._is_end:
                raise Truncated("truncated_letter", line) from None
            name = self._encoding.removesuffix("-sig").upper()
            raise broken("invalid_encoding", line, encoding=name) from None
        return True


def _may_be_cut(error: ValueError, characters_behind: int) -> bool:
    """Whether the error can be caused by the missing end of a valid value."""
    is_open_text = getattr(error, "msg", "").startswith("Unterminated string")
    return is_open_text or characters_behind <= LITERAL_CHARACTERS_MAX


def _reason(error: ValueError) -> str:
    """The message of the decoder, as part of a sentence."""
    text = getattr(error, "msg", str(error))
    return f"{text[:1].lower()}{text[1:]}"
