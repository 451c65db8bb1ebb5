"""A cursor comes back unchanged, or it is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernel.signing import CursorInvalid, derive_key, read_cursor, sign_cursor

KEY = derive_key("a root secret of more than 32 characters", "cursor")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@given(position=JSON, queue=st.text(max_size=30) | st.none())
def test_a_position_comes_back_as_it_was(position, queue):
    cursor = sign_cursor(KEY, "jobs", {"queue": queue}, position)
    assert read_cursor(KEY, "jobs", {"queue": queue, "state": None}, cursor) == position


@given(text=st.text(max_size=60))
def test_text_of_anyone_else_is_refused(text):
    with pytest.raises(CursorInvalid):
        read_cursor(KEY, "jobs", {}, text)


@given(index=st.integers(0, 200), letter=st.sampled_from("ABCDEFGHabcdefgh0123456789-_"))
def test_a_changed_cursor_is_refused(index, letter):
    cursor = sign_cursor(KEY, "jobs", {"queue": "mail"}, [42, "2026-11-21T00:00:00Z"])
    place = index % (len(cursor) - 1)  # the last character holds unused bits
    changed = cursor[:place] + letter + cursor[place + 1 :]
    if changed == cursor:
        return
    with pytest.raises(CursorInvalid):
        read_cursor(KEY, "jobs", {"queue": "mail"}, changed)


@pytest.mark.parametrize(
    ("listing", "filters"),
    [("jobs", {"queue": "other"}), ("jobs", {}), ("runs", {"queue": "mail"})],
    ids=["another filter", "no filter", "another list"],
)
def test_a_cursor_of_another_list_is_refused(listing, filters):
    cursor = sign_cursor(KEY, "jobs", {"queue": "mail"}, 42)
    with pytest.raises(CursorInvalid, match="omit it to start at the first page"):
        read_cursor(KEY, listing, filters, cursor)


def test_a_cursor_of_another_secret_is_refused():
    other = derive_key("another root secret of over 32 characters", "cursor")
    with pytest.raises(CursorInvalid):
        read_cursor(KEY, "jobs", {}, sign_cursor(other, "jobs", {}, 42))


def test_an_endless_cursor_is_refused_unread():
    with pytest.raises(CursorInvalid):
        read_cursor(KEY, "jobs", {}, "A" * 100_000)
