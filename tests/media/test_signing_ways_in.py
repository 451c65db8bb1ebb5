"""Signing, tags and tracing through Python, HTTP and commands, with equal answers and refusals."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from id3_tracks import JPEG
from litestar import Litestar
from litestar.di import Provide
from litestar.testing import AsyncTestClient
from tests.kit.ways_in import PythonVerbs, Refused, plain

from headrace.kernel.errors import HeadraceError
from headrace.media import Media, MediaConfig
from headrace.media.cli import objects as commands
from headrace.media.http import objects as routes
from headrace.media.signing import Keys, check
from headrace.media.tracing import read_trace
from headrace.web.bodies import JsonBody, require_json
from headrace.web.problems import render_error

SECRET = "w" * 32
KEY = "tracks/a.mp3"


@pytest.fixture
def media(blobs):
    return Media(blobs, MediaConfig(), secret=lambda: SECRET)


class PythonWay(PythonVerbs):
    """The service itself."""

    def __init__(self, media: Media) -> None:
        self._media = media

    async def sign(self, *, key, **options):
        return await self._media.objects.sign(key, **options)

    async def put_tag(self, *, cover=None, **texts):
        data = base64.b64decode(cover) if cover else None
        return await self._media.tags.put(cover=data, **texts)

    async def get_tag(self, *, id):  # noqa: A002 - the routes' own word
        return await self._media.tags.get(id)

    async def rm_tag(self, *, id):  # noqa: A002 - as above
        await self._media.tags.rm(id)

    async def trace(self, *, tag, for_s):
        return await self._media.traces.start(tag, for_s=for_s)

    async def untrace(self, *, tag=None):
        return await self._media.traces.stop(tag)

    async def traces(self):
        return await self._media.traces.list()


class HttpWay:
    """Requests to the routes, as the API decodes and refuses them."""

    def __init__(self, client) -> None:
        self._client = client

    async def do(self, verb, given):
        asked = {
            "sign": ("POST", "/v1/media/sign", given),
            "put_tag": ("POST", "/v1/media/tags", given),
            "get_tag": ("GET", f"/v1/media/tags/{given.get('id')}", None),
            "rm_tag": ("DELETE", f"/v1/media/tags/{given.get('id')}", None),
            "trace": ("POST", "/v1/media/traces", given),
            "untrace": ("DELETE", "/v1/media/traces", None),
            "traces": ("GET", "/v1/media/traces", None),
        }
        method, path, body = asked[verb]
        params = given if verb == "untrace" else None
        answer = await self._client.request(method, path, json=body, params=params)
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["code"])
        return answer.json() if answer.content else None


class CommandWay:
    """The commands, in a thread as a terminal would run them."""

    def __init__(self, media: Media, folder) -> None:
        self._media, self._folder = media, folder

    async def do(self, verb, given):
        words, shown = self.words(verb, dict(given)), []
        loop = asyncio.get_running_loop()
        terminal = SimpleNamespace(
            is_json=True,
            run=lambda _kind, ask: asyncio.run_coroutine_threadsafe(
                ask(self._media), loop
            ).result(),
            show=lambda value, text: shown.append((value, text)),
        )
        command, *rest = words
        ran = await asyncio.to_thread(
            CliRunner().invoke, command, rest, obj=terminal, standalone_mode=False
        )
        if isinstance(ran.exception, HeadraceError):
            raise Refused(ran.exception.status, ran.exception.code) from ran.exception
        if isinstance(ran.exception, click.UsageError):
            raise Refused(422, ran.exception.format_message()) from ran.exception
        assert ran.exception is None, ran.exception
        return plain(shown[0][0])

    def words(self, verb, given):
        if verb == "sign":
            names = {"ttl_s": "--ttl", "grid_s": "--grid", "rate": "--rate"}
            units = {"ttl_s": "s", "grid_s": "s", "rate": "B"}
            words = [commands.sign, given.pop("key")]
            for name, value in given.items():
                words += [names.get(name, f"--{name}"), f"{value}{units.get(name, '')}"]
            return words
        if verb == "put_tag":
            if "cover" in given:
                cover = self._folder / "cover"
                cover.write_bytes(base64.b64decode(given["cover"]))
                given["cover"] = str(cover)
            options = [word for name, value in given.items() for word in (f"--{name}", value)]
            return [commands.tag, "put", *options]
        if "trace" in verb:
            options = ["--tag", given["tag"]] if "tag" in given else []
            options += ["--for", f"{given['for_s']}s"] if "for_s" in given else []
            word = {"trace": "on", "untrace": "off", "traces": "show"}[verb]
            return [commands.trace, word, *options]
        return [commands.tag, {"get_tag": "show", "rm_tag": "rm"}[verb], given["id"]]


@pytest.fixture(params=["python", "http", "commands"])
async def way(request, media, tmp_path):
    if request.param == "python":
        yield PythonWay(media)
    elif request.param == "commands":
        yield CommandWay(media, tmp_path)
    else:
        app = Litestar(
            routes.ROUTES,
            dependencies={"media": Provide(lambda: media, sync_to_thread=False)},
            guards=[require_json],
            dto=JsonBody,
            return_dto=None,
            exception_handlers={Exception: render_error},
        )
        async with AsyncTestClient(app) as client:
            yield HttpWay(client)


async def test_a_url_is_signed(way):
    options = {"ttl_s": 600.0, "grid_s": 300.0, "rate": 65_536, "trace": "user=42"}
    signed = await way.do("sign", {"key": KEY, "address": "203.0.113.0/24", **options})
    base, _, query = signed["url"].partition("?")
    assert base == f"http://127.0.0.1:8081/m/{KEY}"
    rights = check(Keys.derive(SECRET), f"/m/{KEY}", query, now_s=0, address="203.0.113.9")
    assert (rights.rate, rights.trace, rights.expires_at % 300) == (65_536, "user=42", 0)
    assert signed["expires_at"].endswith("Z")
    assert signed == await way.do("sign", {"key": KEY, "address": "203.0.113.0/24", **options})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"key": "../x"}, "422 blobs.invalid_key"),
        ({"key": "_headrace/x"}, "422 media.unsignable_url"),
        ({"key": KEY, "ttl_s": 0}, "422 media.unsignable_url"),
        ({"key": KEY, "ttl_s": 10**9}, "422 media.unsignable_url"),
        ({"key": KEY, "grid_s": 0}, "422 media.unsignable_url"),
        ({"key": KEY, "address": "here"}, "422 media.unsignable_url"),
        ({"key": KEY, "rate": 0}, "422 media.unsignable_url"),
        ({"key": KEY, "tag": "x"}, "422 media.unsignable_url"),
        ({"key": "a.jpg", "tag": "ab" * 32}, "422 media.unsignable_url"),
        ({"key": KEY, "trace": "user=a b"}, "422 media.unsignable_url"),
        ({"key": KEY, "tag": "ab" * 32}, "404 media.tag_unknown"),
    ],
)
async def test_what_cannot_be_signed(way, given, told):
    with pytest.raises(Refused) as caught:
        await way.do("sign", given)
    assert caught.value.told == told


async def test_the_life_of_a_tag(way):
    given = {"title": "Über", "artist": "雨", "buyer": "user:42"}
    cover = base64.b64encode(JPEG).decode()
    stored = await way.do("put_tag", {**given, "cover": cover})
    assert stored == {
        **given,
        "id": stored["id"],
        "album": None,
        "size_bytes": stored["size_bytes"],
        "cover_bytes": len(JPEG),
    }
    assert await way.do("put_tag", {**given, "cover": cover}) == stored
    assert await way.do("get_tag", {"id": stored["id"]}) == stored
    signed = await way.do("sign", {"key": KEY, "tag": stored["id"]})
    assert f"&t={stored['id']}&s=" in signed["url"]
    await way.do("rm_tag", {"id": stored["id"]})
    for verb in ("get_tag", "rm_tag"):
        with pytest.raises(Refused) as caught:
            await way.do(verb, {"id": stored["id"]})
        assert caught.value.told == "404 media.tag_unknown"


@pytest.mark.parametrize("identifier", ["x", "AB" * 32, "ab" * 31, "ab" * 33])
async def test_no_id_of_a_tag(way, identifier):
    with pytest.raises(Refused) as caught:
        await way.do("get_tag", {"id": identifier})
    assert caught.value.told == "404 media.tag_unknown"


@pytest.mark.parametrize(
    "given",
    [{}, {"title": ""}, {"buyer": "a b"}, {"cover": base64.b64encode(b"GIF89a").decode()}],
)
async def test_a_bad_tag_is_refused_at_the_door(way, media, given):
    with pytest.raises(Refused) as caught:
        await way.do("put_tag", given)
    assert caught.value.told == "422 media.tag_invalid"
    assert [info async for info in media.blobs.list("_headrace")] == []


async def test_requests_are_traced_for_a_while(way):
    watch = await way.do("trace", {"tag": f"object={KEY}", "for_s": 60})
    assert watch == {"name": "object", "value": KEY, "ends_at": watch["ends_at"]}
    other = await way.do("trace", {"tag": "user=42", "for_s": 60})
    assert await way.do("traces", {}) == [watch, other]
    assert await way.do("untrace", {"tag": f"object={KEY}"}) == [watch]
    assert await way.do("untrace", {}) == [other]
    assert await way.do("traces", {}) == []
    for given in ({"tag": "user", "for_s": 60}, {"tag": "user=42", "for_s": 10**6}):
        with pytest.raises(Refused) as caught:
            await way.do("trace", given)
        assert caught.value.told == "422 media.trace_invalid"


async def test_a_tag_whose_bytes_changed_is_not_shown(way, media):
    stored = await way.do("put_tag", {"title": "Lied"})
    key = f"_headrace/media/tags/{stored['id']}"
    data = await media.blobs.get(key)
    await media.blobs.put(key, data.replace(b"Lied", b"Leid"))
    with pytest.raises(Refused) as caught:
        await way.do("get_tag", {"id": stored["id"]})
    assert caught.value.told == "500 media.tag_corrupt"


def test_the_commands_print_what_a_shell_can_use(tmp_path, blobs):
    """One line: a URL, an id, a table; and the effect of a dry run."""
    media = Media(blobs, MediaConfig(), secret=lambda: SECRET)
    shown = []
    terminal = SimpleNamespace(
        is_json=False,
        run=lambda _kind, ask: asyncio.run(ask(media)),
        show=lambda _value, text: shown.append(text),
    )

    def run(command, *words):
        ran = CliRunner().invoke(command, words, obj=terminal, standalone_mode=False)
        assert ran.exception is None, ran.exception
        return shown.pop()

    identifier = run(commands.tag, "put", "--title", "Lied", "--buyer", "u1")
    assert len(identifier) == 64
    assert "title: Lied\n  buyer: u1" in run(commands.tag, "show", identifier)
    assert run(commands.sign, KEY, "--tag", identifier).startswith("http://127.0.0.1:8081/")
    assert run(commands.tag, "rm", identifier, "--dry-run") == f"would remove {identifier}"
    assert run(commands.tag, "rm", identifier) == f"removed {identifier}"
    assert run(commands.trace, "show") == "no active traces"
    started = run(commands.trace, "on", "--tag", "user=42", "--for", "5m")
    assert started.splitlines()[1].startswith("user=42  ")
    assert run(commands.trace, "show") == started
    assert run(commands.trace, "off", "--tag", "user=42") == started
    assert run(commands.trace, "off") == "no active traces"


def test_a_url_is_plain_unless_it_must_be_signed(blobs):
    options = {"secret": lambda: SECRET}
    open_to_all = Media(blobs, MediaConfig(), **options)
    assert open_to_all.objects.url(KEY) == f"http://127.0.0.1:8081/m/{KEY}"
    assert "&s=" in open_to_all.objects.url(KEY, ttl_s=60)
    shut = Media(blobs, MediaConfig(signed="required", url_ttl_s=60), **options)
    assert "&s=" in shut.objects.url(KEY)


def test_what_a_url_says_of_its_user_is_read_by_nodes(media):
    query = media.objects.url(KEY, ttl_s=60, trace="user=42,request=r7").partition("?")[2]
    rights = check(media.objects.url_keys, f"/m/{KEY}", query, now_s=0, address="::1")
    tag = read_trace({"baggage": "user=43"}, KEY, rights.trace)
    assert json.loads(json.dumps(tag)) == [None, "42", "r7", KEY]
