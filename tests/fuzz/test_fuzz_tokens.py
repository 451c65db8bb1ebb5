"""Cursors, tokens and signatures: any changed bit is refused as a typed error."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import strategies as st
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import damaged

from headrace.kernel.signing import CursorInvalid, derive_key, read_cursor, sign_cursor
from headrace.media import signing
from headrace.media.signing import SignatureInvalid
from headrace.web.tokens import is_token, make_token

ROOT = "a root secret of over thirty-two characters"
KEY = derive_key(ROOT, "cursor")
LISTING, FILTERS, POSITION = "jobs", {"queue": "mail", "state": None}, [12345, "2026-11-28"]
NOW_S = 1_795_000_000
PATH = "/m/tracks/a.mp3"
TEXT = st.text(max_size=80)
FLIP = st.tuples(st.integers(0, 10_000), st.integers(0, 6))


def flipped(text: str, places: list[tuple[int, int]]) -> str:
    """`text` with these bits of its characters changed."""
    data = bytearray(text.encode())
    for at, bit in places:
        data[at % len(data)] ^= 1 << bit
    return data.decode("ascii")


def test_a_changed_cursor_is_refused():
    cursor = sign_cursor(KEY, LISTING, FILTERS, POSITION)
    assert read_cursor(KEY, LISTING, FILTERS, cursor) == POSITION
    for listing, filters in (("runs", FILTERS), (LISTING, {"queue": "sms"}), (LISTING, {})):
        with pytest.raises(CursorInvalid):
            read_cursor(KEY, listing, filters, cursor)
    with pytest.raises(CursorInvalid):
        read_cursor(derive_key(ROOT + "!", "cursor"), LISTING, FILTERS, cursor)

    def check(text: str) -> None:
        try:
            found = read_cursor(KEY, LISTING, FILTERS, text)
        except CursorInvalid:
            return
        # Unused bits of the last character of base64 carry nothing.
        assert found == POSITION
        assert text[:-1] == cursor[:-1]

    flips = st.lists(FLIP, min_size=1, max_size=3).map(lambda places: flipped(cursor, places))
    bytes_ = damaged([cursor.encode()]).map(lambda data: data.decode("latin-1"))
    fuzz(flips | bytes_ | TEXT, check, examples=300, share=0.2)


def test_a_changed_media_url_is_refused():
    keys = signing.Keys.derive(ROOT)
    query = signing.sign(
        keys, PATH, expires_at=NOW_S + 60, address="203.0.113.0/24", rate=65_536, trace="user=4"
    )
    signing.check(keys, PATH, query, now_s=NOW_S, address="203.0.113.7")
    target = f"{PATH}?{query}"

    def check(text: str) -> None:
        if text == target:
            return
        path, _, rest = text.partition("?")
        with pytest.raises(SignatureInvalid):
            signing.check(keys, path, rest, now_s=NOW_S, address="203.0.113.7")

    flips = st.lists(FLIP, min_size=1, max_size=3).map(lambda places: flipped(target, places))
    bytes_ = damaged([target.encode()]).map(lambda data: data.decode("latin-1"))
    fuzz(flips | bytes_ | TEXT, check, examples=300, share=0.2)


def test_a_changed_api_token_is_none():
    token = make_token("hrt_")
    assert is_token(token)

    def check(text: str) -> None:
        assert text == token or not is_token(text)

    flips = st.lists(FLIP, min_size=1, max_size=2).map(lambda places: flipped(token, places))
    bytes_ = damaged([token.encode()]).map(lambda data: data.decode("latin-1"))
    fuzz(flips | bytes_ | TEXT, check, examples=200, share=0.1)


HEADER_TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=80)


@pytest.mark.slow
def test_every_wrong_token_gets_the_same_answer(api):
    with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as client:
        refused = client.get("/v1/queues").json()
        assert refused["code"] == "web.unauthenticated", refused

        def check(value: str) -> None:
            answer = client.get("/v1/queues", headers={"Authorization": value})
            if value.split()[-1:] == [api.token]:
                return
            assert answer.status_code == 401, value
            assert answer.json()["code"] == refused["code"]
            assert answer.headers["www-authenticate"].startswith("Bearer")

        flips = st.lists(FLIP, min_size=1, max_size=3).map(lambda at: flipped(api.token, at))
        shown = flips.filter(str.isprintable) | HEADER_TEXT
        fuzz(shown.map(lambda text: f"Bearer {text}") | HEADER_TEXT, check, examples=60, share=0.2)


@pytest.mark.slow
def test_every_listing_refuses_a_foreign_cursor(api):
    token = {"Authorization": f"Bearer {api.token}"}
    with httpx.Client(base_url=api.url, headers=token, timeout=60, trust_env=False) as client:
        document = client.get("/openapi.json").json()
        listings = [
            path
            for path, operations in document["paths"].items()
            for parameter in operations.get("get", {}).get("parameters", [])
            # A cursor that is a number is the public `seq` of a result, and has no signature.
            if parameter["name"] == "cursor" and "integer" not in str(parameter["schema"])
        ]
        assert len(listings) >= 5
        cursor = sign_cursor(KEY, LISTING, FILTERS, POSITION)

        def check(found: tuple[str, str]) -> None:
            path, text = found
            url = path.replace("{", "").replace("}", "")
            answer = client.get(url, params={"cursor": text})
            assert answer.status_code in (400, 404, 422), (path, text, answer.text)
            assert answer.json()["code"]

        texts = st.just(cursor) | TEXT.filter(bool)
        fuzz(st.tuples(st.sampled_from(listings), texts), check, examples=60, share=0.3)
