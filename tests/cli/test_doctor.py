"""Doctor checks of root token, Valkey settings for feeds, media URLs, flusher and roles."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import msgspec
import pytest

from headrace import Headrace
from headrace.cli import doctor
from headrace.cli.doctor import (
    check_flusher,
    check_media_urls,
    check_roles,
    check_token,
    check_up,
    failed,
)
from headrace.cli.doctor_engines import FEED_SETTINGS, check_valkey
from headrace.engines.backup.archive import Archive, BackupConfig
from headrace.engines.backup.archiver import new_holder
from headrace.engines.backup.standby import Source
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import Query
from headrace.kernel.resilience import RoleDeaths
from headrace.web.tokens import Tokens, ensure_root_token, make_token, root_name


@pytest.fixture
async def app(running_engines, database_url, tmp_path):
    """An application on this test's engines."""
    flags = {
        "data.folder": str(tmp_path / "data"),
        "postgres.url": database_url,
        "valkey.url": running_engines.endpoints.valkey_url,
        "valkey.prefix": f"test-{tmp_path.name}",
    }
    async with Headrace(flags=flags) as app:
        yield app


@pytest.fixture
def check(postgres, tmp_path):
    """Run the token check on this test's folder."""
    app, engines = SimpleNamespace(data_folder=tmp_path), SimpleNamespace(postgres=postgres)

    async def ask():
        [finding] = await check_token(app, engines)
        return finding

    return ask


async def test_a_valid_or_missing_token_is_ok(check, postgres, tmp_path):
    assert (await check()).state == "ok"
    await ensure_root_token(tmp_path, Tokens(postgres))
    assert (await check()).state == "ok"


async def test_a_revoked_token_fails_with_a_fix(check, postgres, tmp_path):
    tokens = Tokens(postgres)
    root = await ensure_root_token(tmp_path, tokens)
    await tokens.revoke(root_name(root.file.read_text().strip()))
    finding = await check()
    assert finding.state == "fail"
    assert "revoked" in finding.text
    assert f"delete {root.file}" in finding.fix
    assert "headrace tokens create" in finding.fix


async def test_a_token_unknown_to_a_restored_database_is_a_warning(check, tmp_path):
    (tmp_path / "token").write_text(make_token() + "\n")
    finding = await check()
    assert finding.state == "warn"
    assert "unknown to this database" in finding.text


@pytest.mark.parametrize(
    ("url", "text", "fix"),
    [
        ("postgresql://h@127.0.0.1:1/h", "ConnectionRefusedError", "start it, or correct --url"),
        ("postgresql://h@no-such-host.invalid/h", "gaierror: .+", "start it, or correct --url"),
        ("", "no_such_database.*pg_hba.conf", ""),
    ],
)
async def test_what_keeps_postgres_from_answering_is_named(running_engines, url, text, fix):
    url = url or running_engines.database_url("no_such_database")
    postgres = Postgres(url, PostgresConfig())
    try:
        with pytest.raises(PostgresDown) as caught:
            await postgres.value(Query("test", "", "SELECT 1", ()))
    finally:
        await postgres.close()
    finding = failed(Headrace(flags={"postgres.url": url}).config, "postgres", caught.value)
    assert re.search(text, finding.text)
    assert "headrace doctor" not in finding.text
    assert finding.fix.startswith(fix)


DOWN_URL = "postgresql://me:hunter2@127.0.0.1:1/site"


@pytest.mark.parametrize("place", ["variable", "file", "direct"])
async def test_an_engine_that_is_down_is_one_finding_with_its_address_and_setting(
    running_engines, database_url, tmp_path, monkeypatch, place
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_VALKEY_URL", running_engines.endpoints.valkey_url)
    fix = "start it, or correct HEADRACE_POSTGRES_URL"
    if place == "file":
        (tmp_path / "headrace.toml").write_text(f'[postgres]\nurl = "{DOWN_URL}"\n')
        fix = "start it, or correct `url` of [postgres] in headrace.toml"
    elif place == "variable":
        monkeypatch.setenv("HEADRACE_POSTGRES_URL", DOWN_URL)
    else:
        monkeypatch.setenv("HEADRACE_POSTGRES_URL", database_url)
        monkeypatch.setenv("HEADRACE_POSTGRES_DIRECT_URL", DOWN_URL)
        fix += " or HEADRACE_POSTGRES_DIRECT_URL"
    async with Headrace(flags={"data.folder": str(tmp_path / "data")}) as app:
        found = [one for one in await check_up(app, ("headrace.jobs",)) if one.state == "fail"]
    assert [(one.subject, one.fix) for one in found if one.subject != "views"] == [
        ("postgres", fix)
    ]
    assert "127.0.0.1:1 does not respond" in found[0].text
    assert "hunter2" not in f"{found}"


async def test_engines_that_do_not_answer_are_one_finding_each(tmp_path, monkeypatch):
    server = await asyncio.start_server(lambda reader, _: reader.read(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(doctor, "CHECK_S", 0.2)
    flags = {"postgres.url": f"postgresql://me:hunter2@127.0.0.1:{port}/site"}
    flags |= {"valkey.url": f"valkey://127.0.0.1:{port}", "data.folder": str(tmp_path / "data")}
    async with Headrace(flags=flags) as app:
        found = [one for one in await check_up(app, ()) if one.state == "fail"]
    server.close()
    assert [one.subject for one in found[:2]] == ["postgres", "valkey"]
    assert all(f"127.0.0.1:{port}" in one.text for one in found[:2])
    assert "hunter2" not in f"{found}"
    others = {one.subject for one in found[2:]}
    assert others.isdisjoint({"postgres", "schema", "secret", "valkey", "views", "flusher", "feed"})


async def test_a_server_that_starts_is_not_down():
    async def refuse(reader, writer):
        await reader.read(1)
        fields = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"
        writer.write(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    postgres = Postgres(f"postgresql://h@127.0.0.1:{port}/h?sslmode=disable", PostgresConfig())
    try:
        with pytest.raises(PostgresDown, match="is starting, stopping or recovering") as caught:
            await postgres.value(Query("test", "", "SELECT 1", ()))
        assert caught.value.is_starting
    finally:
        await postgres.close()
        server.close()


async def test_a_file_without_token_fails(check, tmp_path):
    (tmp_path / "token").write_text("")
    assert (await check()).state == "fail"


@pytest.mark.parametrize("name", FEED_SETTINGS)
async def test_low_feed_settings_are_a_warning(valkey, name):
    engines, (least, cost) = SimpleNamespace(valkey=valkey), FEED_SETTINGS[name]

    async def reported():
        return [finding for finding in await check_valkey(engines) if name in finding.text]

    assert await reported() == []
    await valkey.command("CONFIG", "SET", name, 128)
    try:
        [finding] = await reported()
    finally:
        await valkey.command("CONFIG", "SET", name, least)
    assert finding.state == "warn"
    assert cost in finding.text
    assert finding.fix.startswith(f"set {name} {least}")


@pytest.mark.parametrize(
    ("flags", "is_reported"),
    [
        ({}, False),
        ({"media.listen": "0.0.0.0:8081"}, True),
        ({"media.listen": "[::]:8081"}, True),
        ({"media.listen_tls": "127.0.0.1:8443"}, True),
        ({"media.listen_tls": "0.0.0.0:443", "media.public_url": "https://a.example.com"}, False),
        ({"media.listen": "0.0.0.0:8081", "media.public_url": "https://img.example.com"}, False),
    ],
)
def test_unreachable_media_urls_are_a_warning(flags, is_reported):
    found = check_media_urls(Headrace(flags=flags))
    assert [finding.state for finding in found] == ["warn"] * is_reported
    assert all("media.public_url" in finding.fix for finding in found)


async def test_hits_without_flusher_are_a_warning(app):
    assert (await check_flusher(app))[0].state == "ok"
    await app.views.hit("ad:1")
    [finding] = await check_flusher(app)
    assert finding.state == "warn"
    assert "the views of 1 call wait without a flusher" in finding.text
    assert "headrace flusher" in finding.fix


def test_a_role_that_died_lately_is_a_warning(tmp_path, monkeypatch):
    deaths, facts = RoleDeaths(tmp_path), {"exit_code": 1, "deaths": 3, "restart_in_s": 2.0}
    assert check_roles(tmp_path) == []
    deaths.note("flusher", facts)
    [finding] = check_roles(tmp_path)
    assert (finding.state, finding.subject) == ("warn", "roles")
    assert "flusher died 0 s ago with exit code 1, 3 deaths in a row" in finding.text
    monkeypatch.setattr(doctor, "DIED_LATELY_S", 0.0)
    assert check_roles(tmp_path) == []
    monkeypatch.undo()
    deaths.clear()
    assert check_roles(tmp_path) == []


async def test_a_folder_that_is_no_site_is_named_instead_of_missing_engines(tmp_path):
    archive_url, folder = (tmp_path / "archive").as_uri(), tmp_path / "data"
    app = Headrace(flags={"data.folder": str(folder), "backup.url": archive_url})
    primary = Archive(BackupConfig(url=archive_url), tmp_path / "first", writes=True)
    await primary.claim(new_holder(None, tmp_path / "first", generation=1))
    folder.mkdir()

    async def reported():
        return [found for found in await check_up(app, ()) if found.state == "fail"]

    (folder / "recovering").touch()
    [found] = await reported()
    assert ("restore did not end" in found.text, found.fix) == (
        True,
        "delete it, and restore again",
    )
    (folder / "recovering").write_bytes(msgspec.json.encode(Source(1, 1, 0)))
    [found] = await reported()
    assert (found.subject, found.fix) == ("standby", "start `headrace standby`")
    assert "does not run" in found.text
    await primary.claim(new_holder(await primary.holder(), tmp_path / "other", generation=2))
    [found] = await reported()
    assert "follows generation 1" in found.text
    await primary.claim(new_holder(await primary.holder(), folder, generation=2))
    [found] = await reported()
    assert "promoted to generation 2" in found.text
    (folder / "recovering").unlink()
    (folder / "postgres").mkdir()
    await primary.claim(new_holder(await primary.holder(), tmp_path / "other", generation=3))
    [found] = await reported()
    assert found.subject == "engines"
    assert "run `headrace promote`, then `headrace up`" in found.fix
    [found] = [one for one in await check_up(app, ()) if one.subject == "backup"]
    assert f"{tmp_path / 'other'} on" in found.text
    (folder / "fenced").write_text('{"reason": "another one is"}')
    [found] = await reported()
    assert found.text == "it was the primary: another one is"
    await primary.close()
