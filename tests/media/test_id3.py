"""ID3 tags: written, read by this and other libraries, and joined with tracks."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from id3_tracks import JPEG, PNG, own_tag
from mutagen.id3 import ID3

from headrace.media.id3 import (
    TAG_BYTES_MAX,
    OwnTags,
    TagCorrupt,
    TaggedTrack,
    TagInvalid,
    Tags,
    own_tag_bytes,
    read_tags,
    tag_bytes,
    tag_id,
    tag_key,
)
from headrace.media.model import Shape
from headrace.media.ranges import decide

FULL = Tags(title="Über den Wolken", artist="雨", album="A/B", cover=JPEG, buyer="user:42")
TEXTS = st.none() | st.text(
    st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=256
)
BUYERS = st.none() | st.from_regex(r"[A-Za-z0-9._:@~-]{1,64}", fullmatch=True)
COVERS = st.none() | st.sampled_from([JPEG, PNG, b"\xff\xd8\xff" + b"\0\x03\0" * 9])


def test_another_reader_finds_every_field():
    tag = ID3(io.BytesIO(tag_bytes(FULL)))
    assert tag.version == (2, 4, 0)
    assert (str(tag["TIT2"]), str(tag["TPE1"]), str(tag["TALB"])) == (
        "Über den Wolken",
        "雨",
        "A/B",
    )
    [cover] = tag.getall("APIC")
    assert (cover.mime, cover.type, cover.data) == ("image/jpeg", 3, JPEG)
    assert tag["TXXX:HEADRACE_BUYER"].text == ["user:42"]
    assert tag["UFID:headrace"].data == b"user:42"
    assert tag.size == len(tag_bytes(FULL))
    assert ID3(io.BytesIO(tag_bytes(Tags(cover=PNG)))).getall("APIC")[0].mime == "image/png"


@pytest.mark.slow
@given(title=TEXTS, artist=TEXTS, album=TEXTS, cover=COVERS, buyer=BUYERS)
def test_what_is_written_is_read_again(title, artist, album, cover, buyer):
    tags = Tags(title=title, artist=artist, album=album, cover=cover, buyer=buyer)
    if tags == Tags():
        with pytest.raises(TagInvalid):
            tag_bytes(tags)
        return
    data = tag_bytes(tags)
    assert read_tags(data) == tags
    assert own_tag_bytes(data[:10], len(data) + 5) == len(data)
    assert tag_id(data) == tag_id(tag_bytes(tags))
    theirs = ID3(io.BytesIO(data))
    assert [str(frame) for frame in theirs.getall("TIT2")] == ([title] if title else [])


@pytest.mark.parametrize(
    ("tags", "pointers"),
    [
        (Tags(), ["tag"]),
        (Tags(title=""), ["title"]),
        (Tags(title="x" * 257), ["title"]),
        (Tags(title="a\0b"), ["title"]),
        (Tags(artist="a\nb"), ["artist"]),
        (Tags(album="\ud800"), ["album"]),
        (Tags(cover=b""), ["cover"]),
        (Tags(cover=b"GIF89a"), ["cover"]),
        (Tags(cover=b"<svg/>"), ["cover"]),
        (Tags(buyer="a b"), ["buyer"]),
        (Tags(buyer="x" * 65), ["buyer"]),
        (Tags(cover=JPEG + bytes(TAG_BYTES_MAX)), ["cover"]),
        (Tags(title="", artist="\r", cover=b"x", buyer=""), ["title", "artist", "cover", "buyer"]),
    ],
)
def test_a_bad_tag_is_refused_with_every_fault(tags, pointers):
    with pytest.raises(TagInvalid) as caught:
        tag_bytes(tags)
    assert [problem.pointer for problem in caught.value.problems] == pointers


def test_the_largest_tag_passes():
    spare = TAG_BYTES_MAX - len(tag_bytes(Tags(cover=JPEG)))
    assert len(tag_bytes(Tags(cover=JPEG + bytes(spare)))) == TAG_BYTES_MAX


@pytest.mark.slow
@given(at=st.integers(0, 10_000), new=st.integers(0, 255), cut=st.booleans())
def test_a_stored_tag_that_changed_is_not_believed(at, new, cut):
    """A changed text is another tag. Its id shows that, and the shape stays correct."""
    data = tag_bytes(FULL)
    at %= len(data)
    changed = data[:at] if cut else data[:at] + bytes([new]) + data[at + 1 :]
    try:
        found = read_tags(changed)
    except TagCorrupt:
        return
    assert tag_bytes(found) == changed
    assert changed == data or tag_id(changed) != tag_id(data)


@pytest.mark.parametrize(
    ("start", "length_bytes"),
    [
        (b"ID3\x04\x00\x00\x00\x00\x02\x01", 267),
        (b"ID3\x03\x00\x00\x00\x00\x00\x05", 15),
        (b"ID3\x02\x00\x00\x00\x00\x00\x00", 10),
        (b"ID3\x04\x00\x10\x00\x00\x00\x05", 25),
        (b"ID3\x03\x00\x10\x00\x00\x00\x05", 15),
        (b"ID3\x05\x00\x00\x00\x00\x00\x05", 0),
        (b"ID3\x04\xff\x00\x00\x00\x00\x05", 0),
        (b"ID3\x04\x00\x00\x00\x00\x80\x05", 0),
        (b"ID3\x04\x00\x00\x00\x00\x00", 0),
        (b"\xff\xfb\x90\x64\x00\x00\x00\x00\x00\x00", 0),
        (b"ID3\x04\x00\x00\x00\x00\x07\x6f", 0),
        (b"", 0),
    ],
)
def test_the_own_tag_of_a_track_is_measured(start, length_bytes):
    assert own_tag_bytes(start, 1000) == length_bytes


def test_own_tags_are_remembered_by_version():
    owned = OwnTags()
    old, new = Shape(1000, "old", 1, False), Shape(900, "new", 2, False)
    assert owned.find("a.mp3", old) is None
    assert owned.keep("a.mp3", old, own_tag(90)[:10]) == 90
    assert owned.find("a.mp3", old) == 90
    assert owned.find("a.mp3", new) is None
    assert owned.keep("a.mp3", new, b"\xff\xfb") == 0
    assert owned.find("a.mp3", new) == 0


def joined(tag: bytes, track: bytes, skipped_bytes: int) -> TaggedTrack:
    return TaggedTrack(
        tag_id=tag_id(tag),
        tag=Shape(len(tag), "tag", 1, False),
        key="a.mp3",
        track=Shape(len(track), "track", 784_111_777, False),
        skipped_bytes=skipped_bytes,
    )


def read(
    tagged: TaggedTrack, fields: dict[str, str], objects: dict[str, bytes]
) -> tuple[int, bytes]:
    decision = decide("GET", fields, tagged.shape)
    pieces = tagged.pieces(decision)
    assert all(piece.length_bytes > 0 for piece in pieces)
    spans = [objects[p.key][p.start : p.start + p.length_bytes] for p in pieces]
    assert sum(map(len, spans)) == decision.length_bytes
    return decision.status, b"".join(spans)


@pytest.mark.slow
@given(
    tag_size=st.integers(11, 300),
    own_size=st.sampled_from([0, 10, 77]),
    music_size=st.integers(0, 300),
    first=st.none() | st.integers(0, 700),
    last=st.none() | st.integers(0, 700),
)
def test_any_range_is_that_of_the_two_joined(tag_size, own_size, music_size, first, last):
    tag = bytes([1]) + bytes(range(256)) * 2
    tag, music = tag[:tag_size], bytes(n % 251 for n in range(music_size))
    track = (own_tag(own_size) if own_size else b"") + music
    assert own_tag_bytes(track[:10], len(track)) == own_size
    tagged = joined(tag, track, own_size)
    objects = {tag_key(tag_id(tag)): tag, "a.mp3": track}
    whole = tag + music
    assert tagged.shape.size_bytes == len(whole)
    assert read(tagged, {}, objects) == (200, whole)
    fields = {"range": f"bytes={'' if first is None else first}-{'' if last is None else last}"}
    real = Shape(len(whole), tagged.shape.etag, tagged.shape.modified_s, False)
    decision = decide("GET", fields, real)
    expected = whole[decision.start : decision.start + decision.length_bytes]
    assert read(tagged, fields, objects) == (decision.status, expected)


def test_the_etag_is_of_both_and_of_nothing_else():
    tag, other = tag_bytes(FULL), tag_bytes(Tags(buyer="user:43"))
    tagged = joined(tag, b"music", 0)
    assert tagged.shape.etag == joined(tag, b"music", 0).shape.etag
    assert tagged.shape.etag != joined(other, b"music", 0).shape.etag
    replaced = TaggedTrack(
        tag_id=tagged.tag_id,
        tag=tagged.tag,
        key="a.mp3",
        track=Shape(5, "replaced", 784_111_777, False),
        skipped_bytes=0,
    )
    assert tagged.shape.etag != replaced.shape.etag
    assert tagged.shape.modified_s == 784_111_777
