"""Strategies that damage real inputs: bytes of files, messages, heads, cursors and tokens."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from typing import Final

from hypothesis import strategies as st

PIECES: Final = (
    *(b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\r", b'"', b"'", b"<", b">"),
    *(b"&", b"&#0;", b"]]>", b"<!--", b"<![CDATA[", b"<!DOCTYPE a [", b"{", b"}", b"[", b"]", b","),
    *(
        b":",
        b";",
        b"\t",
        b"\\u0000",
        b"\\ud800",
        b"NaN",
        b"1e999",
        b"9" * 5000,
        b"-1",
        b"0",
        b"%00",
    ),
    *(b"..", b"/", b"\\", b"=cmd", b"\xd0", b"\xed\xa0\x80", b"[" * 3000, b"<a>" * 300),
)
"""What parsers often get wrong."""
STEP: Final = st.tuples(
    st.sampled_from(("set", "insert", "cut", "repeat", "remove", "splice")),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 40),
    st.sampled_from(PIECES) | st.binary(min_size=1, max_size=8),
)
"""One change: its kind, its place as a share of the length, a length, and bytes."""


def changed(data: bytes, step: tuple[str, float, int, bytes], other: bytes) -> bytes:
    """`data` after one change."""
    kind, share, length, piece = step
    at = int(share * len(data))
    match kind:
        case "set":
            return data[:at] + piece[:4] + data[at + len(piece[:4]) :]
        case "insert":
            return data[:at] + piece + data[at:]
        case "cut":
            return data[:at]
        case "repeat":
            return data[:at] + data[at : at + length] * 3 + data[at + length :]
        case "remove":
            return data[:at] + data[at + length :]
        case _:
            return data[:at] + other[int(share * len(other)) :]


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes], steps_max: int = 5) -> bytes:
    """One of `seeds` after 1 to `steps_max` changes."""
    data = draw(st.sampled_from(seeds))
    for step in draw(st.lists(STEP, min_size=1, max_size=steps_max)):
        data = changed(data, step, draw(st.sampled_from(seeds)) if step[0] == "splice" else b"")
    return data


@st.composite
def damaged_archive(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A zip file whose parts are damaged before they are packed, so that their reader sees it."""
    with zipfile.ZipFile(io.BytesIO(draw(st.sampled_from(seeds)))) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for name in draw(st.sets(st.sampled_from(sorted(parts)), min_size=1, max_size=2)):
        parts[name] = draw(damaged([parts[name] or b" "]))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return packed.getvalue()
