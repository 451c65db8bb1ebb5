"""Photos into an S3 store that fails: each is stored once, and each row has its bytes."""

from __future__ import annotations

import hashlib

import pytest
from room import HEAD
from tests.kit.own_s3 import done_then, error, reset, stalled

from headrace.engines.blobs import Blobs, BlobsConfig
from headrace.fetch import photo_fetch
from headrace.kernel.resilience import Backoff

pytestmark = pytest.mark.slow
PHOTOS = 12


@pytest.fixture
async def blobs(s3, s3_proxy, monkeypatch):
    """A store behind the proxy, and quick probes of it."""
    monkeypatch.setattr(
        photo_fetch.StoreBreaker.__init__, "__defaults__", (Backoff(first_s=0.1, max_s=0.2),)
    )
    blobs = Blobs(s3.url, BlobsConfig(timeout_s=0.5))
    yield blobs
    await blobs.close()


@pytest.mark.parametrize(
    "fault",
    [
        done_then(reset),
        pytest.param(error(503, "SlowDown", Retry_After="1"), marks=pytest.mark.soak),
        pytest.param(reset, marks=pytest.mark.soak),
        pytest.param(stalled, marks=pytest.mark.soak),
        pytest.param(error(403, "AccessDenied"), marks=pytest.mark.soak),
    ],
    ids=["reset after the effect", "SlowDown", "reset", "stalled", "403"],
)
async def test_photos_survive_a_store_that_fails(shop, worker, blobs, s3_proxy, fault):
    s3_proxy.fail(fault, when=b"PUT ", times=15)
    names = [f"/photo/{n}" for n in range(PHOTOS)]
    rows = "".join(f"i{n},Item,5,{shop.origin.url(name)}\n" for n, name in enumerate(names))
    run = await shop.wait_done(await shop.run(HEAD + rows), hurries=True)
    s3_proxy.heal()
    assert run.state == "done"
    stored = await shop.sql("SELECT sha256, key FROM #fetch_photo")
    assert len(stored) == PHOTOS
    for row in stored:
        assert hashlib.sha256(await blobs.get(row["key"])).hexdigest() == row["sha256"]
    found = {photo_.key for item in shop.items for photo_ in item.photos}
    assert found == {row["key"] for row in stored}
