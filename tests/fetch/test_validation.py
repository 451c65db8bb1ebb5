"""Rows on input: invalid content, prices, photos, headings, and item ids."""

from __future__ import annotations

import tomllib
import unicodedata
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import Policy, judge_url, refusal_reason
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.mappings import field_of, known_names
from headrace.fetch.readers import Fault, RawRow, Truncated
from headrace.fetch.validation import (
    ITEM_ID_CHARACTERS_MAX,
    Rules,
    find_item_id,
    problem_of,
    read_chunk,
    validate_row,
)

RULES = Rules(Policy())
FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text())
REPLACED = "te\N{REPLACEMENT CHARACTER}xt"
FAULTS = [
    # (values, field, code)
    ({"id": ""}, "id", "missing"),
    ({"id": "a\u200bb"}, "id", "invalid_id"),
    ({"id": "x" * 201}, "id", "invalid_id"),
    ({"id": "\ud800"}, "id", "invalid_id"),
    ({"name": ""}, "name", "missing"),
    ({"name": "x" * 1001}, "name", "too_long"),
    ({"text": "a\x00b"}, "text", "invalid_text"),
    ({"text": "\udfff"}, "text", "invalid_text"),
    ({"text": ["a", "\ud800"]}, "text", "invalid_text"),
    ({"te\x00xt": "a"}, REPLACED, "invalid_text"),
    ({"te\ud800xt": "a"}, REPLACED, "invalid_text"),
    ({"x" * 201: "a"}, "x" * 200, "field_name"),
    ({"text": "x" * 65_537}, "text", "field_too_large"),
    ({"text": ["x" * 1000] * 66}, "text", "field_too_large"),
    ({f"f{n}": "x" * 60_000 for n in range(5)}, "row", "row_too_large"),
    ({f"f{n}": "x" for n in range(500)}, "row", "too_many_fields"),
    ({"url": "http://user:pass@x/"}, "url", "url_userinfo"),
]


def judge(values: dict, photos=()):
    """(row, faults) of a row of these values."""
    raw = RawRow(3, 7, {"id": "1", "name": "A", **values}, list(photos))
    return validate_row(raw, RULES)


@pytest.mark.parametrize(("values", "field", "code"), FAULTS)
def test_a_fault_has_its_field_and_code_and_can_be_stored(values, field, code):
    raw = RawRow(3, 7, {"id": "1", "name": "A", **values})
    if not values.get("name", "A"):
        del raw.values["name"]
    chunk = read_chunk(iter([raw]), RULES)
    problem = chunk.problems[0]
    assert (problem.row, problem.line, problem.field, problem.code) == (3, 7, field, code)
    assert b"\\u0000" not in msgspec.json.encode(problem)
    assert not any(row.hash for row in chunk.rows)


@pytest.mark.parametrize(("text", "kept"), FIELDS["prices"])
def test_a_price_as_sellers_write_it(text, kept):
    row, faults = judge({"price": text})
    fields = msgspec.json.decode(row.fields)
    price, _, currency = kept.partition(" ")
    assert (faults, fields.pop("name"), fields.pop("price")) == ([], "A", price)
    assert fields == ({"currency": currency} if currency else {})
    row, _ = judge({"price": text, "currency": "CHF"})
    assert msgspec.json.decode(row.fields)["currency"] == "CHF"


@pytest.mark.parametrize(("text", "code"), FIELDS["bad_prices"])
def test_a_price_that_is_not_clear_is_a_fault(text, code):
    raw = RawRow(1, 2, {"id": "1", "name": "A", "price": text})
    _, [fault] = validate_row(raw, RULES)
    assert (fault.field, fault.code) == ("price", code)
    if code == "ambiguous_number":
        for lang in languages():
            assert "1990.50" in Texts.load(lang).of_row(problem_of(raw, "1", fault))


def test_headings_mean_fields_and_the_first_in_the_table_counts():
    for heading, field in (*FIELDS["headings"], ["*" * 100_000, ""]):
        found = field_of(heading.lower())
        assert (found[0] if found else "") == field, heading
    assert known_names(["код", "артикул", "товар", "название"]) == ["код", "id", "товар", "name"]
    assert known_names(["sku", "offer_id"]) == ["id", "offer_id"]
    assert known_names(["id", "артикул"]) == ["id", "артикул"]


def test_photos_keep_their_order_and_each_counts_once():
    links = ["http://a.example/2", "http://a.example/1", "http://a.example/2", "ftp://a/3"]
    row, faults = judge({}, links)
    assert row.photos == ["http://a.example/2", "http://a.example/1", "ftp://a/3"]
    assert row.refused == {"ftp://a/3": "scheme"}
    assert faults == [Fault("photos[2]", "scheme", {"value": "ftp://a/3"})]
    assert row.hash, "a bad link does not invalidate its row"
    for link in ("http://a/\ud800", "http://a/\x00", "http://a/" + "x" * 3000):
        row, faults = judge({}, ["http://a.example/1", link])
        assert row.photos == ["http://a.example/1"], "a link that cannot be stored is left out"
        assert [fault.field for fault in faults] == ["photos[1]"]
        assert row.refused == {}


def test_a_row_that_was_not_read_keeps_its_item_and_a_cut_file_its_rows():
    fault = Fault("row", "column_count", {"count": 2, "most": 3})
    row, faults = validate_row(RawRow(1, 2, {"id": "a"}, fault=fault), RULES)
    assert (row.item, row.hash, faults) == ("a", None, [fault])
    assert validate_row(RawRow(1, 2, {}, fault=fault), RULES) == (None, [fault])

    def rows():
        yield RawRow(1, 1, {"id": "1", "name": "A"})
        raise Truncated("line 2: cut")

    chunk = read_chunk(rows(), RULES)
    assert (len(chunk.rows), chunk.is_last, chunk.truncated) == (1, True, "line 2: cut")


def test_equal_rows_have_equal_hashes_whatever_the_order_of_their_fields():
    one, _ = judge({"a": "1", "b": ["2", "3"]}, ["http://a/1"])
    same, _ = judge({"b": ["2", "3"], "a": "1"}, ["http://a/1"])
    other, _ = judge({"a": "1", "b": ["3", "2"]}, ["http://a/1"])
    photos, _ = judge({"a": "1", "b": ["2", "3"]}, ["http://a/2"])
    assert one.hash == same.hash
    assert len({one.hash, other.hash, photos.hash}) == 3


# Item ids

SIGNS = (
    ". .. ../../etc/passwd / // a//b /a a/ a/../b %2F %00 % -5 --help - =1+1 @x +x ' \" `id` $(id)"
)
WORDS = (
    "a'b\"c \\ \\u0000 a?b#c a&b=c id=1 ; a,b a|b {} <script>alert(1)</script> null None NaN 0 00"
)
LETTERS = "1e3 true é 日本語 नमस्ते 👩\u200d🔧 🇷🇺 ﬁ İ ß арт-1 №5 \u017f a\u00a0b \u2011 \ufffd"
HOSTILE_IDS = (
    *(*SIGNS.split(), *WORDS.split(), *LETTERS.split(" ")),
    *("A/1", "A 1", "A(1)", "{{ 7*191 }}", "x" * 200, "😀" * 200, "я" * 200),
)
REFUSED_IDS = (
    *("", " ", "\t", "\u2003", "x" * 201, "😀" * 201, "x" * 1_000_000, "a" + "\u0306" * 1000),
    *("a\x00b", "a\nb", "a\tb", "a\x7fb", "a\x85b", "a\u2028b", "a\u2029b", "\ud800", "a\udfff"),
    *("\ufeffa", "a\u200bb", "a\u00adb", "a\u202eb", "\u200ea", "a\u2066b", "a\u061cb"),
    "\U000e0041",
)


def test_an_id_is_any_visible_text_in_one_form():
    for text in HOSTILE_IDS:
        found = find_item_id(text)
        assert found == unicodedata.normalize("NFC", text)
        assert find_item_id(found) == find_item_id(f" \u00a0{text}\u3000\n") == found
    for text in REFUSED_IDS:
        assert find_item_id(text) is None, ascii(text[:8])
    composed, decomposed = "й", "и\u0306"
    assert find_item_id(decomposed) == find_item_id(composed) == composed
    assert len(find_item_id(decomposed * ITEM_ID_CHARACTERS_MAX)) == ITEM_ID_CHARACTERS_MAX


@given(st.text(max_size=220))
def test_an_accepted_id_stays_as_it_is(text):
    found = find_item_id(text)
    if found is None:
        return
    assert find_item_id(found) == found
    assert 1 <= len(found) <= ITEM_ID_CHARACTERS_MAX
    assert found == found.strip()
    assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in found)
    found.encode()


# Links

POLICIES = st.sampled_from([Policy(), Policy.of(("127.0.0.0/8",), (80, 8080))])
ODD_HOSTS = (
    "shop.example SHOP.example. a..b -a 127.0.0.1 127.1 0x7f.1 2130706433 localhost a.localhost"
    " 8.8.8.8 shop.example:8080 shop.example:81 [::1] user@shop.example лампа.example"
    " \uff11\uff12\uff17.0.0.1 a_b.example"
)
HOSTS = st.sampled_from([*ODD_HOSTS.split(), "x" * 64, ".".join("a" * 130), ""])
PATHS = st.text(st.sampled_from("aZ0/?&=%:@!$'()*+,;[]~-._|#\\ \"<>{}\u00e9\n"), max_size=12)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    scheme=st.sampled_from(["http://", "https://", "HTTP://", "ftp://", "http:/", "//"]),
    host=HOSTS,
    path=PATHS.map(lambda path: f"/{path}") | st.just("") | st.just("/" + "x" * 2100),
    policy=POLICIES,
)
@example(scheme="http://", host="shop.example", path="/" + "x" * 1880, policy=Policy())
def test_the_cached_result_of_a_link_is_that_of_the_guard(*, scheme, host, path, policy):
    link = scheme + host + path
    try:
        judge_url(link, policy)
    except UrlRefused as error:
        expected = error.reason
    else:
        expected = None
    assert [refusal_reason(link, policy) for _ in range(2)] == [expected, expected]
