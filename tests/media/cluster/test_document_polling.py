"""A node's processes follow the store through one of them; invalid or old documents are ignored."""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.media.cluster.cluster_config import OUTCOMES, POLLS, DocumentPoller, FollowedDocument
from headrace.media.cluster.membership import MEMBERSHIP, Membership
from headrace.media.cluster.purge import PURGES, Generations, Purges


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@asynccontextmanager
async def following(blobs, folder, *, every_s: float = 0.05):
    """One process's view of the members, and its poller."""
    polled = FollowedDocument(MEMBERSHIP)
    polling = DocumentPoller(blobs, folder, [polled], every_s=every_s)
    await polling.start()
    try:
        yield polled, polling
    finally:
        await polling.close()


async def store(blobs, version: int, replicas: int = 2) -> None:
    data = msgspec.json.encode(Membership(version=version, replicas=replicas))
    await blobs.put(MEMBERSHIP.key, data)


def polls(outcome: str) -> float:
    return POLLS.labels(outcome=outcome)._value.get()


async def wait_polled(outcome: str) -> None:
    """Return once the store was polled again with this outcome."""
    before = polls(outcome)
    await wait_true(lambda: polls(outcome) > before + 1, what=f"polled: {outcome}")


async def test_a_new_version_is_seen_and_kept(blobs, folder):
    async with following(blobs, folder) as (polled, _):
        assert polled.value == Membership()
        await store(blobs, 3)
        await wait_true(lambda: polled.value.version == 3)
        await wait_true((folder / "membership.json").exists)
        await wait_polled("same")
    assert MEMBERSHIP.decode((folder / "membership.json").read_bytes()).version == 3
    assert not list(folder.glob("*.draft*"))


async def test_one_process_asks_and_the_others_read_its_copy(blobs, folder):
    async with following(blobs, folder) as (first, leading):
        async with following(blobs, folder) as (second, following_it):
            assert (leading.leads, following_it.leads) == (True, False)
            before = {outcome: polls(outcome) for outcome in OUTCOMES}
            await store(blobs, 3)
            await wait_true(lambda: (first.value.version, second.value.version) == (3, 3))
            assert polls("changed") == before["changed"] + 1
            await leading.close()
            await wait_true(lambda: following_it.leads)
            await store(blobs, 4)
            await wait_true(lambda: second.value.version == 4)
        assert first.value.version == 3


async def test_the_last_copy_serves_while_the_store_is_away(blobs, folder):
    await store(blobs, 7)
    async with following(blobs, folder):
        pass
    assert blobs.folder is not None
    shutil.move(blobs.folder, blobs.folder.with_name("away"))
    with structlog.testing.capture_logs() as logs:
        async with following(blobs, folder) as (polled, _):
            assert polled.value.version == 7
            await wait_polled("failed")
            assert polled.value.version == 7
            shutil.move(blobs.folder.with_name("away"), blobs.folder)
            await store(blobs, 8)
            await wait_true(lambda: polled.value.version == 8)
    reported = [line for line in logs if line["event"] == "document_not_read"]
    assert len(reported) == 1, "logged once, however long it lasts"


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda blobs: blobs.put(MEMBERSHIP.key, b'{"version": 99'), "refused"),
        (lambda blobs: blobs.put(MEMBERSHIP.key, b'{"version": 99, "replicas": 9}'), "refused"),
    ],
    ids=["broken", "invalid"],
)
async def test_what_is_bad_changes_nothing(blobs, folder, change, outcome):
    await store(blobs, 7)
    async with following(blobs, folder) as (polled, _):
        before = polled.value
        await change(blobs)
        await wait_polled(outcome)
        assert polled.value == before
        await store(blobs, 100)
        await wait_true(lambda: polled.value.version == 100)


@pytest.mark.parametrize(
    "lose",
    [
        lambda blobs: blobs.delete(MEMBERSHIP.key),
        lambda blobs: store(blobs, 6),
        lambda blobs: store(blobs, 7, replicas=4),
    ],
    ids=["removed", "older", "same version, other contents"],
)
async def test_what_the_store_lost_is_put_back(blobs, folder, lose):
    await store(blobs, 7, replicas=3)
    async with following(blobs, folder) as (polled, _), following(blobs, folder) as (also, _):
        await wait_true(lambda: also.value.version == 7)
        await lose(blobs)
        await wait_true(lambda: polled.value.version == also.value.version == 8)
        assert polled.value.replicas == also.value.replicas == 3
        assert MEMBERSHIP.decode(await blobs.get(MEMBERSHIP.key)) == polled.value


@pytest.mark.parametrize("data", [b"", b"{", os.urandom(200), b'{"version": 9, "members": 1}'])
async def test_a_damaged_copy_costs_nothing(blobs, folder, data):
    folder.mkdir()
    (folder / "membership.json").write_bytes(data)
    await store(blobs, 7)
    async with following(blobs, folder) as (polled, _):
        assert polled.value.version == 7


async def test_a_store_without_the_document_is_a_cluster_without_members(tmp_path, folder):
    empty = Blobs((tmp_path / "empty").as_uri())
    async with following(empty, folder) as (polled, _):
        await wait_polled("missing")
        assert polled.value == Membership()
    await empty.close()


async def test_a_refresh_asks_at_once(blobs, folder):
    known = Generations()
    polling = DocumentPoller(blobs, folder, [known], every_s=60)
    await polling.start()
    await Purges(blobs).purge("a.mp3")
    await wait_true(lambda: _refreshed(polling, known), what="the purge is known")
    await polling.close()


async def _refreshed(polling: DocumentPoller, known: Generations) -> bool:
    await polling.refresh(PURGES.name)
    return known.generation("a.mp3") == 1
