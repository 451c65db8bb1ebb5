"""The site's own jobs: smaller photos, mails, questions, crons, and the workflow of an advert.

    headrace up examples.bazaar.chores:app

Some fail, as they do on a real site: a mail server puts unknown senders off, a mailbox does not
exist, a night report meets a locked file. They are retried, or kept as failed until a person or a
cron retries them.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from typing import Final

import msgspec
from examples.bazaar.adverts import VARIANT_WIDTHS, Advert, variant_key
from examples.bazaar.app import adverts, app, records
from examples.bazaar.errands import MAIL, QUESTIONS
from examples.bazaar.shops import shop_named
from PIL import Image

from headrace.jobs import JobContext, JobFilter, WorkflowContext

UNWANTED: Final = ("casino", "wire transfer")
RETRIED_AFTER_S: Final = 60.0

app.limiter("smtp", rate="120/m", concurrency=3)


class Letter(msgspec.Struct):
    """A mail to a follower. `trouble` is what its mail server will do."""

    uid: str
    to: str
    subject: str
    trouble: str = ""


class Question(msgspec.Struct):
    """A question of a buyer, which is read before the seller gets it."""

    uid: str
    text: str
    seller: str


class Version(msgspec.Struct):
    """A version of an advert."""

    seller: str
    item: str
    version: int


@app.task("bazaar.variants", importance=3, retries=5)
async def make_variants(photo: str) -> None:
    """Store smaller variants of a photo."""
    original = await app.blobs.get(photo)
    for width, data in (await asyncio.to_thread(shrink, original)).items():
        await app.media.objects.put(variant_key(photo, width), data)
    await asyncio.to_thread(adverts.add_variants, photo)


def shrink(original: bytes) -> dict[int, bytes]:
    """The photo as JPEG in every width of the site."""
    made = {}
    image = Image.open(io.BytesIO(original)).convert("RGB")
    for width in VARIANT_WIDTHS:
        image.thumbnail((width, width))
        out = io.BytesIO()
        image.save(out, "JPEG", quality=82)
        made[width] = out.getvalue()
    return made


@app.workflow("bazaar-publish", retries=5)
async def publish_advert(ctx: WorkflowContext, version: Version) -> str:
    """Check an advert, let searches find it, make its variants, announce it."""
    place = (version.seller, version.item)
    photos: list[str] | None = await ctx.step("check", check_advert, *place)
    if photos is None:
        return "no longer on the site"
    await ctx.step("index", index_advert, *place)
    if photos:
        await ctx.run("variants", make_variants.job(photo=photos[0]))
    await ctx.step("announce", announce_advert, *place, version.version)
    return "announced"


async def check_advert(seller: str, item: str) -> list[str] | None:
    """The stored photos of the advert; None: it is not on the site."""
    advert = await asyncio.to_thread(adverts.find, seller, item)
    return None if advert is None else [photo.key for photo in advert.photos if photo.key]


async def index_advert(seller: str, item: str) -> None:
    """Let searches find the advert."""
    advert = await asyncio.to_thread(adverts.find, seller, item)
    if advert is not None:
        shop = shop_named(seller)
        words = [advert.title, advert.category, seller, shop.town if shop else ""]
        await asyncio.to_thread(adverts.index, seller, item, " ".join(words))


async def announce_advert(seller: str, item: str, version: int) -> None:
    """Put the advert among the site's news."""
    advert = await asyncio.to_thread(adverts.find, seller, item)
    if advert is not None:
        news = Advert(seller, item, version, advert.title, advert.price, advert.photos)
        await asyncio.to_thread(adverts.announce, news)


@app.task(MAIL, limiter="smtp", retries=4, concurrency=4, keep_done="10m")
async def send_mail(job: JobContext[Letter]) -> None:
    """Send one mail, within the rate that its provider allows."""
    letter = job.payload
    with records.running(letter.uid) as run:
        await asyncio.sleep(0.1 + zlib.crc32(letter.uid.encode()) % 400 / 1000)
        if letter.trouble == "greylisted" and run == 1:
            raise ConnectionError("451 greylisted: this sender is new here, try again later")
        if letter.trouble == "no mailbox" and run == 1:  # corrected before the retry
            job.fail(f"550 no such mailbox: {letter.to}")
            return
        records.take_effect(letter.uid)


@app.task(QUESTIONS, retries=3, concurrency=4)
async def read_question(question: Question) -> None:
    """Read a buyer's question before its seller gets it."""
    with records.running(question.uid):
        await asyncio.sleep(0.02)
        if not any(word in question.text for word in UNWANTED):
            await asyncio.sleep(0.05)  # passing it on
        records.take_effect(question.uid)


@app.cron("* * * * *")
async def retry_mails() -> None:
    """Retry the mails that failed a minute ago or earlier."""
    old = JobFilter(queue=MAIL, state="failed", older_than_s=RETRIED_AFTER_S)
    await app.jobs.bulk("retry", old)


@app.cron("* * * * *", retries=4)
async def night_report(job: JobContext[None]) -> None:
    """Add up the site's minute. Its file is locked now and then."""
    if job.attempt == 1 and zlib.crc32(str(job.id).encode()) % 3 == 0:
        raise BlockingIOError("report.csv is open in a spreadsheet")
    job.progress(0.5, "counting")
    await asyncio.sleep(0.5)
    records.put_paper("report", {"adverts": len(await asyncio.to_thread(adverts.shown))})
