"""The frames of a disk are found by key only, and invalid entries are not accepted."""

from __future__ import annotations

import mmap
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.media.cache.frame_table import FrameTable, table_bytes
from headrace.media.cache.layout import SET_BYTES, TAGS_BYTES, WAYS, BlockKey, Digests, Superblock

DIGESTS = Digests(b"k")


def make_table(sets: int = 2, disk_id: bytes = b"d" * 16) -> FrameTable:
    superblock = Superblock(disk_id, sets * WAYS)
    return FrameTable(mmap.mmap(-1, table_bytes(superblock)), superblock)


def key_of(name: str) -> BlockKey:
    return DIGESTS.key(name, "v", 0)


def fill(
    table: FrameTable, name: str, way: int, *, generation: int = 1, data: bytes = b"data"
) -> int:
    key = key_of(name)
    frame = table.set_of(key) * WAYS + way
    table.hide(frame)
    table.write_fields(frame, key, generation=generation, data=data)
    table.show(frame, key)
    return frame


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.booleans()), max_size=80))
@settings(max_examples=50)
def test_a_table_finds_what_a_dictionary_would(moves):
    table = make_table()
    held: dict[int, str] = {}
    for number, (which, way, is_hidden) in enumerate(moves):
        name = f"track-{which}"
        frame = table.set_of(key_of(name)) * WAYS + way
        if is_hidden:
            table.hide(frame)
            held.pop(frame, None)
        elif name not in held.values():
            held[fill(table, name, way, generation=number + 1)] = name
        for which_now in range(41):
            hit = table.find(key_of(f"track-{which_now}"))
            is_held = f"track-{which_now}" in held.values()
            assert (hit is not None) == is_held
            if hit is not None:
                assert held[hit.frame] == f"track-{which_now}"
    assert table.used() == len(held)


def test_a_tag_across_the_border_of_two_is_no_tag():
    table = make_table(sets=1)
    key = key_of("a")
    table.index[4:12] = key.tag
    assert table.find(key) is None
    table.index[24:32] = key.tag
    table.index[TAGS_BYTES + 3 * 24 : TAGS_BYTES + 3 * 24 + 4] = key.digest[8:12]
    assert table.find(key).frame == 3


def test_a_tag_alone_is_not_enough():
    table = make_table(sets=1)
    fill(table, "a", 0)
    key = key_of("a")
    assert table.find(key) is not None
    assert table.find(key._replace(fingerprint=key.fingerprint ^ 1)) is None


@pytest.mark.parametrize("sizes", [[1], [262144], [5, 100000]])
def test_a_block_is_right_under_its_own_key_and_disk_only(sizes):
    table, other = make_table(), make_table(disk_id=b"e" * 16)
    for size in sizes:
        data = random.Random(size).randbytes(size)
        frame = fill(table, "a", 3, data=data)
        entry = table.entry(frame)
        assert table.is_right(frame, entry, data + b"padding")
        assert not table.is_right(frame, entry, data[:-1])
        assert not table.is_right(frame, entry, bytes([data[0] ^ 1]) + data[1:])
        assert not table.is_sound(frame + 1, entry)
        assert not other.is_sound(frame, entry)
        assert not table.is_right(frame, entry._replace(tag=entry.tag ^ 1), data)
        assert not table.is_right(frame, entry._replace(fingerprint=entry.fingerprint ^ 1), data)


def test_an_entry_with_any_bit_flipped_is_not_sound():
    table = make_table(sets=1)
    frame = fill(table, "a", 5)
    start = TAGS_BYTES + 5 * 24
    places = [*range(5 * 8, 6 * 8), *range(start, start + 24)]
    for at in places:
        for bit in range(8):
            table.index[at] ^= 1 << bit
            assert not table.is_sound(frame, table.entry(frame))
            table.index[at] ^= 1 << bit
    assert table.is_sound(frame, table.entry(frame))


def test_a_set_moved_to_another_place_holds_nothing():
    table = make_table(sets=2)
    for way in range(WAYS):
        name = next(f"n{n}" for n in range(10**6) if table.set_of(key_of(f"n{n}")) == 0)
        fill(table, name, way)
    table.index[SET_BYTES : 2 * SET_BYTES] = bytes(table.set_bytes(0))
    table.verified[:] = bytes(len(table.verified))
    assert table.generations(1) == [0] * WAYS
    assert table.generations(0) == [1] * WAYS


def test_hiding_takes_the_marks_along():
    table = make_table()
    frame = fill(table, "a", 0)
    table.visited[frame] = 1
    assert table.verified[frame] == 1
    table.hide(frame)
    assert (table.verified[frame], table.visited[frame], table.entry(frame).tag) == (0, 0, 0)
    table.show(frame, key_of("a"))
    table.hide_all()
    assert table.find(key_of("a")) is None
