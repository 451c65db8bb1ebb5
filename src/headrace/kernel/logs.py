"""Structured logs, one JSON line per event on standard error, and the W3C trace context.

A supervisor on a terminal gives its processes a file for the JSON lines: standard error then gets
warnings and errors alone, as text for people.

Log a batch or a failure, never each photo. Fields that carry credentials are masked here for all
callers. Each line carries the trace id of the current request or job.

The trace context follows a job from enqueue to the media request. It is parsed by hand, which costs
a sixth of an OpenTelemetry span (W3C Trace Context, section 3.2). `spans` makes a span of a sampled
one.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

import msgspec
import structlog

_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ODD_DIGITS: Final = frozenset("13579bdf")
current_traceparent: ContextVar[str | None] = ContextVar("current_traceparent", default=None)
onward: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("onward", default=())
"""Header fields that requests to the object store carry while a request is traced."""


class NewTraces:
    """How many of the traces that begin in this process are sampled; `spans.start` sets it."""

    sampled_ratio = 0.0


def new_traceparent(*, may_sample: bool = True) -> str:
    """A traceparent of a new trace; `may_sample` is False where no span begins the trace."""
    digits = f"{random.getrandbits(192):048x}"
    ratio = NewTraces.sampled_ratio
    flags = "01" if ratio and may_sample and random.random() < ratio else "00"
    return f"00-{digits[:32]}-{digits[32:]}-{flags}"


def is_sampled(traceparent: str | None) -> bool:
    """Whether the flag `sampled` is set; headers of jobs may follow the traceparent."""
    return traceparent is not None and traceparent[54:55] in _ODD_DIGITS


def is_traceparent(text: str) -> bool:
    """Whether `text` is a valid traceparent of version 00."""
    return _TRACEPARENT.fullmatch(text) is not None


def child_traceparent(traceparent: str | None) -> str:
    """A new span of the same trace, or a new trace if `traceparent` is not valid."""
    if traceparent is None or not is_traceparent(traceparent):
        return new_traceparent()
    return f"{traceparent[:36]}{random.getrandbits(64):016x}{traceparent[52:]}"


def trace_id(traceparent: str | None) -> str | None:
    """The trace id of 32 hex digits, or None."""
    return traceparent[3:35] if traceparent else None


REPEAT_EVERY_S: Final = 10.0
KINDS_MAX: Final = 1_000
"""Kinds of lines with a stored time; the table is cleared at this size."""
SECRET_FIELDS: Final = frozenset({"authorization", "cookie", "password", "secret", "token"})


ERROR_SHOWN_MAX: Final = 200
"""Characters of a handler's error on a terminal."""
LOG_FILE: Final = "HEADRACE_LOG_FILE"
"""Environment variable with the file for the JSON lines."""


def configure_logs(role: str, *, level: str = "info") -> None:
    """Write the logs of this process and its libraries to standard error as JSON lines.

    With `HEADRACE_LOG_FILE` to that file, and warnings to standard error as text.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _add_trace_id,
            _mask_secrets,
            *_renderers(os.environ.get(LOG_FILE)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # Looked up for each line: standard error may be replaced at run time.
        logger_factory=lambda *_: structlog.BytesLogger(sys.stderr.buffer),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)
    logging.basicConfig(handlers=[_ToStructlog()], level=max(number, logging.WARNING), force=True)


def _renderers(file: str | None) -> list[Any]:
    as_json = structlog.processors.JSONRenderer(serializer=_encode)
    if file is None:
        return [as_json]
    as_text = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        pad_event_to=0,
        # Exceptions are text already; its default warns about that if rich is installed.
        exception_formatter=structlog.dev.plain_traceback,
    )
    to_file = _ToFile(file, as_json)
    return [to_file, _shorten, as_text, lambda _logger, _method, text: f"{text}".encode()]


def _shorten(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Make one short line of an error that a handler raised; its traceback is kept elsewhere."""
    if event.pop("is_raised", False):
        raise structlog.DropEvent  # the line of the error itself is enough
    if event["event"] != "handler_raised":
        return event
    first = (str(event["error"]).splitlines() or [""])[0]
    error = first if len(first) <= ERROR_SHOWN_MAX else f"{first[:ERROR_SHOWN_MAX]} ..."
    at = f" at {event['at']}" if event["at"] else ""
    what = f"job {event['job_id']}" if event["jobs"] == 1 else f"{event['jobs']} jobs"
    keeps = os.environ.get(LOG_FILE, "the log")
    if event["is_last"] and event["jobs"] == 1:
        keeps = f"headrace jobs show {event['job_id']}"
    text = f"task {event['queue']}: {error}{at} ({what}, attempt {event['attempt']})"
    kept = {name: event[name] for name in ("timestamp", "level")}
    return {**kept, "event": f"{text}; traceback: {keeps}" if event["traceback"] else text}


class _ToFile:
    """Writes each event to a file as a JSON line, and passes on warnings and unwritten events."""

    def __init__(self, path: str, as_json: Any) -> None:
        self._as_json = as_json
        # Processes share the file: each line is one write at its end.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __call__(
        self, logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        try:
            os.write(self._file, self._as_json(logger, method, dict(event)) + b"\n")
        except OSError:
            return event
        if logging.getLevelNamesMapping()[event["level"].upper()] < logging.WARNING:
            raise structlog.DropEvent
        return event


def logger(name: str) -> Any:
    """A logger with `source=name`; events are past-tense words such as `batch_claimed`."""
    return structlog.get_logger(source=name)


class SparseLogger:
    """Writes at most one line per event and `kind` in `every_s`.

    An engine that is down causes thousands of equal lines per second. The field `alike_before`
    counts the omitted lines.
    """

    def __init__(self, log: Any, *, every_s: float = REPEAT_EVERY_S) -> None:
        self._log = log
        self.every_s = every_s
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def info(self, event: str, *, kind: object = None, **fields: Any) -> None:
        """Write one line or omit it."""
        self._write(self._log.info, event, kind, fields)

    def warning(self, event: str, *, kind: object = None, **fields: Any) -> None:
        """Write one line or omit it."""
        self._write(self._log.warning, event, kind, fields)

    def error(self, event: str, *, kind: object = None, **fields: Any) -> None:
        """Write one line or omit it."""
        self._write(self._log.error, event, kind, fields)

    def _write(
        self, write: Callable[..., Any], event: str, kind: object, fields: dict[str, Any]
    ) -> None:
        now_s, key = time.monotonic(), (event, kind)
        written_s, left_out = self._seen.get(key, (float("-inf"), 0))
        if now_s - written_s < self.every_s:
            self._seen[key] = (written_s, left_out + 1)
            return
        if len(self._seen) >= KINDS_MAX:
            self._seen.clear()
        self._seen[key] = (now_s, 0)
        write(event, **fields, alike_before=left_out)


class _ToStructlog(logging.Handler):
    """Writes the log records of libraries as the same JSON lines."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger(source=record.name).log(
            record.levelno, record.getMessage(), exc_info=record.exc_info
        )


def _encode(event: Any, **_options: Any) -> bytes:
    try:
        return msgspec.json.encode(event, enc_hook=str)
    except Exception:  # noqa: BLE001 - logging must not raise
        return msgspec.json.encode({_plain(name): _plain(event[name]) for name in event})


def _plain(value: Any) -> str:
    """`value` as text for JSON, without lone surrogates and without raising."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # noqa: BLE001 - as above
        text = f"{type(value).__name__} without text ({type(error).__name__})"
    return text.encode("utf-8", "replace").decode()


def _add_trace_id(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    found = trace_id(current_traceparent.get())
    if found is not None:
        event.setdefault("trace_id", found)
    return event


def _mask_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name in event.keys() & SECRET_FIELDS:
        event[name] = "(masked)"
    return event
