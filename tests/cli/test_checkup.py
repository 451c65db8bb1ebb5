"""The doctor on the root token: valid, revoked, of another database, unreadable; and on what the feed asks of Valkey."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.cli.checkup import INTSET_ENTRIES, check_token, check_valkey
from penstock.web.tokens import Tokens, ensure_root_token, make_token, root_name


@pytest.fixture
def check(postgres, tmp_path):
    """Ask the doctor about the token in this test's folder."""
    app, engines = SimpleNamespace(data_folder=tmp_path), SimpleNamespace(postgres=postgres)

    async def ask():
        [finding] = await check_token(app, engines)
        return finding

    return ask


async def test_a_token_that_works_or_is_not_made_yet_is_well(check, postgres, tmp_path):
    assert (await check()).state == "ok"
    await ensure_root_token(tmp_path, Tokens(postgres))
    assert (await check()).state == "ok"


async def test_a_revoked_token_fails_with_the_mend(check, postgres, tmp_path):
    tokens = Tokens(postgres)
    root = await ensure_root_token(tmp_path, tokens)
    await tokens.revoke(root_name(root.file.read_text().strip()))
    finding = await check()
    assert finding.state == "fail"
    assert "revoked" in finding.text
    assert f"delete {root.file}" in finding.mend
    assert "penstock tokens create" in finding.mend


async def test_a_token_unknown_to_a_restored_database_is_a_warning(check, tmp_path):
    (tmp_path / "token").write_text(make_token() + "\n")
    finding = await check()
    assert finding.state == "warn"
    assert "unknown to this database" in finding.text


async def test_a_file_that_holds_no_token_fails(check, tmp_path):
    (tmp_path / "token").write_text("")
    assert (await check()).state == "fail"


async def test_sets_that_would_take_ten_times_the_memory_are_a_warning(valkey):
    engines, name = SimpleNamespace(valkey=valkey), "set-max-intset-entries"

    async def told():
        return [finding for finding in await check_valkey(engines) if name in finding.text]

    assert await told() == []
    await valkey.command("CONFIG", "SET", name, 512)
    try:
        [finding] = await told()
    finally:
        await valkey.command("CONFIG", "SET", name, INTSET_ENTRIES)
    assert finding.state == "warn"
    assert finding.mend.startswith(f"set {name} {INTSET_ENTRIES}")
