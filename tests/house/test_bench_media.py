"""The judges of media's figures.

Tracks that tell whether they are right, a full disk, how a crowd is parted.
"""

from __future__ import annotations

import shutil

import pytest
from bench.media_objects import content, make_tracks, native_program
from bench.media_ranges import stages_of
from bench.media_slow import parts, tcp_memory_kib, tcp_memory_max_kib
from bench.media_store import make_full_disk, size_of

from headrace.media.cache.layout import (
    ENTRY,
    HEAD_BYTES,
    SET_BYTES,
    TAGS_BYTES,
    WAYS,
    entry_sum,
    read_head,
    read_superblock,
)


def word(number: int, index: int) -> int:
    """What native/media_load.c computes, written once more."""
    whole = 2**64 - 1
    x = ((number << 40) ^ index) * 0x9E3779B97F4A7C15 & whole
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & whole
    return x ^ x >> 32


def test_a_track_s_bytes_follow_from_its_number_and_their_place(tmp_path):
    data = content(7, 1003)
    assert len(data) == 1003
    for at in (0, 7, 8, 500, 1002):
        assert data[at] == word(7, at // 8) >> 8 * (at % 8) & 255
    assert content(8, 100) != content(7, 100)
    [track, _] = make_tracks(tmp_path, 2, size_bytes=1003, first=7)
    assert (tmp_path / track.key).read_bytes() == data


def test_the_generator_and_the_limit_compile(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    for name in ("media_load", "media_bare"):
        assert native_program(name, tmp_path).exists()


def test_a_full_disk_has_an_entry_with_a_right_sum_in_every_frame(tmp_path):
    folder, frames = tmp_path / "disk", 4 * WAYS
    make_full_disk(folder, frames)
    superblock = read_superblock((folder / "blocks").read_bytes()[:4096])
    index = (folder / "index").read_bytes()
    assert superblock.frames == frames
    assert read_head(index, superblock) is False
    for frame in range(frames):
        start = HEAD_BYTES + frame // WAYS * SET_BYTES
        tag_at = start + 8 * (frame % WAYS)
        tag = int.from_bytes(index[tag_at : tag_at + 8], "little")
        *fields, told = ENTRY.unpack_from(index, start + TAGS_BYTES + ENTRY.size * (frame % WAYS))
        assert tag
        assert told == entry_sum(tag, tuple(fields), frame=frame, superblock=superblock)
    assert size_of(frames) > frames * 262_144


def test_a_crowd_is_parted_evenly():
    assert parts(10, 3) == [4, 3, 3]
    assert 0 <= tcp_memory_kib() < tcp_memory_max_kib()


def test_stages_are_means_over_all_files(tmp_path):
    text = (
        'media_stage_seconds_sum{stage="parse"} 0.5\n'
        'media_stage_seconds_count{stage="parse"} 1000.0\n'
        'media_stage_seconds_sum{stage="send"} 0.0\nmedia_stage_seconds_count{stage="send"} 0.0\n'
    )
    (tmp_path / "media-1.prom").write_text(text)
    (tmp_path / "media-2.prom").write_text(text.replace("0.5", "1.5"))
    (tmp_path / "api-3.prom").write_text(text)
    assert stages_of(tmp_path) == {"stage parse": pytest.approx(1000)}
