"""The bytes of a disk: torn, flipped, truncated or foreign data is not accepted."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.media.cache.layout import (
    DATA_AT,
    PROBE_BLOCKS,
    SLOTS,
    WAYS,
    Digests,
    Superblock,
    data_at_in_device,
    frames_within,
    length_of_block,
    pack_head,
    pack_superblock,
    parts_of_version,
    read_head,
    read_superblock,
    slot_owners,
    version_of,
)
from headrace.media.model import BLOCK_BYTES, Shape

OURS = Superblock(bytes(range(16)), 64)


def test_a_superblock_is_read_as_it_was_written():
    assert read_superblock(pack_superblock(OURS)) == OURS
    assert read_superblock(pack_superblock(OURS) + bytes(500)) == OURS


def test_a_superblock_cut_at_any_byte_is_none():
    whole = pack_superblock(OURS)
    assert all(read_superblock(whole[:at]) is None for at in range(len(whole)))
    assert all(
        read_superblock(whole[:at] + bytes(len(whole) - at)) is None for at in range(len(whole))
    )


def test_a_superblock_with_any_bit_flipped_is_none():
    whole = pack_superblock(OURS)
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read_superblock(bytes(damaged)) is None


def test_the_head_of_an_index_belongs_to_one_disk_and_size():
    for is_clean in (False, True):
        head = pack_head(OURS, is_clean=is_clean)
        assert read_head(head, OURS) is is_clean
        assert read_head(head, Superblock(bytes(16), 64)) is None
        assert read_head(head, Superblock(OURS.disk_id, 80)) is None
        assert all(read_head(head[:at], OURS) is None for at in range(len(head)))
        assert read_superblock(head) is None
    assert read_head(pack_superblock(OURS), OURS) is None


def test_frames_and_index_fit_into_the_size():
    for size_mib in (8, 9, 14, 100, 1000, 1024 * 1024):
        size_bytes = size_mib * 2**20
        frames = frames_within(size_bytes)
        assert frames % WAYS == 0
        if frames:
            assert DATA_AT + (frames + PROBE_BLOCKS) * BLOCK_BYTES + frames * 32 <= size_bytes
            start = data_at_in_device(frames)
            assert start % DATA_AT == 0
            assert start >= 8192 + frames * 32
            assert start + (frames + PROBE_BLOCKS) * BLOCK_BYTES <= size_bytes
    assert frames_within(2**40) > 4_180_000
    assert frames_within(8 * 2**20) == 0


def test_a_disk_that_comes_or_goes_moves_its_own_share_alone():
    ids = random.Random(7)
    disks = [(ids.randbytes(16), 1000) for _ in range(6)]
    before = slot_owners(disks)
    shares = Counter(before)
    assert all(0.85 * SLOTS / 6 < shares[n] < 1.15 * SLOTS / 6 for n in range(6))
    without = slot_owners(disks[:3] + disks[4:])
    places = [0, 1, 2, 4, 5]
    for slot, owner in enumerate(before):
        assert owner == 3 or places[without[slot]] == owner
    turned = slot_owners(disks[::-1])
    assert [5 - owner for owner in turned] == before


def test_a_disk_of_twice_the_size_has_twice_the_slots():
    owners = Counter(slot_owners([(b"a" * 16, 1000), (b"b" * 16, 2000)]))
    assert 1.85 < owners[1] / owners[0] < 2.15
    assert slot_owners([]) == [-1] * SLOTS


BLOCKS = st.tuples(st.text(), st.text(), st.integers(0, 2**40))


@settings(max_examples=40)
@given(BLOCKS, BLOCKS)
def test_different_blocks_have_different_digests(block, other_block):
    digests = Digests(b"key")
    one, other = digests.key(*block), digests.key(*other_block)
    assert (one.digest == other.digest) == (block == other_block)
    assert any(one.digest[:8])
    assert 0 <= one.hash_bits < 2**64
    assert one.tag == one.digest[:8]


def test_whoever_has_another_key_cannot_aim():
    one, other = Digests(b"one"), Digests(b"other")
    assert one.key("a", "v", 0).digest != other.key("a", "v", 0).digest


@given(st.integers(0, 2**50), st.text(), st.integers(0, 2**31))
def test_a_version_tells_size_and_etag(size_bytes, etag, generation):
    shape = Shape(size_bytes, etag, 0, is_immutable=False)
    assert parts_of_version(version_of(shape, generation)) == (size_bytes, etag)
    assert version_of(shape, generation) != version_of(shape, generation + 1)


@pytest.mark.parametrize(
    ("size_bytes", "lengths"),
    [
        (0, [0]),
        (1, [1, 0]),
        (BLOCK_BYTES, [BLOCK_BYTES, 0]),
        (BLOCK_BYTES + 5, [BLOCK_BYTES, 5, 0]),
    ],
)
def test_the_last_block_is_shorter(size_bytes, lengths):
    assert [length_of_block(size_bytes, n) for n in range(len(lengths))] == lengths
