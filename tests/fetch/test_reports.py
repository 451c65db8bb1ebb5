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
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.sql import compile_query
from headrace.fetch import FetchConfig
from headrace.fetch.applying import HoldLimits, hold_reason
from headrace.fetch.errors import FileFault, LanguageUnknown, RunUnknown
from headrace.fetch.i18n import Texts, languages, placeholders, preferred
from headrace.fetch.model import (
    PhotoProblem,
    RowProblem,
    Run,
    RunState,
)
from headrace.fetch.outcomes import OUTCOME_CODES
from headrace.fetch.reports import (
    BOM,
    COLUMNS,
    POLICY,
    csv_head,
    csv_of,
    line_of_photo,
    line_of_row,
    page_of,
    safe_cell,
)

SOURCES = Path(__file__).parents[2] / "src" / "headrace" / "fetch"
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =cmd|' /C calc'!A0", "\uff1d1", "|x")
MANY = compile_query(
    "many",
    "-- As many photos without a copy.\n"
    "INSERT INTO headrace.fetch_need (run_id, item, url, outcome)"
    " SELECT :run_id::bigint, 'a', 'http://h.example/' || n, 'failed:http_404'"
    " FROM generate_series(1, :count::bigint) n",
)


def problem(**values) -> RowProblem:
    fields = {"row": 2, "line": 3, "item": "a", "field": "price", "code": "too_long", "text": "x"}
    return RowProblem(**{**fields, **values})


def run_of(**values) -> Run:
    counts = dict.fromkeys(
        ("rows", "invalid", "new", "changed", "unchanged", "gone", "problems"), 0
    )
    fields = {
        **counts,
        "run": 7,
        "customer": "shop",
        "state": RunState.DONE,
        "file_name": "<b>c.csv</b>",
        "format": "csv",
        "reason": None,
        "started_at": datetime(2026, 1, 2, tzinfo=UTC),
        "ended_at": None,
        "items_pending": 0,
        "photos": 0,
        "photos_pending": 0,
        "photos_by_outcome": {},
    }
    return Run(**{**fields, **values})


@pytest.mark.parametrize("cell", FORMULAS)
def test_no_cell_is_a_formula(cell):
    assert safe_cell(cell) == f"'{cell}"


@given(st.text())
def test_any_cell_comes_back_as_text(cell):
    line = line_of_photo(PhotoProblem(item=cell, url=cell, outcome="failed:dns", text=cell))
    (row,) = list(csv.reader(io.StringIO(csv_of([line]), newline="")))
    told = dict(zip(COLUMNS, row, strict=True))
    assert told["item"].removeprefix("'") == cell.removeprefix("'")
    assert not told["link"].lstrip().startswith(("=", "+", "-", "@"))


def test_the_csv_is_taken_for_utf_8():
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
    rows = [line_of_row(problem(text=text, item=text, field=text))]
    page = Page(page_of(run_of(file_name=text), rows, [line_of_photo(photo)], Texts.load("ru")))
    allowed = [
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "table",
        "tr",
        "th",
        "td",
        "thead",
        "tbody",
        "code",
        "p",
    ]
    assert set(page.tags) <= set(allowed)
    assert set(page.attributes) == {("lang", "ru"), ("charset", "utf-8")}


def test_the_page_says_what_there_is_and_that_there_is_more():
    texts = Texts.load("en")
    good = page_of(run_of(), [], [], texts)
    assert "No problems" in good
    cut = "truncated: a quote is opened and never closed"
    for state in (RunState.HELD, RunState.REFUSED, RunState.SUPERSEDED):
        held = page_of(run_of(state=state, reason=cut), [], [], texts)
        assert "No problems" not in held, state
    assert "No problems" in page_of(run_of(state=RunState.DONE, reason=cut), [], [], texts)
    assert "&lt;b&gt;c.csv" in good
    rows = [line_of_row(problem())]
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
    """Those that the code names; what a host makes up is said by its kind."""
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


def file_faults_in_code():
    """(code, names of its values) of each fault of a whole file that the readers find."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", "")
            is_fault = name in ("broken", "not_a_catalogue", "Truncated") and node.args
            if is_fault and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, {given.arg for given in node.keywords}


def test_every_fault_of_a_file_has_a_sentence_with_its_values_in_every_language():
    found = list(file_faults_in_code())
    assert len(found) > 30
    for lang in languages():
        sentences = Texts.load(lang).sections["file"]
        for code, values in found:
            assert placeholders(sentences[code]) - {"accepted"} <= values, f"{lang} {code}"


async def test_a_fault_of_a_file_is_told_in_the_sellers_language(shop, client, command):
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
        told = (await command("catalogue", "errors", str(number), "--lang", "ru"))[1]
        assert told.startswith("file: ")
        assert words in told
        table = "".join([part async for part in shop.fetch.reports.csv(number, lang="ru")])
        assert words in table
    assert "line 3: a quote is opened" in held.reason


def faults_in_code():
    """(code, names of its values, None where they are no literal) of each fault in the source."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "Fault":
                continue
            code = node.args[1] if len(node.args) > 1 else None
            if isinstance(code, ast.Constant):
                given = node.args[2] if len(node.args) > 2 else ast.Dict([], [])
                literal = isinstance(given, ast.Dict)
                yield code.value, {key.value for key in given.keys} if literal else None


def test_every_fault_of_a_row_has_a_sentence_and_the_values_that_it_shows():
    sentences = documents()["en"]["row"]
    found = list(faults_in_code())
    assert len(found) > 10
    for code, values in found:
        assert code in sentences, f"{code}: give it a sentence in each file of fetch/i18n"
        if values is not None:
            missing = placeholders(sentences[code]) - values - {"field"}
            assert not missing, f"{code}: its sentence shows {missing}, which no fault gives"


def test_a_sentence_shows_its_values_or_falls_back():
    texts = Texts.load("en")
    told = texts.of_row(problem(values={"length": 1200, "most": 1000}))
    assert told == "the field price has 1,200 characters, at most 1,000 are allowed"
    assert texts.of_row(problem(text="as it was kept")) == "as it was kept"
    assert texts.of_row(problem(code="made_up", text="as it was kept")) == "as it was kept"
    assert "made_up" in texts.of_row(problem(code="made_up", values={"a": 1}))
    long = texts.of_row(problem(code="invalid_number", values={"value": "9\x00" * 500}))
    assert len(long) < 250
    assert "\x00" not in long
    link = problem(field="photos[0]", code="scheme", values={"value": "ftp://x"})
    assert "must start with http://" in texts.of_row(link)


LIMITS = HoldLimits(share=0.3, items=20)


def test_why_a_run_is_held_is_said_in_words():
    reason = hold_reason(LIMITS, rows_valid=3, published=50, missing=47, truncated=None)
    told = Texts.load("ru").reason(reason)
    assert (told.count("3"), told.count("50")) == (1, 1)
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
def test_the_best_language_there_is(header, lang):
    assert preferred(header) == lang


def test_a_language_that_is_not_there():
    with pytest.raises(LanguageUnknown, match="use one of en, ru"):
        Texts.load("xx")
    assert Texts.load("RU").lang == "ru"


async def test_a_report_is_whole_however_long(shop):
    run = await shop.run("id,name,price,photos\na,A,5,\nb,B,five,\n,C,5,\n")
    await shop.postgres.run(MANY, run_id=run.run, count=2500)
    parts = [part async for part in shop.fetch.reports.csv(run.run)]
    rows = list(csv.DictReader(io.StringIO("".join(parts).removeprefix(BOM), newline="")))
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
    with pytest.raises(RunUnknown):
        await shop.fetch.reports.page(999)
    with pytest.raises(LanguageUnknown):
        await shop.fetch.reports.problems(run.run, lang="xx")
