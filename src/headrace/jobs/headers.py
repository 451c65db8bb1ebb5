"""Headers of a job: its traceparent, and the options that differ from those of its task.

Idea: one text column that every table of waiting, leased and ended jobs has. It is the traceparent
alone for nearly all jobs, so options cost nothing where they are not used:
`00-<trace>-<span>-00 retries=2 timeout=30 expires=1790000000.5`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

TRACEPARENT_CHARACTERS: Final = 55


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """Options of one job. None: as its task."""

    retries: int | None = None
    timeout_s: float | None = None
    expires_s: float | None = None
    """Unix time after which it does not start."""
    chain: str | None = None
    """Jobs of one chain run one after another."""
    failed: tuple[float, str] | None = None
    """Unix time of its last failure before it was retried by hand, and the begin of its error."""


NO_OPTIONS: Final = OwnOptions()


def with_options(traceparent: str, options: OwnOptions) -> str:
    """The headers of a job."""
    named = {
        "retries": options.retries,
        "timeout": options.timeout_s,
        "expires": options.expires_s,
        "chain": None if options.chain is None else quote(options.chain, safe=""),
    }
    given = [f"{name}={value}" for name, value in named.items() if value is not None]
    return " ".join([traceparent, *given])


def have_options(headers: Sequence[str | None]) -> bool:
    """Whether any job has options of its own."""
    return any(text is not None and len(text) > TRACEPARENT_CHARACTERS for text in headers)


def traceparent_of(headers: str | None) -> str | None:
    """The traceparent of a job."""
    return headers[:TRACEPARENT_CHARACTERS] if headers else None


def options_of(headers: str | None) -> OwnOptions:
    """The options of a job. Unknown names, of newer code, are skipped."""
    if headers is None or len(headers) <= TRACEPARENT_CHARACTERS:
        return NO_OPTIONS
    given = dict(part.split("=", 1) for part in headers.split(" ")[1:])
    names = ("retries", "timeout", "expires", "chain", "failed")
    retries, timeout, expires, chain, failed = map(given.get, names)
    return OwnOptions(
        None if retries is None else int(retries),
        None if timeout is None else float(timeout),
        None if expires is None else float(expires),
        None if chain is None else unquote(chain),
        None if failed is None else _failure_of(failed),
    )


def _failure_of(text: str) -> tuple[float, str]:
    """The value of `failed`, which `retry_jobs_v2` writes: a Unix time and the error in hex."""
    at_s, _, error = text.partition(":")
    return float(at_s), bytes.fromhex(error).decode()


def own_retries(ids: Sequence[int], headers: Sequence[str | None]) -> dict[int, int]:
    """Retries by job, of the jobs that have their own."""
    if not have_options(headers):
        return {}
    found = {job: options_of(text).retries for job, text in zip(ids, headers, strict=True)}
    return {job: retries for job, retries in found.items() if retries is not None}
