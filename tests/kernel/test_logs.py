"""Like lines are written seldom, and none is lost from the count."""

from __future__ import annotations

from structlog.testing import capture_logs

from headrace.kernel.logs import KINDS_MAX, SparseLogger, logger


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
