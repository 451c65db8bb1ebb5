"""Ids, backoff, clocks, traces, secrets, cursors, cancellations, logs and the error table."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.kernel import errors, logs, signing
from headrace.kernel.clock import VirtualClock
from headrace.kernel.ids import InvalidId, new_uuid7, require_id, require_new_id
from headrace.kernel.logs import KINDS_MAX, SparseLogger, logger
from headrace.kernel.resilience import Backoff, preserve_cancellation, require_not_cancelled
from headrace.kernel.signing import CursorInvalid, derive_key, read_cursor, sign_cursor


@pytest.mark.parametrize("value", ["a", "ad:1", "user@shop.example", "A-_.~", "x" * 128])
def test_ids_that_need_no_escaping_are_valid(value):
    assert require_id("item", value) == value


@pytest.mark.parametrize("value", ["", "a b", "a/b", "..%00", "é", "x" * 129, "a\n", "a{b}"])
def test_other_ids_are_refused_by_name(value):
    with pytest.raises(InvalidId, match="item "):
        require_id("item", value)


@pytest.mark.parametrize("value", [".", ".."])
def test_what_is_made_is_not_named_as_a_folder(value):
    with pytest.raises(InvalidId, match=rf"item '{re.escape(value)}' .* use a name"):
        require_new_id("item", value)
    assert require_id("item", value) == value, "what is there may be read and removed"
    assert require_new_id("item", f"{value}a") == f"{value}a"


def test_uuid7_is_version_7_and_sorts_by_time():
    ids = [new_uuid7() for _ in range(100)]
    assert {i.version for i in ids} == {7}
    assert [i.int >> 80 for i in ids] == sorted(i.int >> 80 for i in ids)


def test_keys_of_two_uses_do_not_verify_each_other():
    root = "r" * 32
    cursor, media = signing.derive_key(root, "cursor"), signing.derive_key(root, "media-url")
    signature = cursor.sign(b"page 2")
    assert cursor.verify(b"page 2", signature)
    assert not media.verify(b"page 2", signature)
    assert not cursor.verify(b"page 3", signature)
    assert root not in repr(cursor)


def test_a_short_secret_is_refused():
    with pytest.raises(signing.WeakSecret, match="at least 32"):
        signing.derive_key("short", "cursor")


def test_the_root_secret_is_made_once_and_readable_by_its_owner_alone(tmp_path):
    first = signing.load_or_create_secret(tmp_path)
    assert signing.load_or_create_secret(tmp_path) == first
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_file_that_was_cut_is_named(tmp_path):
    (tmp_path / "secret").touch()
    with pytest.raises(signing.WeakSecret, match="has 0 characters") as refused:
        signing.load_or_create_secret(tmp_path)
    assert str(tmp_path / "secret") in refused.value.text
    assert "HEADRACE_SECRET" not in refused.value.text


def test_all_who_make_the_root_secret_at_once_get_the_same(tmp_path):
    for number in range(30):
        folder = tmp_path / str(number)
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(signing.load_or_create_secret, [folder] * 8))
        assert len(found) == 1
        assert len(found.pop()) == 43
        assert [path.name for path in folder.iterdir()] == ["secret"]


@given(st.text())
def test_any_traceparent_gives_a_valid_next_hop(text):
    valid = logs.new_traceparent()
    assert logs.child_traceparent(valid)[:36] == valid[:36]
    assert logs.child_traceparent(valid)[36:52] != valid[36:52]
    assert len(logs.child_traceparent(text)) == 55


@given(st.integers(1, 10_000), st.floats(0, 0.999))
def test_backoff_stays_between_half_its_cap_and_its_cap(attempt, draw):
    delay_s = Backoff(first_s=1, max_s=60).delay_s(attempt, draw=draw)
    cap_s = min(60, 2.0 ** min(attempt - 1, 62))
    assert cap_s * 0.5 <= delay_s <= cap_s


async def test_sleepers_of_a_virtual_clock_wake_in_order_of_their_time():
    clock, woken = VirtualClock(), []

    async def sleeper(delay_s):
        await clock.sleep(delay_s)
        woken.append(delay_s)

    tasks = [asyncio.create_task(sleeper(s)) for s in (3, 1, 2)]
    await asyncio.sleep(0)
    clock.advance(2)
    await asyncio.sleep(0)
    assert woken == [1, 2]
    clock.advance(1)
    await asyncio.gather(*tasks)
    assert woken == [1, 2, 3]


def test_every_error_has_a_code_a_status_and_a_meaning():
    table = errors.error_table()
    for code, error in table.items():
        assert 400 <= error.status < 600, code
        assert errors.kind_of(error) in errors.KINDS, code
        assert error.__doc__, code


def test_a_log_line_is_one_json_document_and_masks_secrets():
    code = (
        "from headrace.kernel.logs import configure_logs, logger; configure_logs('test');"
        "logger('t').info('token_made', token='hrt_x', name='a\\nb')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = ran.stderr.splitlines()
    row = json.loads(line)
    assert (row["event"], row["role"], row["token"], row["name"]) == (
        "token_made",
        "test",
        "(masked)",
        "a\nb",
    )


def test_a_log_line_is_written_whatever_its_fields_hold():
    code = (
        "from headrace.kernel.logs import configure_logs, logger; configure_logs('test')\n"
        "class Mute:\n"
        "    def __str__(self): raise KeyError('no')\n"
        "    __repr__ = __str__\n"
        "logger('t').warning('broke', error='bad\\ud800', of=Mute(), huge=2**80)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = ran.stderr.splitlines()
    row = json.loads(line)
    assert (row["event"], row["error"], row["of"], row["huge"]) == (
        "broke",
        "bad?",
        "Mute without text (KeyError)",
        str(2**80),
    )


async def _ended(work):
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    [told] = await asyncio.gather(task, return_exceptions=True)
    return told


@pytest.mark.parametrize("error", [None, ValueError])
async def test_a_cancellation_that_was_swallowed_or_replaced_ends_the_block(error):
    async def work():
        with preserve_cancellation():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if error:
                raise error

    assert isinstance(await _ended(work), asyncio.CancelledError)


async def test_what_was_cancelled_before_the_block_does_not_end_it():
    async def work():
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with preserve_cancellation():
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            require_not_cancelled()
        return "cleaned up"

    assert await _ended(work) == "cleaned up"


async def test_a_timeout_inside_the_block_is_no_cancellation():
    with pytest.raises(TimeoutError), preserve_cancellation():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    require_not_cancelled()


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


def test_of_like_lines_the_first_is_written_and_the_rest_counted():
    with capture_logs() as lines:
        often = SparseLogger(logger("here"), every_s=3_600.0)
        for number in range(20):
            often.warning("engine_away", kind="postgres", number=number)
        often.info("engine_away", kind="valkey")
        often.every_s = 0.0
        often.warning("engine_away", kind="postgres", number=20)
    told = [(one["log_level"], one.get("number"), one["alike_before"]) for one in lines]
    assert told == [("warning", 0, 0), ("info", None, 0), ("warning", 20, 19)]


def test_kinds_without_end_take_bounded_memory():
    with capture_logs() as lines:
        often = SparseLogger(logger("here"), every_s=3_600.0)
        for number in range(3 * KINDS_MAX):
            often.warning("page_failed", kind=number)
    assert len(lines) == 3 * KINDS_MAX
    assert len(often._seen) <= KINDS_MAX
