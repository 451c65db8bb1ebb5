"""Reports.

Harmless in a spreadsheet and a browser, whole however long, in the reader's language.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import re
import tomllib
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from room import HEAD, rows

from headrace.fetch import FetchConfig
from headrace.fetch.applying import HoldLimits, hold_reason
from headrace.fetch.cli.text import describe_run
from headrace.fetch.errors import FileFault, LanguageUnknown
from headrace.fetch.i18n import Texts, languages, placeholders, preferred
from headrace.fetch.model import Host, Link, PhotoProblem, RowProblem, Run, RunState
from headrace.fetch.outcomes import OUTCOME_CODES
from headrace.fetch.reports import (
    BOM,
    COLUMNS,
    POLICY,
    csv_head,
    csv_of,
    line_of_photo,
    page_of,
    safe_cell,
)
from headrace.fetch.service.items import ahead_of

SOURCES = Path(__file__).parents[2] / "src" / "headrace" / "fetch"
TAGS = "html head meta title style body h1 h2 table tr th td thead tbody code p"
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =cmd|' /C calc'!A0", "\uff1d1", "|x")


def problem(**values) -> RowProblem:
    fields = {"row": 2, "line": 3, "item": "a", "field": "price", "code": "too_long", "text": "x"}
    return RowProblem(**{**fields, **values})


def run_of(**values) -> Run:
    zero = ("rows", "invalid", "new", "changed", "unchanged", "gone", "problems", "photos")
    fields = dict.fromkeys((*zero, "items_pending", "photos_pending"), 0)
    fields |= {"run": 7, "customer": "shop", "state": RunState.DONE, "file_name": "<b>c.csv</b>"}
    fields |= {"format": "csv", "reason": None, "ended_at": None, "photos_by_outcome": {}}
    return Run(**{**fields, "started_at": datetime(2026, 1, 2, tzinfo=UTC), **values})


@given(st.text())
@example("=1+1")
def test_any_cell_is_read_back_as_text_and_no_formula(cell):
    line = line_of_photo(PhotoProblem(item=cell, url=cell, outcome="failed:dns", text=cell))
    (row,) = list(csv.reader(io.StringIO(csv_of([line]), newline="")))
    shown = dict(zip(COLUMNS, row, strict=True))
    assert shown["item"].removeprefix("'") == cell.removeprefix("'")
    assert not shown["link"].lstrip().startswith(("=", "+", "-", "@"))


def test_the_csv_has_a_byte_order_mark_and_no_cell_is_a_formula():
    assert [safe_cell(cell) for cell in FORMULAS] == [f"'{cell}" for cell in FORMULAS]
    assert csv_head().startswith(BOM)
    assert csv_head().rstrip() == BOM + ",".join(f'"{name}"' for name in COLUMNS)


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@given(st.text(alphabet=st.sampled_from("<>&\"'/ab=x\x00é"), max_size=40))
def test_nothing_of_a_file_becomes_markup(text):
    photo = PhotoProblem(item=text, url=f"javascript:{text}", outcome="failed:dns", text=text)
    rows = [problem(text=text, item=text, field=text)]
    page = Page(page_of(run_of(file_name=text), rows, [photo], Texts.load("ru")))
    assert set(page.tags) <= set(TAGS.split())
    assert set(page.attributes) == {("lang", "ru"), ("charset", "utf-8")}


def test_the_page_shows_its_problems_and_how_many_more_exist():
    texts = Texts.load("en")
    good = page_of(run_of(), [], [], texts)
    assert "No problems" in good
    cut = "truncated: a quote is opened and never closed"
    for state in (RunState.HELD, RunState.REFUSED, RunState.SUPERSEDED):
        held = page_of(run_of(state=state, reason=cut), [], [], texts)
        assert "No problems" not in held, state
    assert "No problems" in page_of(run_of(state=RunState.DONE, reason=cut), [], [], texts)
    assert "&lt;b&gt;c.csv" in good
    rows = [problem()]
    assert "The first 1 are shown" in page_of(run_of(problems=2), rows, [], texts)
    assert "The first" not in page_of(run_of(problems=1), rows, [], texts)
    style = re.search(r"<style>(.*)</style>", good)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in POLICY


def documents() -> dict[str, dict]:
    return {
        lang: tomllib.loads(files("headrace.fetch.i18n").joinpath(f"{lang}.toml").read_text())
        for lang in languages()
    }


def test_every_language_has_every_sentence_with_the_same_values():
    found = documents()
    assert next(iter(found)) == "en"
    assert len(found) >= 2
    for lang, document in found.items():
        assert document["language"]
        for section, sentences in found["en"].items():
            if section == "language":
                continue
            assert document[section].keys() == sentences.keys(), f"{lang} [{section}]"
            for code, sentence in sentences.items():
                ours = placeholders(document[section][code])
                assert ours == placeholders(sentence), f"{lang} [{section}] {code}"
                plain = re.sub(r"\{\w+(:size)?\}|offer_id", "", sentence)
                assert not re.search(r"\w_\w|\bfetch\.", plain), f"{code}: sellers know no settings"


def test_every_outcome_and_every_code_of_a_row_has_a_sentence():
    """Outcomes that the code names; others have the sentence of their kind."""
    texts = documents()["en"]
    code = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    named = set(re.findall(r'"((?:refused|failed):[a-z_]+)"', code))
    named |= {outcome for outcome in OUTCOME_CODES if not outcome.startswith("failed:http_")}
    assert named - texts["photo"].keys() == set()
    for lang in languages():
        for outcome in (*named, *OUTCOME_CODES, "failed:http_418", "refused:made_up", "odd"):
            words = Texts.load(lang).outcome(outcome)
            assert words
            assert "{" not in words


def test_sentences_show_the_limits_of_the_deployment_as_people_write_them():
    texts = Texts.load("en", FetchConfig(photo_max_bytes=25 * 2**20, allow_ports=(443, 8443)))
    assert "larger than 25 MB" in texts.outcome("refused:too_large")
    assert "use one of 443, 8443" in texts.outcome("refused:port")
    assert "within 30 s" in texts.outcome("failed:timeout")
    russian = Texts.load("ru", FetchConfig(photo_max_bytes=512 * 2**10))
    assert "больше 512 КБ" in russian.outcome("refused:too_large")
    assert "larger than 1 GB" in texts.file(FileFault("too_large", values={"bytes": 2**30}))
    assert "larger than 64 KB" in texts.row("name", "field_too_large", {"most": 64 * 1024})


def calls_in_code(*functions: str):
    """Each call of these functions in the source."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in functions:
                yield node


def test_every_fault_of_a_file_has_a_sentence_with_its_values_in_every_language():
    found = [
        (call.args[0].value, {given.arg for given in call.keywords})
        for call in calls_in_code("broken", "not_a_catalogue", "Truncated")
        if call.args and isinstance(call.args[0], ast.Constant)
    ]
    assert len(found) > 30
    for lang in languages():
        sentences = Texts.load(lang).sections["file"]
        for code, values in found:
            assert placeholders(sentences[code]) - {"accepted"} <= values, f"{lang} {code}"


def test_every_fault_of_a_row_has_a_sentence_with_its_values():
    sentences = documents()["en"]["row"]
    found = [
        call.args
        for call in calls_in_code("Fault")
        if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    ]
    assert len(found) > 10
    for _, code, *values in found:
        shown = placeholders(sentences[code.value]) - {"field"}
        if not values or isinstance(values[0], ast.Dict):
            given = {key.value for key in values[0].keys} if values else set()
            assert shown <= given, f"{code.value}: its sentence shows values that no fault has"


async def test_a_fault_of_a_file_is_described_in_the_sellers_language(shop, client, command):
    path = "/v1/fetch/customers/shop/catalogues"
    russian = {"accept-language": "ru-RU"}
    answer = await client.post(path, content=b"hello\n1,2\n", headers=russian)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("первая строка «hello»")
    broken_json = b'[{"id": 1, "name": "A"}\n {"id": 2, "name": "B"}]'
    answer = await client.post(path, params={"lang": "ru"}, content=broken_json)
    assert answer.json()["detail"].startswith("строка 2: ")
    assert '"id": 2' in answer.json()["detail"]
    run = (await shop.fetch.runs.newest())[0]
    assert (run.state, run.fault.code, run.fault.line) == ("refused", "malformed_json", 2)
    held = await shop.run('id,name\n1,A\n2,"B\n')
    assert (held.state, held.fault.code, held.fault.line) == ("held", "truncated_quote", 3)
    for number, words in ((run.run, "ошибка в JSON"), (held.run, "кавычка открыта и не закрыта")):
        page = (await client.get(f"/v1/fetch/runs/{number}/report", params={"lang": "ru"})).text
        assert words in page
        shown = (await command("catalogue", "errors", str(number), "--lang", "ru"))[1]
        assert shown.startswith("file: ")
        assert words in shown
        table = "".join([part async for part in shop.fetch.reports.csv(number, lang="ru")])
        assert words in table
    assert "line 3: a quote is opened" in held.reason


def test_a_sentence_shows_its_values_or_falls_back():
    texts = Texts.load("en")
    shown = texts.of_row(problem(values={"length": 1200, "most": 1000}))
    assert shown == "the field price has 1,200 characters, at most 1,000 are allowed"
    assert texts.of_row(problem(text="as it was kept")) == "as it was kept"
    assert texts.of_row(problem(code="made_up", text="as it was kept")) == "as it was kept"
    assert "made_up" in texts.of_row(problem(code="made_up", values={"a": 1}))
    long = texts.of_row(problem(code="invalid_number", values={"value": "9\x00" * 500}))
    assert len(long) < 250
    assert "\x00" not in long
    link = problem(field="photos[0]", code="scheme", values={"value": "ftp://x"})
    assert "must start with http://" in texts.of_row(link)


LIMITS = HoldLimits(share=0.3, items=20)


def test_each_reason_to_hold_has_a_sentence():
    reason = hold_reason(LIMITS, rows_valid=3, published=50, missing=47, truncated=None)
    shown = Texts.load("ru").reason(reason)
    assert (shown.count("3"), shown.count("50")) == (1, 1)
    for lang in languages():
        for reason in (
            hold_reason(LIMITS, rows_valid=70, published=100, missing=31, truncated=None),
            hold_reason(LIMITS, rows_valid=0, published=5, missing=5, truncated=None),
            hold_reason(LIMITS, rows_valid=1, published=5, missing=4, truncated="line 7"),
            "would be held, empty: no valid row",
            "its process ended",
        ):
            assert Texts.load(lang).reason(reason) != reason
        assert Texts.load(lang).reason("something else") == "something else"


@pytest.mark.parametrize(
    ("header", "lang"),
    [
        ("", "en"),
        ("ru", "ru"),
        ("ru-RU,ru;q=0.9,en;q=0.8", "ru"),
        ("en;q=0.2, ru;q=0.9", "ru"),
        ("de, fr;q=0.5", "en"),
        ("de, *;q=0.5", "en"),
        ("ru;q=0", "en"),
        ("ru;q=x,,;;=", "en"),
        (",".join(["ru"] * 10_000), "ru"),
    ],
)
def test_the_preferred_available_language(header, lang):
    assert preferred(header) == lang


def test_an_unknown_language_is_refused():
    with pytest.raises(LanguageUnknown, match="use one of en, ru"):
        Texts.load("xx")
    assert Texts.load("RU").lang == "ru"


async def test_a_report_is_complete_however_long(shop):
    run = await shop.run("id,name,price,photos\na,A,5,\nb,B,five,\n,C,5,\n")
    await shop.sql(
        "INSERT INTO #fetch_need (run_id, item, url, outcome)"
        " SELECT :run::bigint, 'a', 'http://h.example/' || n, 'failed:http_404'"
        " FROM generate_series(1, 2500) n",
        run=run.run,
    )
    parts = [part async for part in shop.fetch.reports.csv(run.run)]
    rows = read_csv("".join(parts))
    assert len(rows) == 2502
    assert [(r["row"], r["item"], r["field"]) for r in rows[:2]] == [
        ("2", "b", "price"),
        ("3", "", "id"),
    ]
    assert rows[-1]["link"] == "http://h.example/2500"
    assert rows[-1]["text"] == "there is no photo at this link (404): correct the link"
    russian = [part async for part in shop.fetch.reports.csv(run.run, lang="ru")]
    assert "нет фотографии" in russian[-1]
    page = await shop.fetch.reports.page(run.run, lang="ru")
    assert page.count("нет фотографии") == 1000


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.removeprefix(BOM), newline="")))


# Over HTTP and on the command line


async def test_reports_in_the_requested_form_and_language(client, command, shop, tmp_path):
    text = "id,name,price,photos\na,A,5,\n=b\u200b,B,5,\nc,C,five,http://10.0.0.1/x.jpg\n"
    run = (await shop.run(text)).run
    path = f"/v1/fetch/runs/{run}/errors"
    english = await client.get(path)
    russian = await client.get(path, headers={"Accept-Language": "ru-RU,en;q=0.5"})
    assert [a.headers["content-language"] for a in (english, russian)] == ["en", "ru"]
    by_name = await client.get(f"{path}?lang=ru", headers={"Accept-Language": "en"})
    assert by_name.json() == russian.json()
    for ours, theirs in zip(english.json()["problems"], russian.json()["problems"], strict=True):
        assert ours["code"] == theirs["code"]
        assert ours["text"] != theirs["text"]
    assert (await client.get(f"{path}?lang=xx")).json()["code"] == "fetch.language_unknown"
    assert (await client.get(f"{path}?format=pdf")).status_code == 422
    for options in (
        {"params": {"format": "csv"}},
        {"headers": {"Accept": "text/csv, application/json;q=0.5"}},
    ):
        answer = await client.get(path, **options)
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        assert f'filename="run-{run}-errors.csv"' in answer.headers["content-disposition"]
        rows = read_csv(answer.text)
        assert [(r["row"], r["line"], r["field"]) for r in rows] == [
            ("2", "3", "id"),
            ("3", "4", "price"),
        ]
        assert all(r["code"] and r["text"] for r in rows)
    page = await client.get(f"/v1/fetch/runs/{run}/report?lang=ru")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "private, no-store"
    assert '<html lang="ru">' in page.text
    words, file = ("catalogue", "errors", str(run), "--lang", "ru"), tmp_path / "report"
    assert (await command(*words, "--csv", str(file)))[0] == 0
    assert file.read_bytes() == (await client.get(f"{path}?format=csv&lang=ru")).content
    assert (await command(*words, "--html", str(file)))[0] == 0
    assert file.read_text() == page.text
    assert "не подходит" in (await command(*words))[1]
    for option in ("--csv", "--html"):
        code, _ = await command(*words, option, "/nonexistent/report")
        assert code == "invalid_input"


async def test_a_link_refused_in_its_row_is_named_as_one_problem(shop):
    ids = [(await shop.run(f"{HEAD}a,A,5,{links}\n")).run for links in ("http://10.0.0.1/x", "x y")]
    refused, other = [describe_run(await shop.fetch.runs.get(run)) for run in ids]
    text = (
        "1 problem in valid rows, 1 photo failed or refused (a link refused in its row is counted"
        " in both): `headrace fetch catalogue errors {}`"
    )
    assert text.format(ids[0]) in refused
    assert text.format(ids[1]) in other
    assert len(await shop.fetch.reports.problems(ids[0])) == 1


async def test_an_upload_returns_why_it_is_held_in_the_callers_language(shop, client):
    await shop.run(HEAD + rows(30))
    address = "/v1/fetch/customers/shop/catalogues"
    english = await client.post(address, content=HEAD)
    assert english.json()["reason"] == "empty: no valid row"
    russian = await client.post(f"{address}?lang=ru", content=HEAD + rows(1))
    assert russian.json()["state"] == "held"
    assert russian.json()["reason"].startswith("в файле годных строк: 1,")
    applied = await client.post(f"{address}?lang=ru", content=HEAD + rows(30))
    assert (applied.json()["state"], applied.json()["reason"]) == ("done", None)


# Why a photo is stored or not


AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def link(**values) -> Link:
    fields = dict.fromkeys(("sha256", "etag", "last_modified", "recheck_at"))
    fields |= {"customer": "shop", "url": "http://h/", "outcome": "failed:http_404", "text": ""}
    fields |= {"checked_at": AT, "failures": 1, "rounds_left": 0, "run": 1}
    return Link(**{**fields, **values})


def paused_host() -> Host:
    fields = {"host": "h", "customer": "shop", "starts_in": "1s", "needs": {}, "mean_s": None}
    fields |= {"requests": 1, "photos_by_outcome": {}, "crawl_delay_s": None}
    return Host(**fields, first_seen_at=AT, last_seen_at=AT, paused_until=AT)


@pytest.mark.parametrize(
    ("found", "host", "runs", "is_allowed", "text"),
    [
        (link(), None, [], True, "requested again by the next catalogue that lists it"),
        (link(rounds_left=3), None, [], True, "skipped by 3 more whole catalogues"),
        (link(sha256="x"), None, [], True, "the last good copy is kept"),
        (link(), paused_host(), [], True, "paused until 2026-01-02 03:04:05"),
        (link(), None, [], False, "not requested while the URL is refused"),
        (link(outcome="stored"), None, [], True, "a good copy is stored"),
        (None, None, [4, 7], True, "run 7 will request it"),
    ],
)
def test_when_a_link_is_requested_next(found, host, runs, *, is_allowed, text):
    assert text in ahead_of(found, host, runs=runs, job=None, is_allowed=is_allowed)


async def test_why_a_photo_waits_and_why_it_failed(shop, command, process):
    """The job and the lane of a photo that waits; later its outcome and its next try."""
    good, gone = shop.origin.url("/photo/1"), shop.origin.url("/none")
    await shop.fetch.customers.set("shop", starts_max=10, window_s=60, connections=3)
    run = await shop.run(f"{HEAD}a,A,5,{good}|{gone}\n")
    found = await shop.fetch.links.why(good)
    (one,) = found.customers
    assert (found.links, one.customer, one.waiting_runs) == ([], "shop", [run.run])
    assert one.job.text in one.ahead
    assert (one.lane.waiting, one.lane.starts_max) == (2, 10)
    shown = (await command("why", good))[1]
    assert "shop: not requested yet" in shown
    assert one.job.text in shown

    async def ignore(_item) -> None:
        pass

    async with process(ignore):
        await shop.wait_done(run)
    (one,) = (await shop.fetch.links.why(good)).customers
    assert "a good copy is stored" in one.ahead
    assert (one.waiting_runs, one.job) == ([], None)
    (other,) = (await shop.fetch.links.why(gone)).customers
    assert "1 more whole catalogue," in other.ahead
    shown = (await command("why", gone))[1]
    assert "there is no photo at this link (404): correct the link" in shown
    assert "lane: " in shown
    for odd in ("", "nonsense", "http://h/\x00", "http://h/" + "x" * 5000):
        found = await shop.fetch.links.why(odd)
        assert (found.allowed, found.customers) == (False, [])
    shown = (await command("catalogue", "errors", str(run.run)))[1]
    assert f"{gone}: there is no photo at this link (404): correct the link" in shown
    shown = describe_run(await shop.fetch.runs.get(run.run))
    assert f"1 photo failed or refused: `headrace fetch catalogue errors {run.run}`" in shown
