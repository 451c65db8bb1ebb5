"""A blank disk is claimed once and identified by its id; other content is left alone."""

from __future__ import annotations

import os

import pytest
from cache_lab import disk_bytes

from headrace.media.cache.disk_files import open_files
from headrace.media.cache.layout import DATA_AT, HEAD_BYTES, SET_BYTES
from headrace.media.errors import DiskRefused, InvalidDiskSize
from headrace.media.model import BLOCK_BYTES, DiskConfig


@pytest.fixture
def disk(tmp_path):
    return DiskConfig(tmp_path / "disk", disk_bytes(2))


def open_and_close(disk, *, is_clean: bool = False):
    files = open_files(disk)
    if is_clean:
        files.write_head(is_clean=True)
    files.close()
    return files


def test_a_disk_keeps_its_id_and_is_whole_from_the_start(disk):
    first = open_and_close(disk)
    blocks, index = disk.path / "blocks", disk.path / "index"
    assert blocks.stat().st_size == DATA_AT + 34 * BLOCK_BYTES
    assert blocks.stat().st_blocks * 512 >= 34 * BLOCK_BYTES, "room is allocated, not promised"
    assert index.stat().st_size == HEAD_BYTES + 2 * SET_BYTES
    assert oct(blocks.stat().st_mode)[-3:] == "600"
    assert open_and_close(disk).superblock == first.superblock
    assert first.was_clean is None


def test_it_learns_whether_the_index_was_closed_in_order(disk):
    open_and_close(disk, is_clean=True)
    assert open_and_close(disk).was_clean is True
    assert open_and_close(disk).was_clean is False


@pytest.mark.parametrize("found", [b"\x53\xef" * 600, b"HEADRACE" + bytes(40)])
def test_what_holds_something_else_is_refused_and_left_alone(disk, found):
    disk.path.mkdir()
    (disk.path / "blocks").write_bytes(found)
    with pytest.raises(DiskRefused, match="other content"):
        open_files(disk)
    assert (disk.path / "blocks").read_bytes() == found


def test_two_nodes_cannot_have_one_disk(disk):
    files = open_files(disk)
    with pytest.raises(DiskRefused, match="another node"):
        open_files(disk)
    files.close()
    open_and_close(disk)


def test_another_size_is_a_new_index_of_the_same_disk(disk, tmp_path):
    first = open_and_close(disk, is_clean=True)
    larger = open_and_close(DiskConfig(disk.path, disk_bytes(3)))
    assert larger.superblock.disk_id == first.superblock.disk_id
    assert (larger.superblock.frames, larger.was_clean) == (48, None)
    assert (disk.path / "index").stat().st_size == HEAD_BYTES + 3 * SET_BYTES


@pytest.mark.parametrize("length", [0, 1, 63, HEAD_BYTES, HEAD_BYTES + SET_BYTES])
def test_an_index_that_was_cut_is_made_anew(disk, length):
    open_and_close(disk, is_clean=True)
    os.truncate(disk.path / "index", length)
    assert open_and_close(disk).was_clean is None


def test_a_blocks_file_that_has_its_size_is_taken_as_it_is(disk):
    disk.path.mkdir()
    with (disk.path / "blocks").open("wb") as file:
        file.truncate(DATA_AT + 34 * BLOCK_BYTES)
    open_and_close(disk)
    assert (disk.path / "blocks").stat().st_blocks * 512 < BLOCK_BYTES


def test_a_disk_without_room_for_a_set_is_refused(tmp_path):
    with pytest.raises(InvalidDiskSize, match=r"MiB for it: .* fits in media\.disks"):
        open_files(DiskConfig(tmp_path / "large", 2**50))
    with pytest.raises(InvalidDiskSize, match="16MiB"):
        open_files(DiskConfig(tmp_path / "disk", 2**20))


def test_a_mount_point_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_files(DiskConfig(tmp_path / "unmounted" / "disk", disk_bytes(1)))
    assert not (tmp_path / "unmounted").exists()


def test_a_file_is_no_disk(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(DiskRefused, match="neither a folder nor a block device"):
        open_files(DiskConfig(tmp_path / "file", disk_bytes(1)))
