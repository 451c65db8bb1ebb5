"""The demo site's own jobs: an advert's workflow, mails that fail and recover, crons."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples.bazaar.adverts import Advert, Photo, variant_key
from examples.bazaar.lock import FOLDER
from examples.bazaar.pictures import Album

import headrace
from headrace.jobs import NewJob
from headrace.testing import drain

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MODULES = ("examples.bazaar.app", "examples.bazaar.chores")


@pytest.fixture
async def site(surroundings, tmp_path, monkeypatch):
    """The site's code, on a database and a folder of its own."""
    monkeypatch.setenv("BAZAAR_DATABASE", str(tmp_path / "bazaar.sqlite"))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("examples.bazaar.chores")
    yield found
    await found.app.close()
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_site_started_by_hand_writes_into_the_folder_of_the_demo(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "BAZAAR_DATABASE"}
    paths = os.pathsep.join([str(ROOT), str(Path(headrace.__file__).parents[1])])
    subprocess.run(
        [sys.executable, "-c", "import examples.bazaar.site"],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": paths},
        check=True,
        timeout=60,
    )
    assert [one.name for one in tmp_path.iterdir()] == [str(FOLDER)]
    assert (tmp_path / FOLDER / "bazaar.sqlite").is_file()


async def test_an_advert_gets_variants_words_and_news_once(site):
    key, app = "photos/ab/abcd.jpg", site.app
    await app.media.objects.put(key, Album().photo("lamps-03-x-0001-a.jpg"))
    photos = (Photo("http://x/a.jpg", key, "ab", "stored", 3),)
    site.adverts.show(
        Advert("velo-ada", "lamp", 1, "Teal lamp", "9", photos, "lamps"), action="publish"
    )
    version = {"seller": "velo-ada", "item": "lamp", "version": 1}
    for _ in range(2):
        await app.workflows.start("bazaar-publish", version, unique="velo-ada:lamp@1")
    await drain(app)
    assert site.adverts.variants() == {key}
    for width in (480, 160):
        data = await app.blobs.get(variant_key(key, width))
        assert site.shrink(data)[160]
    assert [one.item for one in site.adverts.search("tea gent")] == ["lamp"]
    assert [one.title for one in site.adverts.news(5)] == ["Teal lamp"]
    site.adverts.hide("velo-ada", "lamp", version=2)
    gone = await app.workflows.start("bazaar-publish", version)
    await drain(app)
    assert (await app.workflows.get(gone)).result == "no longer on the site"


async def test_a_mail_has_its_effect_once_however_often_it_runs(site):
    letters = [
        {"uid": f"{trouble}-1", "to": "ann@post.example", "subject": "x", "trouble": trouble}
        for trouble in ("", "no mailbox")
    ]
    jobs = [NewJob(queue=site.MAIL, payload=one, lane="post.example") for one in letters]
    question = {"uid": "q-1", "text": "Still there?", "seller": "velo-ada"}
    jobs.append(NewJob(queue=site.QUESTIONS, payload=question))
    uids = [job.payload["uid"] for job in jobs]
    site.records.ask([(uid, "x") for uid in uids])
    ids = await site.app.jobs.enqueue_many(jobs)
    site.records.accept(uids)
    await drain(site.app)
    assert site.records.errands().done == 2
    assert (await site.app.jobs.job(ids[1])).state == "failed"
    await site.app.jobs.retry(ids[1])
    await drain(site.app)
    assert (await site.app.jobs.job(ids[1])).state == "done"
    seen = site.records.errands()
    assert (seen.accepted, seen.done, seen.doubled) == (3, 3, 0)
