"""Generations only rise, whatever is purged, folded and forgotten."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.blobs import InvalidBlobKey
from headrace.media.cluster import purge as purging
from headrace.media.cluster.purge import (
    PURGES,
    Generations,
    Purge,
    PurgeList,
    Purges,
    folded,
)
from headrace.media.errors import InvalidPurge

KEYS = ["a.mp3", "b/c.mp3", "b/d.mp3", "b/e/f.mp3", "photos/ab/cd/x.jpg", "photos/ab/ce/y.jpg"]


def generations_of(purges: list[Purge]) -> Generations:
    found = Generations()
    version = max((purge.generation for purge in purges), default=0)
    assert found.accept(msgspec.json.encode(PurgeList(version=version + 1, purges=tuple(purges))))
    return found


async def test_a_purge_raises_the_generation_of_what_it_names(blobs):
    purges = Purges(blobs)
    assert await purges.purge("a.mp3") == 1
    assert await purges.purge("b/c.mp3", "b/d.mp3") == 2
    assert await purges.purge_prefix("photos/ab/c") == 3
    known = Generations()
    assert known.generation("a.mp3") == 0
    known.accept(await blobs.get(PURGES.key))
    found = {key: known.generation(key) for key in KEYS}
    assert list(found.values()) == [1, 2, 2, 0, 3, 3]
    assert await purges.purge_prefix("") == 4
    known.accept(await blobs.get(PURGES.key))
    assert {known.generation(key) for key in KEYS} == {4}
    assert len((await purges.read()).purges) == 1


async def test_a_purge_repeated_leaves_one_entry(blobs):
    purges = Purges(blobs)
    for _ in range(5):
        await purges.purge("a.mp3")
        await purges.purge_prefix("b/")
    assert [purge.generation for purge in (await purges.read()).purges] == [9, 10]


@pytest.mark.parametrize("prefix", ["/", "/a", "../", "a//", "a b", ".a", "a/.", "x" * 600, "é"])
async def test_a_prefix_of_no_key_is_refused(blobs, prefix):
    with pytest.raises(InvalidPurge):
        await Purges(blobs).purge_prefix(prefix)
    with pytest.raises(InvalidBlobKey):
        await Purges(blobs).purge("a.mp3", prefix)
    assert (await Purges(blobs).read()).version == 0


names = st.builds("/".join, st.lists(st.sampled_from("abc"), min_size=1, max_size=5))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(names, st.booleans()), max_size=60), st.lists(names, max_size=20))
def test_folding_forgets_no_purge(given_names, keys):
    purges = [
        Purge(name=name + ("/" if is_prefix else ""), is_prefix=is_prefix, generation=n + 1)
        for n, (name, is_prefix) in enumerate(given_names)
    ]
    limits = (purging.ENTRIES_MAX, purging.ENTRIES_KEPT, purging.FOLDED_MAX)
    purging.ENTRIES_MAX, purging.ENTRIES_KEPT, purging.FOLDED_MAX = 12, 6, 3
    try:
        fewer = folded(list(purges))
    finally:
        purging.ENTRIES_MAX, purging.ENTRIES_KEPT, purging.FOLDED_MAX = limits
    assert len(fewer) <= 12
    before, after = generations_of(purges), generations_of(fewer)
    for key in [*keys, *(name for name, _ in given_names)]:
        covering = [p for p in purges if p.name == key or (p.is_prefix and key.startswith(p.name))]
        expected = max((p.generation for p in covering), default=0)
        assert before.generation(key) == expected
        assert after.generation(key) >= expected


def test_the_list_stays_bounded():
    purges = [
        Purge(name=f"tracks/{n % 700}/{n}.mp3", generation=n + 1)
        for n in range(purging.ENTRIES_MAX + 1)
    ]
    fewer = folded(purges)
    assert len(fewer) <= purging.ENTRIES_KEPT + purging.FOLDED_MAX
    assert fewer[-purging.ENTRIES_KEPT :] == purges[-purging.ENTRIES_KEPT :]
