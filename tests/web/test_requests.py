"""Rules of every request: problems, Host and Origin, headers, trace, metrics, description."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import jsonschema
import pytest
from litestar import Request, get
from litestar.exceptions import MethodNotAllowedException, NotFoundException
from tests.kit.own_postgres import OwnPostgres, run_statements
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.kernel.errors import error_table
from headrace.kernel.logs import SparseLogger, trace_id
from headrace.kernel.metrics import REGISTRY
from headrace.kernel.resilience import RoleDeaths
from headrace.web import guard
from headrace.web.guard import SECURITY_HEADERS, host_name, origin_host
from headrace.web.model import WebConfig
from headrace.web.problems import render_error
from headrace.web.routes import operations_of, routes_without_scope
from headrace.web.server import create_api, create_app, describe_api

NAMES = "expected one of class, from, limit, name, pages"
MEMBERS = {"type", "title", "status", "detail", "code", "request_id", "retryable"}


@pytest.fixture(scope="module")
def whole_api():
    """The API of all rooms; no engine is needed to find no route."""
    app = Headrace()
    app.use_endpoints(Endpoints("postgresql://x/y", "valkey://x", "file:///nowhere"))
    app.load_rooms()
    return create_app(app)


NEAR = {
    ("POST", "/v1/jobs"): "POST /v1/queues/{queue}/jobs",
    ("POST", "/v1/catalogues"): "POST /v1/fetch/customers/{customer}/catalogues",
    ("GET", "/v1/queue"): "GET /v1/queues",
    ("HEAD", "/v1/queue"): "GET /v1/queues",
    ("POST", "/v1/queue/mail/jobs"): "POST /v1/queues/{queue}/jobs",
    ("POST", "/v1/views/item/a"): "POST /v1/views/items/{id}",
}


@pytest.mark.parametrize(("method", "path"), NEAR)
def test_a_wrong_route_names_the_nearest_one(whole_api, method, path):
    request = Request({"type": "http", "method": method, "path": path, "litestar_app": whole_api})
    is_path = path == "/v1/jobs"
    answer = render_error(request, MethodNotAllowedException() if is_path else NotFoundException())
    assert answer.headers.get("allow") == ("GET, HEAD, OPTIONS" if is_path else None)
    assert f", did you mean {NEAR[method, path]}?" in json.loads(answer.content)["detail"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/" + "x" * 4000, "/a" * 2000, "//", "/%00/1"])
def test_a_route_that_resembles_none_names_none(whole_api, path):
    request = Request({"type": "http", "method": "GET", "path": path, "litestar_app": whole_api})
    answer = render_error(request, NotFoundException())
    assert "no route has this path: /openapi" in json.loads(answer.content)["detail"]


async def test_unknown_routes_and_methods_are_problems(api):
    answer = await api.get("/v1/nowhere/%2e%2e/x")
    assert (answer.status_code, answer.json()["code"]) == (404, "web.not_found")
    assert answer.json().keys() == MEMBERS
    for word in ("seven", "7x"):
        answer = await api.get(f"/v1/things/{word}")
        assert (answer.status_code, answer.json()["code"]) == (404, "web.not_found")
    answer = await api.get("/v1/things/seven")
    assert answer.json()["detail"] == "thing_id in the path must be a whole number, got 'seven'"
    for path in ("/v1/thing/seven", "/v1/things/seven/x", "/"):
        answer = await api.get(path)
        assert "whole number" not in answer.text
    answer = await api.put("/v1/things/7")
    assert (answer.status_code, answer.json()["code"]) == (405, "web.method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS"
    assert answer.json()["detail"].endswith("it supports DELETE, GET, HEAD, OPTIONS")
    answer = await api.options("/v1/things/7")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS"


@pytest.mark.parametrize(
    ("query", "pointer", "text"),
    [
        ("limit=many", "limit", "expected a whole number, got 'many'"),
        ("class=alien", "class", "expected one of human, bot, got 'alien'"),
        ("from=monday", "from", "expected a moment such as 2026-11-21T10:00:00Z, got 'monday'"),
        ("pages=10", "pages", "expected a whole number from 1 to 9, got '10'"),
        ("pages=x", "pages", "expected a whole number from 1 to 9, got 'x'"),
        ("klass=bot", "klass", f"unknown, {NAMES}, did you mean class?"),
        ("traffic=bot", "traffic", f"unknown, {NAMES}"),
        ("k=hrk_1", "k", f"unknown, {NAMES}"),
    ],
)
async def test_a_wrong_parameter_is_named_as_written(api, token, query, pointer, text):
    answer = await api.get(f"/v1/things/7?{query}", headers=token)
    assert answer.status_code == 422
    [fault] = answer.json()["errors"]
    assert (fault["pointer"], fault["text"]) == (f"query: {pointer}", text)
    assert text in answer.json()["detail"]


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("limit=5", 200, None),
        ("limit=-5", 200, None),
        ("limit=1e3", 422, "web.invalid_input"),
        ("limit=5.0", 422, "web.invalid_input"),
        ("limit=", 422, "web.invalid_input"),
        ("limit=5&limit=6", 400, "web.parameter_repeated"),
        ("limit=5&limit=5", 400, "web.parameter_repeated"),
        ("limit=5&%6cimit=6", 400, "web.parameter_repeated"),
        ("other=1&other=2", 400, "web.parameter_repeated"),
        ("name=a&name=b", 200, None),
    ],
)
async def test_parameters_are_given_once_and_integers_in_digits(api, token, query, status, code):
    answer = await api.get(f"/v1/things/7?{query}", headers=token)
    assert answer.status_code == status, answer.text
    assert answer.json().get("code") == code
    assert (await api.get("/v1/things/1_0", headers=token)).status_code == 404


async def test_a_route_without_parameters_refuses_all_but_the_key_of_a_page(api, token, key):
    refused = await api.delete("/v1/things/7?force=true", headers=token)
    assert (refused.status_code, refused.headers["content-type"]) == (
        422,
        "application/problem+json",
    )
    assert "query: force: unknown, expected no query parameters" in refused.json()["detail"]
    assert (await api.post(f"/v1/ping?k={key}")).status_code == 201
    refused = await api.post(f"/v1/ping?k={key}&time=1")
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "query: time")


@pytest.mark.parametrize("name", ["Idempotency-Key", "Authorization", "Content-Type"])
async def test_a_header_that_could_be_read_in_two_ways_is_refused(api, token, name):
    doubled = [*token.items(), (name, "a"), (name.lower(), "b")]
    answer = await api.post("/v1/things", headers=doubled, content=b"{}")
    assert (answer.status_code, answer.json()["code"]) == (400, "web.bad_request")
    assert f"expected one {name} header" in answer.json()["detail"]


async def test_errors_keep_their_code_and_wait(api, token):
    answer = await api.get("/v1/limited")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["code"] == "limit_exceeded"
    assert answer.json()["retryable"] is True
    meaning = (await api.get(answer.json()["type"], headers=token)).json()
    assert (meaning["status"], meaning["kind"]) == (429, "LimitExceeded")


async def test_an_unexpected_error_shows_only_its_id(api, capfd):
    answer = await api.get("/v1/broken")
    assert answer.status_code == 500
    assert "secret inside" not in answer.text
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    logged = "".join(capfd.readouterr())
    assert logged.count("request_failed") == 1
    assert answer.headers["x-request-id"] in logged


async def test_failures_that_are_alike_have_a_line_a_second(make_app, serve, capfd, monkeypatch):
    async with serve(make_app()) as client:
        often = SparseLogger(guard._LOG, every_s=3600.0)
        monkeypatch.setattr(guard, "_OFTEN", often)
        for _ in range(20):
            assert (await client.get("/v1/away")).status_code == 503
        assert "".join(capfd.readouterr()).count("request_answered_5xx") == 1
        often.every_s = 0.0
        await client.get("/v1/away")
    logged = "".join(capfd.readouterr())
    assert logged.count("request_answered_5xx") == 1
    assert "alike_before=19" in logged


async def test_every_answer_carries_the_security_headers(api):
    for path in ("/healthz", "/v1/nowhere", "/v1/broken", "/"):
        answer = await api.get(path)
        for name, value in SECURITY_HEADERS:
            assert answer.headers[name.decode()] == value.decode()
        assert "server" not in answer.headers


async def test_the_trace_continues(api):
    sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await api.get("/healthz", headers={"traceparent": sent})
    assert trace_id(answer.headers["traceparent"]) == trace_id(sent)
    assert answer.headers["traceparent"] != sent
    answer = await api.get("/healthz", headers={"traceparent": "junk"})
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", answer.headers["traceparent"])


HOSTS = {
    "localhost:1": 200,
    "127.0.0.1": 200,
    "[::1]:8080": 200,
    "10.1.2.3": 200,
    "api.example.com": 200,
    "API.EXAMPLE.COM:8080": 200,
    "rebound.example.net": 421,
    "localhost.example.net": 421,
    "[::1]evil.example": 421,
    "127.0.0.1:80.evil.com": 421,
    "127.0.0.1:80@evil.com": 421,
    "localhost:80:80": 421,
    "::1": 421,
}


async def test_only_own_hosts_are_served(make_app, serve):
    async with serve(make_app(allowed_hosts=("api.example.com",))) as client:
        for host, status in HOSTS.items():
            answer = await client.get("/healthz", headers={"host": host})
            assert answer.status_code == status, host


def test_host_names():
    assert [host_name(h) for h in ("[::1]:80", "a:1", "A", "")] == ["::1", "a", "a", ""]
    malformed = ("[::1]evil.example", "127.0.0.1:80.evil.com", "a:", "a:x", "a b", "[::1", "::1")
    assert [host_name(h) for h in malformed] == [""] * len(malformed)
    assert [origin_host(o) for o in ("http://A:1", "https://[::1]")] == ["a:1", "[::1]"]
    malformed = ("null", "", "http://", "http://a/", "http://a@b", "ftp://a", "http://[::1]x")
    assert [origin_host(o) for o in malformed] == [""] * len(malformed)


async def test_pages_of_other_origins_change_nothing(api, token):
    own = str(api.base_url).rstrip("/")
    for origin, status in (
        (own, 201),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 403),
        ("http://[::1", 403),
        ("http://[::1]evil.example", 403),
        (f"{own}.evil.example", 403),
        (f"evil://{own.partition('://')[2]}", 403),
    ):
        headers = {**token, "origin": origin}
        answer = await api.post("/v1/things", headers=headers, json={"things": []})
        assert answer.status_code == status, origin
        assert "access-control-allow-origin" not in answer.headers
    assert (await api.get("/healthz", headers={"origin": "http://evil.example"})).status_code == 200


async def test_metrics_name_route_templates_only(api, token, root):
    for number in range(3):
        await api.get(f"/v1/things/{number}", headers=token)
        await api.get(f"/v1/unheard-of-{number}")
    answer = await api.get("/metrics", headers=root)
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.text
    assert 'route="/v1/things/{thing_id}"' in text
    assert "unheard-of" not in text
    assert 'route="unmatched"' in text
    assert "web_request_seconds_bucket" in text


@pytest.mark.parametrize(("media_type", "seconds"), [("text/event-stream", 1), ("text/csv", 3600)])
async def test_the_time_of_a_stream_of_events_ends_with_its_begin(monkeypatch, media_type, seconds):
    """Live pages of the console would have a latency of hours otherwise."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(guard, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    async def answer(_scope, _receive, send):
        clock.now_s += 1
        headers = [(b"content-type", media_type.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        clock.now_s += 3599
        await send({"type": "http.response.body", "body": b"data: x\n\n"})

    async def send(_message):
        return None

    def measured_s():
        labels = {"route": "unmatched"}
        return REGISTRY.get_sample_value("web_request_seconds_sum", labels) or 0.0

    guarded = guard.Guard(answer, WebConfig(), set(), None)
    before_s = measured_s()
    scope = {
        "type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "http_version": "1.1",
        "headers": [(b"host", b"localhost")],
    }  # fmt: skip
    await guarded(scope, None, send)
    assert measured_s() - before_s == pytest.approx(seconds)


async def test_readiness_names_what_is_down(make_app, serve, valkey, blobs):
    async with serve(make_app(), valkey=valkey, blobs=blobs) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        assert answer.json()["engines"] == {"postgres": "up", "valkey": "up", "blobs": "up"}
    down = Postgres("postgresql://headrace@127.0.0.1:9/headrace", PostgresConfig())
    async with serve(make_app(), postgres=down, valkey=valkey) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json() == {"ready": False, "engines": {"postgres": "down", "valkey": "up"}}
        assert (await client.get("/healthz")).json() == {"alive": True}


WRITE = compile_query("test", "-- A commit.\nCREATE TABLE written ()")


@pytest.fixture
async def own_server(servers_folder):
    """A PostgreSQL server of this test alone."""
    server = OwnPostgres(servers_folder / "p", "18")
    await server.make()
    await server.start()
    yield server
    server.end()


@pytest.mark.slow
async def test_readiness_warns_of_commits_that_wait_for_a_standby(make_app, serve, own_server):
    """Reads are answered, and no other API process writes either: 200, with a named state."""
    change = "ALTER SYSTEM SET synchronous_standby_names = "
    reload = "SELECT pg_reload_conf()"
    # The write that waits holds the only connection of the pool.
    postgres = Postgres(own_server.url, PostgresConfig(connections_max=1))
    async with serve(make_app(), postgres=postgres) as client:

        async def warns_of(text: str) -> bool:
            answer = await client.get("/readyz")
            found = answer.json()
            assert (answer.status_code, found["ready"]) == (200, True)
            assert found["engines"]["postgres"] == "up"
            assert "absent" not in answer.text, "no names: the route is open"
            return text in " ".join(found.get("warnings", ["none"]))

        assert await warns_of("none")
        await run_statements(own_server.url, f"{change}'absent'", reload)
        await wait_true(
            lambda: warns_of("commits wait for a synchronous standby"), what="a warning"
        )
        writing = asyncio.create_task(postgres.run(WRITE))
        await wait_true(lambda: warns_of("the oldest has waited"), what="the wait of a commit")
        await run_statements(own_server.url, f"{change}''", reload)
        await writing
        await wait_true(lambda: warns_of("none"), what="no warning")
    await postgres.close()


async def test_a_role_that_keeps_dying_is_not_ready(make_app, serve, valkey, blobs, tmp_path):
    app, deaths = make_app(), RoleDeaths(tmp_path)
    app.data_folder = tmp_path
    async with serve(app, valkey=valkey, blobs=blobs) as client:
        deaths.note("agent", {"exit_code": 1, "deaths": 1})
        assert (await client.get("/readyz")).status_code == 200, "one death is restarted"
        deaths.note("agent", {"exit_code": 1, "deaths": 3})
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert answer.json()["roles"] == {"agent": "died 3 times in a row"}
        deaths.clear()
        assert (await client.get("/readyz")).json()["ready"]


async def test_the_index_leads_everywhere(api, root):
    api.headers.update(root)
    links = (await api.get("/")).json()["links"]
    for path in links.values():
        assert (await api.get(path)).status_code == 200, path
    codes = {row["code"] for row in (await api.get("/problems")).json()}
    assert codes == {*error_table(), "internal"}
    assert "media.disk_unknown" in codes, "also what is imported by the first call that needs it"
    assert (await api.get("/problems/no.such")).status_code == 404


async def test_the_description_is_openapi_and_agrees_with_the_app(api, shared_app, token):
    answer = await api.get("/openapi.json", headers=token)
    document = answer.json()
    assert document == describe_api(shared_app)
    assert document["openapi"].startswith("3.1")
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [operation["operationId"] for operation in operations_of(document)]
    assert len(ids) == len(set(ids))
    assert {"addThings", "getThing", "getMetrics"} <= set(ids)
    things = document["paths"]["/v1/things"]["post"]
    assert things["security"] == [{"bearer": ["jobs:write"]}]
    assert things["responses"].keys() == {"201", "default"}
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert document["paths"]["/problems"]["get"]["security"] == [{"bearer": []}]
    own = document["paths"]["/openapi.json"]["get"]["responses"]["200"]["content"]
    jsonschema.validate(document, own["application/json"]["schema"])
    body = things["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert body.rpartition("/")[2] in document["components"]["schemas"]
    references = set(re.findall(r'"\$ref":"#/components/(\w+)/([^"]+)"', answer.text))
    assert references
    for section, name in references:
        assert name in document["components"][section]


async def test_a_problem_is_as_described(api, shared_app):
    schema = describe_api(shared_app)["components"]["schemas"]
    problem = (await api.post("/v1/things", content=b"{")).json()
    text = {"$ref": "#/components/schemas/Problem", "components": {"schemas": schema}}
    jsonschema.validate(problem, text)


async def test_a_route_must_name_a_known_scope_and_a_shape_of_its_own(make_app):
    @get("/v1/a", operation_id="a")
    async def unscoped() -> None:
        """No scope."""

    @get("/v1/b", operation_id="b", opt={"scope": "jobs:everything"})
    async def misspelt() -> None:
        """A scope that no token can have."""

    with pytest.raises(AssertionError, match=r"GET /v1/a.*GET /v1/b"):
        create_api(make_app(routes=[unscoped, misspelt]))
    assert routes_without_scope(create_app(make_app())) == []
