"""Payloads and results of pydantic: validated at enqueue, received as models, never imported."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from pydantic import BaseModel, Field, field_validator

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.jobs import Batch, InvalidJob, JobContext, NewJob
from headrace.testing import drain

TAKEN_AT = datetime(2026, 5, 1, 12, tzinfo=UTC)


class Place(BaseModel):
    """A nested model."""

    city: str


class Photo(BaseModel):
    """A model with what JSON cannot hold by itself: an alias, a date, a decimal, a set."""

    key: str = Field(alias="Key", min_length=2)
    taken_at: datetime = TAKEN_AT
    price: Decimal = Decimal("1.50")
    tags: set[str] = set()
    place: Place | None = None

    @field_validator("price")
    @classmethod
    def _positive(cls, value):
        if value < 0:
            raise ValueError("a price is not negative")
        return value


PHOTO = Photo(Key="a.jpg", tags={"red"}, place=Place(city="Riga"))


@pytest.fixture
async def app(running_engines, database_url, tmp_path):
    """An app on this test's database."""
    app = Headrace(flags={"data.folder": str(tmp_path)})
    valkey_url = running_engines.endpoints.valkey_url
    app.use_endpoints(Endpoints(database_url, valkey_url, tmp_path.as_uri()))
    yield app
    await app.close()


async def test_every_form_of_handler_receives_the_model(app):
    seen = []

    @app.task("whole", keep_result=True)
    async def whole(photo: Photo) -> Photo:
        seen.append(photo)
        return photo

    @app.task("optional")
    async def optional(photo: Photo | None) -> None:
        seen.append(photo)

    @app.task("context")
    async def context(job: JobContext[Photo]) -> None:
        seen.append(job.payload)

    @app.task("batch", batch=10)
    async def batch(jobs: Batch[Photo]) -> None:
        seen.extend(jobs.payloads)

    @app.task("fields")
    async def fields(photo: Photo, width: int, more: list[Photo]) -> None:
        seen.extend([photo, *more])
        assert width == 5

    job = await whole.enqueue(PHOTO)
    await optional.enqueue(PHOTO)
    await context.enqueue({"Key": "a.jpg", "tags": ["red"], "place": {"city": "Riga"}})
    await batch.enqueue_many([PHOTO])
    await fields.enqueue(photo=PHOTO, width=5, more=[PHOTO])
    assert await drain(app) == {"done": 5}
    assert seen == [PHOTO] * 6
    assert Photo.model_validate(await job.result(timeout_s=5)) == PHOTO
    await optional.enqueue(None)
    await drain(app)
    assert seen[-1] is None


@pytest.mark.parametrize(
    ("payload", "texts"),
    [
        ({}, ["Key: Field required"]),
        ({"Key": "a"}, ["Key: String should have at least 2 characters"]),
        ({"Key": "ab", "taken_at": "x", "place": {}}, ["taken_at: Input", "place.city: Field"]),
        ({"Key": "ab", "price": -1}, ["price: Value error, a price is not negative"]),
        ([], ["Input should be an object"]),
    ],
)
async def test_a_payload_that_does_not_fit_is_refused_at_enqueue(app, payload, texts):
    @app.task("whole")
    async def whole(photo: Photo) -> None:
        """Never runs."""

    @app.task("fields")
    async def fields(photo: Photo) -> None:
        """Never runs."""

    for call in (
        whole.enqueue(payload),
        whole.enqueue_many([PHOTO, payload]),
        app.jobs.enqueue(NewJob(queue="whole", payload=payload)),
    ):
        with pytest.raises(InvalidJob) as raised:
            await call
        for text in texts:
            assert text in str(raised.value)
        assert "pydantic.dev" not in str(raised.value)
    assert await drain(app) == {}


async def test_a_changed_model_fails_its_old_jobs_unless_upgraded(app):
    @app.task("photos")
    async def old(photo: dict) -> None:
        """The code of yesterday."""

    await old.enqueue({"name": "a.jpg"})
    seen = []
    new = Headrace(flags={"data.folder": str(app.data_folder)})
    new.use_endpoints(app._endpoints)

    @new.task("photos", version=2, upgrade={1: lambda value: {"Key": value["name"]}})
    async def photos(photo: Photo) -> None:
        seen.append(photo.key)

    assert await drain(new) == {"done": 1}
    assert seen == ["a.jpg"]
    await new.close()


def test_headrace_does_not_import_pydantic():
    code = (
        "import sys; from headrace import Headrace; app = Headrace();"
        " app.task('a')(lambda: None); import headrace.jobs.validation, headrace.testing.jobs;"
        " assert 'pydantic' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
