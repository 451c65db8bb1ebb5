"""Ids, backoff, clocks, traces, secrets, cursors, cancellations, logs and the error table."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.kernel import errors, logs, metrics, signing
from headrace.kernel.clock import VirtualClock
from headrace.kernel.ids import InvalidId, new_uuid7, require_id, require_new_id
from headrace.kernel.logs import KINDS_MAX, SparseLogger, logger
from headrace.kernel.resilience import (
    BackgroundTasks,
    Backoff,
    preserve_cancellation,
    require_not_cancelled,
)
from headrace.kernel.signing import CursorInvalid, derive_key, read_cursor, sign_cursor

KEY = derive_key("a root secret of more than 32 characters", "cursor")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
WRITE_LOGS = """
from headrace.kernel.logs import configure_logs, logger
configure_logs("test")
class Mute:
    def __str__(self): raise KeyError("no")
    __repr__ = __str__
logger("t").info("token_made", token="hrt_x", name="a\\nb")
logger("t").warning("broke", error="bad\\ud800", of=Mute(), huge=2**80)
"""


def test_ids_need_no_escaping_and_new_ones_are_no_folder_names():
    for value in ("a", "ad:1", "user@shop.example", "A-_.~", "x" * 128, ".", ".."):
        assert require_id("item", value) == value
    for value in ("", "a b", "a/b", "..%00", "é", "x" * 129, "a\n", "a{b}"):
        with pytest.raises(InvalidId, match="item "):
            require_id("item", value)
    for value in (".", ".."):
        with pytest.raises(InvalidId, match=r"item '\.+' .* use a name"):
            require_new_id("item", value)
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
    with pytest.raises(signing.WeakSecret, match="at least 32"):
        signing.derive_key("short", "cursor")


def test_concurrent_processes_get_one_private_root_secret(tmp_path):
    for number in range(20):
        folder = tmp_path / str(number)
        with ThreadPoolExecutor(8) as pool:
            [secret] = set(pool.map(signing.load_or_create_secret, [folder] * 8))
        assert len(secret) == 43
        assert [path.name for path in folder.iterdir()] == ["secret"]
        assert signing.load_or_create_secret(folder) == secret
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").write_text("")
    with pytest.raises(signing.WeakSecret, match="has 0 characters") as refused:
        signing.load_or_create_secret(folder)
    assert str(folder / "secret") in refused.value.text
    assert "HEADRACE_SECRET" not in refused.value.text


@given(st.text())
def test_any_traceparent_gives_a_valid_child(text):
    valid = logs.new_traceparent()
    assert logs.child_traceparent(valid)[:36] == valid[:36]
    assert logs.child_traceparent(valid)[36:52] != valid[36:52]
    assert len(logs.child_traceparent(text)) == 55


@given(st.integers(1, 10_000), st.floats(0, 0.999))
def test_backoff_stays_between_half_its_cap_and_its_cap(attempt, draw):
    delay_s = Backoff(first_s=1, max_s=60).delay_s(attempt, draw=draw)
    cap_s = min(60, 2.0 ** min(attempt - 1, 62))
    assert cap_s * 0.5 <= delay_s <= cap_s


async def test_sleepers_of_a_virtual_clock_wake_in_order():
    clock, woken = VirtualClock(), []

    async def sleeper(delay_s):
        await clock.sleep(delay_s)
        woken.append(delay_s)

    tasks = [asyncio.create_task(sleeper(s)) for s in (3, 1, 2)]
    for advance_s, expected in ((0, []), (2, [1, 2]), (1, [1, 2, 3])):
        await asyncio.sleep(0)
        clock.advance(advance_s)
        await asyncio.sleep(0)
        assert woken == expected
    await asyncio.gather(*tasks)


def test_every_error_has_a_code_a_status_and_a_meaning():
    for code, error in errors.error_table().items():
        assert 400 <= error.status < 600, code
        assert errors.kind_of(error) in errors.KINDS, code
        assert error.__doc__, code


def test_a_log_line_is_one_json_document_without_secrets_whatever_its_fields_are():
    command = [sys.executable, "-c", WRITE_LOGS]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    token, broken = [json.loads(line) for line in ran.stderr.splitlines()]
    assert (token["event"], token["role"]) == ("token_made", "test")
    assert (token["token"], token["name"]) == ("(masked)", "a\nb")
    assert (broken["event"], broken["error"]) == ("broke", "bad?")
    assert (broken["of"], broken["huge"]) == ("Mute without text (KeyError)", str(2**80))


async def cancelled(work):
    """The end of a task that was cancelled after its first step."""
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    [ended] = await asyncio.gather(task, return_exceptions=True)
    return ended


@pytest.mark.parametrize("error", [None, ValueError])
async def test_a_swallowed_or_replaced_cancellation_ends_the_block(error):
    async def work():
        with preserve_cancellation():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if error:
                raise error

    assert isinstance(await cancelled(work), asyncio.CancelledError)


async def test_only_a_cancellation_within_the_block_ends_it():
    async def work():
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with preserve_cancellation():
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            require_not_cancelled()
        return "cleaned up"

    assert await cancelled(work) == "cleaned up"
    with pytest.raises(TimeoutError), preserve_cancellation():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    require_not_cancelled()


@given(position=JSON, queue=st.text(max_size=30) | st.none())
def test_a_cursor_returns_its_position(position, queue):
    cursor = sign_cursor(KEY, "jobs", {"queue": queue}, position)
    assert read_cursor(KEY, "jobs", {"queue": queue, "state": None}, cursor) == position


@given(
    text=st.text(max_size=60),
    index=st.integers(0, 200),
    letter=st.sampled_from("ABCDEFGHabcdefgh0123456789-_"),
)
def test_a_foreign_or_changed_cursor_is_refused(text, index, letter):
    cursor = sign_cursor(KEY, "jobs", {"queue": "mail"}, [42, "2026-11-21T00:00:00Z"])
    place = index % (len(cursor) - 1)  # the last character has unused bits
    for changed in (text, cursor[:place] + letter + cursor[place + 1 :]):
        if changed != cursor:
            with pytest.raises(CursorInvalid):
                read_cursor(KEY, "jobs", {"queue": "mail"}, changed)


def test_a_cursor_of_another_list_filter_or_secret_is_refused():
    other = derive_key("another root secret of over 32 characters", "cursor")
    cursor = sign_cursor(KEY, "jobs", {"queue": "mail"}, 42)
    for key, listing, filters, text in (
        (KEY, "jobs", {"queue": "other"}, cursor),
        (KEY, "jobs", {}, cursor),
        (KEY, "runs", {"queue": "mail"}, cursor),
        (other, "jobs", {"queue": "mail"}, cursor),
        (KEY, "jobs", {}, "A" * 100_000),
    ):
        with pytest.raises(CursorInvalid, match="omit it to start at the first page"):
            read_cursor(key, listing, filters, text)


def test_similar_log_lines_are_counted_in_bounded_memory():
    with capture_logs() as lines:
        sparse = SparseLogger(logger("here"), every_s=3_600.0)
        for number in range(20):
            sparse.warning("engine_away", kind="postgres", number=number)
        sparse.info("engine_away", kind="valkey")
        sparse.every_s = 0.0
        sparse.warning("engine_away", kind="postgres", number=20)
    found = [(one["log_level"], one.get("number"), one["alike_before"]) for one in lines]
    assert found == [("warning", 0, 0), ("info", None, 0), ("warning", 20, 19)]
    with capture_logs() as lines:
        for number in range(3 * KINDS_MAX):
            sparse.warning("page_failed", kind=number)
    assert len(lines) == 3 * KINDS_MAX
    assert len(sparse._seen) <= KINDS_MAX


async def test_background_tasks_end_with_their_owner_and_are_not_kept_after_their_end():
    tasks, seen = BackgroundTasks(), []

    async def wait_until_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def give_result() -> str:
        return "result"

    assert await tasks.start(give_result()) == "result"
    assert not tasks
    tasks.start(wait_until_cancelled())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert (seen, set(tasks)) == (["cleaned up"], set())


def test_an_undeclared_label_is_counted_as_other():
    name = "tests_labels_total"
    counter = metrics.counter(name, "Of this test.", kind=("known",))
    for kind in ("known", "unknown", "x" * 5000, "\n"):
        metrics.bound(counter, name, kind=kind).inc()
    found = {sample.labels["kind"] for sample in counter.collect()[0].samples}
    assert found == {"known", "other"}


def test_a_short_peak_is_shown_until_the_history_has_read_it(monkeypatch):
    """An outage of 12 s ends within milliseconds of the reading that shows its length."""
    at_s = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: at_s[0])
    shown = metrics.gauge("tests_peak_seconds", "Of this test.")
    peak, found = metrics.Peak(shown), []
    for now_s, value in ((0, 0.2), (9, 7.2), (12, 12.1), (12.25, 0.3), (24.5, 0.2), (26, 0.2)):
        at_s[0] = now_s
        peak.note(value)
        found.append(shown.collect()[0].samples[0].value)
    assert found == [0.2, 7.2, 12.1, 12.1, 12.1, 0.2]
