"""Which User-Agents are bots: rules in a file that operators may replace while processes run.

The default is `bots.toml` of this package. `views.bots` names another file of the same form. It is
checked for changes every five seconds; a file that is missing or invalid keeps the rules before it
and is logged.
"""

from __future__ import annotations

import re
import time
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from headrace.kernel.logs import SparseLogger, logger
from headrace.views.model import Traffic

LOOK_EVERY_S: Final = 5.0
FILE_BYTES_MAX: Final = 1_000_000
USER_AGENTS_CACHED_MAX: Final = 4_096
_sparse_log: Final = SparseLogger(logger(__name__))


class BotRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pattern, its reason, and a User-Agent that matches it."""

    pattern: str
    reason: str
    example: str


class _BotRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: tuple[BotRule, ...]


def rules_of(text: str) -> tuple[BotRule, ...]:
    """The rules of a file, each of which matches its example. Raises: ValueError."""
    try:
        rules = msgspec.convert(tomllib.loads(text), _BotRules).rule
        for rule in rules:
            if re.search(rule.pattern, rule.example, re.IGNORECASE) is None:
                raise ValueError(f"the pattern {rule.pattern!r} does not match its example")
            if re.search(rule.pattern, "") is not None:
                raise ValueError(f"the pattern {rule.pattern!r} matches every User-Agent")
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, re.error, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not rules:
        raise ValueError("at least one rule")
    return rules


@cache
def default_rules() -> tuple[BotRule, ...]:
    """The rules of this package."""
    return rules_of(files("headrace.views").joinpath("bots.toml").read_text("utf-8"))


def read_rules(path: Path) -> tuple[BotRule, ...]:
    """The rules of a file. Raises: ValueError."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"a file of at most {FILE_BYTES_MAX} bytes")
        return rules_of(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"a readable file: {error.strerror}") from error


class Bots:
    """The rules in use. `path` None: those of this package."""

    def __init__(self, path: str | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._looked_s = time.monotonic()
        self._stamp = self._stamp_now()
        self._use(default_rules() if self._path is None else read_rules(self._path))

    def traffic_of(self, user_agent: str | None) -> Traffic:
        """`bot` for a missing User-Agent or one that a rule matches, otherwise `human`."""
        if self._path is not None and time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self.look()
        if not user_agent:
            return Traffic.BOT
        found = self._known.get(user_agent)
        if found is None:
            if len(self._known) >= USER_AGENTS_CACHED_MAX:
                self._known.clear()
            is_bot = self._pattern.search(user_agent) is not None
            found = self._known[user_agent] = Traffic.BOT if is_bot else Traffic.HUMAN
        return found

    def look(self) -> None:
        """Load the file if it changed."""
        self._looked_s = time.monotonic()
        stamp = self._stamp_now()
        if self._path is None or stamp == self._stamp:
            return
        try:
            self._use(read_rules(self._path))
        except ValueError as error:
            _sparse_log.warning("views_bots_invalid", path=str(self._path), error=str(error))
            return
        self._stamp = stamp

    def _use(self, rules: tuple[BotRule, ...]) -> None:
        text = "|".join(f"(?:{rule.pattern})" for rule in rules)
        self._pattern = re.compile(text, re.IGNORECASE)
        self._known: dict[str, Traffic] = {}

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
