"""Publishable keys: what pages of any origin may do, and nothing more."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from headrace.web import cli
from headrace.web.model import PUBLISHABLE_SCOPES, ScopeNotPublishable
from headrace.web.server import describe_api
from headrace.web.tokens import KEY_PREFIX, PREFIX, Tokens, is_token, make_token

ELSEWHERE = {"origin": "https://shop.example"}


def test_keys_and_tokens_are_distinguished():
    key = make_token(KEY_PREFIX)
    assert key.startswith("hrk_")
    assert is_token(key)
    assert not is_token(key.replace(KEY_PREFIX, PREFIX)[:-1])
    assert {"views:hit"} == PUBLISHABLE_SCOPES


async def test_a_key_carries_no_other_scope(shared_postgres):
    for scopes in (("views:read",), ("views:hit", "jobs:write"), ("*",)):
        with pytest.raises(ScopeNotPublishable, match="views:hit"):
            await Tokens(shared_postgres).create("site", scopes, publishable=True)


async def test_a_page_of_another_origin_may_count(api, key):
    answer = await api.post(f"/v1/seen?k={key}", headers=ELSEWHERE, json=[{"id": "a"}, {"id": "b"}])
    assert (answer.status_code, answer.json()) == (200, {"seen": 2})
    assert answer.headers["access-control-allow-origin"] == "*"
    beacon = {**ELSEWHERE, "content-type": "text/plain;charset=UTF-8"}
    answer = await api.post(f"/v1/seen?k={key}", headers=beacon, content=b'[{"id": "a"}]')
    assert (answer.status_code, answer.json()) == (200, {"seen": 1})


async def test_a_preflight_is_answered(api, key):
    asked = {**ELSEWHERE, "access-control-request-method": "POST"}
    answer = await api.options(f"/v1/seen?k={key}", headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert answer.headers["access-control-allow-headers"] == "content-type"


@pytest.mark.parametrize(
    ("place", "method"),
    [
        ("/v1/seen", "POST"),
        ("/v1/seen?k={key}", "GET"),
        ("/v1/seen?k={key}", "DELETE"),
        ("/v1/hidden?k={key}", "POST"),
        ("/v1/nowhere?k={key}", "POST"),
        ("/v1/seen?k=hrk_", "POST"),
        ("/v1/seen?k={unknown}", "POST"),
        ("/v1/seen?k={key}&k={key}", "POST"),
        ("/v1/seen?xk={key}", "POST"),
    ],
)
async def test_other_preflights_grant_nothing(api, key, place, method):
    asked = {**ELSEWHERE, "access-control-request-method": method}
    place = place.format(key=key, unknown=make_token(KEY_PREFIX))
    answer = await api.options(place, headers=asked)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /v1/seen?k={key}", 401),
        ("POST /v1/hidden?k={key}", 403),
        ("POST /v1/seen", 403),
        ("POST /v1/seen?k={token}", 403),
        ("POST /v1/seen?k=hrk_short", 403),
        ("POST /v1/seen?k={unknown}", 403),
        ("POST /v1/seen?xk={key}", 403),
        ("GET /metrics?k=hrk_", 401),
        ("GET /v1/nowhere?k={key}", 404),
    ],
)
async def test_a_key_opens_nothing_else(api, key, secret, request_line, status):
    """Without a valid key on a page route other origins can read nothing, not even an error."""
    token = secret["authorization"].split()[1]
    unknown = make_token(KEY_PREFIX)
    method, place = request_line.format(key=key, token=token, unknown=unknown).split()
    body = {"json": [{"id": "a"}]} if method == "POST" else {}
    answer = await api.request(method, place, headers=ELSEWHERE, **body)
    assert answer.status_code == status
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_revoked_key_grants_no_preflight(api, shared_postgres, monkeypatch):
    monkeypatch.setattr("headrace.web.auth.CACHED_S", 0.0)
    tokens = Tokens(shared_postgres)
    key = (await tokens.create("site", ("views:hit",), publishable=True)).text
    await tokens.revoke("site")
    asked = {**ELSEWHERE, "access-control-request-method": "POST"}
    answer = await api.options(f"/v1/seen?k={key}", headers=asked)
    assert "access-control-allow-origin" not in answer.headers


async def test_text_is_read_as_json_on_routes_for_pages_only(api, key):
    headers = {"content-type": "text/plain"}
    answer = await api.post(f"/v1/seen?k={key}", headers=headers, content=b"no json")
    assert (answer.status_code, answer.json()["code"]) == (400, "web.malformed_json")
    answer = await api.post(f"/v1/seen?k={key}", headers={"content-type": "a/b"}, content=b"[]")
    assert answer.status_code == 415


def test_the_description_lists_which_routes_take_a_key(shared_app):
    document = describe_api(shared_app)
    operation = document["paths"]["/v1/seen"]["post"]
    assert operation["security"] == [{"bearer": ["views:hit"]}, {"publishable": ["views:hit"]}]
    assert document["components"]["securitySchemes"]["publishable"]["name"] == "k"


def test_the_command_needs_a_scope_or_the_flag():
    tokens = next(command for command in cli.COMMANDS if command.name == "tokens")
    ran = CliRunner().invoke(tokens, ["create", "x"])
    assert ran.exit_code == 2
    assert "--scope" in ran.output
