"""The bytes of a body: whole, in order and hashed, however they come and however many."""

from __future__ import annotations

import hashlib
import random

import pytest

from headrace.fetch.curl import HELD_BYTES_MAX, Body


@pytest.mark.parametrize("size_bytes", [0, 1, 150_000, HELD_BYTES_MAX, HELD_BYTES_MAX * 3 + 5])
def test_a_body_is_what_came(size_bytes, tmp_path):
    chance = random.Random(size_bytes)
    data, at = chance.randbytes(size_bytes), 0
    with Body() as body:
        while at < size_bytes:
            part = data[at : at + chance.randrange(1, 70_000)]
            body.add(part)
            at += len(part)
        for _ in range(2):
            assert body.sha256() == hashlib.sha256(data).hexdigest()
            assert body.read() == data
            body.copy_to(tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == data


def test_one_that_is_looked_at_meanwhile_goes_on():
    with Body() as body:
        for part in (b"a" * HELD_BYTES_MAX, b"b", b"c"):
            body.add(part)
            assert body.read().endswith(part)
        whole = b"a" * HELD_BYTES_MAX + b"bc"
        assert body.sha256() == hashlib.sha256(whole).hexdigest()
        assert body.read() == whole


def test_only_so_much_of_a_body_is_held_in_memory():
    with Body() as body:
        for _ in range(400):
            body.add(bytes(16_384))
            assert sum(len(part) for part in body._held) <= HELD_BYTES_MAX
