"""Fingerprints of the root secret: a host with another one is named, a rotated one is not."""

from __future__ import annotations

import socket

import pytest

from headrace import Headrace
from headrace.cli.doctor_engines import check_secrets
from headrace.console.screens.health import secret_issues
from headrace.console.views import PanelData
from headrace.engines.sql import Query
from headrace.web.recorder import Recorder
from headrace.web.role_secrets import (
    RoleSecret,
    accepted_in,
    differing,
    fingerprints_of,
    note_secrets,
    read_secrets,
)

OLD, NEW = "an old root secret of 32 characters.", "a new root secret of 32 characters.."


def role(host, secret, *accepted, name="api"):
    fingerprint, others = fingerprints_of(secret, accepted)
    return RoleSecret(host=host, role=name, fingerprint=fingerprint, accepted=accepted_in(others))


def test_the_host_with_another_secret_is_named():
    found = [role("a", OLD), role("b", NEW), role("b", NEW, name="media"), role("c", OLD)]
    assert differing(found) == {"b": "api, media on b uses another HEADRACE_SECRET than a, c"}
    [issue] = secret_issues(PanelData(value=found))
    assert (issue.tone, issue.subject) == ("bad", "host b")
    assert differing([]) == {} == differing([role("a", OLD)])


def test_a_secret_that_is_changed_in_order_is_no_fault():
    steps = [
        [role("a", OLD), role("b", OLD, NEW)],
        [role("a", NEW, OLD), role("b", OLD, NEW), role("c", NEW, OLD)],
        [role("a", NEW, OLD), role("b", NEW)],
    ]
    assert [differing(found) for found in steps] == [{}, {}, {}]
    assert differing([role("a", NEW, OLD), role("b", OLD)]), "b refuses what a signs"


def test_the_secret_cannot_be_found_by_its_length_or_use():
    fingerprint, others = fingerprints_of(OLD, [NEW])
    assert len(fingerprint) == len(others) == 8
    assert fingerprint != others


@pytest.fixture
async def app(running_engines, database_url, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_SECRET", OLD)
    flags = {
        "data.folder": str(tmp_path / "data"),
        "postgres.url": database_url,
        "valkey.url": running_engines.endpoints.valkey_url,
    }
    async with Headrace(flags=flags) as app:
        yield app


async def test_doctor_fails_and_names_the_host_that_differs(app, postgres):
    await note_secrets(postgres, "a", [role("a", OLD)])
    await note_secrets(postgres, "b", [role("b", NEW), role("b", NEW, name="media")])
    [finding] = await check_secrets(app, app.engines)
    assert finding.state == "fail"
    assert "api, media on b uses another HEADRACE_SECRET" in finding.text
    await note_secrets(postgres, "b", [role("b", OLD)])
    [finding] = await check_secrets(app, app.engines)
    assert (finding.state, finding.text) == ("ok", "HEADRACE_SECRET is the same on 3 hosts")
    for host in ("a", "b"):
        await note_secrets(postgres, host, [role(host, NEW)])
    [finding] = await check_secrets(app, app.engines)
    assert f"this command on {socket.gethostname()}" in finding.text


async def test_a_host_that_ended_is_not_compared(postgres):
    await note_secrets(postgres, "a", [role("a", OLD)])
    await note_secrets(postgres, "b", [role("b", NEW)])
    aged = Query("test", "", "UPDATE headrace.role_secret SET seen_at = now() - interval '1 h'", ())
    await postgres.run(aged)
    await note_secrets(postgres, "a", [role("a", OLD)])
    assert [one.host for one in await read_secrets(postgres)] == ["a"]


async def test_the_recorder_stores_what_roles_write(app, tmp_path, postgres):
    folder = tmp_path / "metrics"
    folder.mkdir()
    line = 'process_secret_info{{secret="{}",accepted="{}"}} 1.0\n'
    (folder / "api-1.prom").write_text(line.format(*fingerprints_of(OLD, [NEW])))
    (folder / "agent-2.prom").write_text(line.format(*fingerprints_of(NEW, [])))
    recorder = Recorder(folder, lambda: app.engines, host="a")
    try:
        await recorder.step()
        assert await read_secrets(postgres) == [role("a", NEW, name="agent"), role("a", OLD, NEW)]
        (folder / "agent-2.prom").unlink()
        await recorder.step()
        assert [one.role for one in await read_secrets(postgres)] == ["api"]
    finally:
        await recorder.close()
