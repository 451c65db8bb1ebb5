"""Reports over HTTP and on the command line: pages, CSV, a page for a browser, in two languages."""

from __future__ import annotations

import csv
import io

import pytest

from headrace.fetch.reports import BOM, POLICY

CATALOGUE = "id,name,price,photos\na,A,5,\n=b\u200b,B,5,\nc,C,five,http://10.0.0.1/x.jpg\n"


@pytest.fixture
async def run(shop):
    """A run with two invalid rows."""
    return (await shop.run(CATALOGUE)).run


async def test_json_in_the_language_that_is_asked_for(client, run):
    path = f"/v1/fetch/runs/{run}/errors"
    english = await client.get(path)
    assert english.headers["content-language"] == "en"
    russian = await client.get(path, headers={"Accept-Language": "ru-RU,en;q=0.5"})
    assert russian.headers["content-language"] == "ru"
    by_name = await client.get(f"{path}?lang=ru", headers={"Accept-Language": "en"})
    assert by_name.json() == russian.json()
    for ours, theirs in zip(english.json()["problems"], russian.json()["problems"], strict=True):
        assert ours["code"] == theirs["code"]
        assert ours["text"] != theirs["text"]
    unknown = await client.get(f"{path}?lang=xx")
    assert (unknown.status_code, unknown.json()["code"]) == (422, "fetch.language_unknown")
    assert (await client.get(f"{path}?format=pdf")).status_code == 422
    assert (await client.get("/v1/fetch/runs/999999/errors?format=csv")).status_code == 404


@pytest.mark.parametrize(
    "options",
    [{"params": {"format": "csv"}}, {"headers": {"Accept": "text/csv, application/json;q=0.5"}}],
)
async def test_csv(client, run, options):
    answer = await client.get(f"/v1/fetch/runs/{run}/errors", **options)
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert f'filename="run-{run}-errors.csv"' in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text.removeprefix(BOM), newline="")))
    assert [(r["row"], r["line"], r["field"]) for r in rows] == [
        ("2", "3", "id"),
        ("3", "4", "price"),
    ]
    assert all(r["code"] and r["text"] for r in rows)


async def test_the_page_lets_nothing_run(client, run):
    answer = await client.get(f"/v1/fetch/runs/{run}/report?lang=ru")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "private, no-store"
    assert '<html lang="ru">' in answer.text
    assert (await client.get("/v1/fetch/runs/999999/report")).status_code == 404


async def test_the_command_writes_what_http_answers(client, command, run, tmp_path):
    by_http = await client.get(f"/v1/fetch/runs/{run}/errors?format=csv&lang=ru")
    file = tmp_path / "errors.csv"
    words = ("catalogue", "errors", str(run), "--lang", "ru")
    assert (await command(*words, "--csv", str(file)))[0] == 0
    assert file.read_bytes() == by_http.content
    page = tmp_path / "report.html"
    assert (await command(*words, "--html", str(page)))[0] == 0
    assert page.read_text() == (await client.get(f"/v1/fetch/runs/{run}/report?lang=ru")).text
    assert "не подходит" in (await command(*words))[1]
    assert (await command(*words[:3], "--lang", "xx"))[0] == "fetch.language_unknown"
