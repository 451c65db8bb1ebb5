"""Settings as frozen dataclasses, read once, with all faults reported together.

A room declares a section as a frozen dataclass with `setting(...)` fields. `load_config` fills the
sections from command-line flags, `HEADRACE_*` environment variables and one TOML file, in this
order of precedence. It stores the source of each value, which `headrace config show` prints.

Durations are written `30s`, `10m`, `2h`; sizes `64KiB`, `25MiB`. The value carries the unit, so the
outer name omits it: field `lease_s` of section `jobs` is `[jobs] lease` and `HEADRACE_JOBS_LEASE`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from headrace.kernel.errors import FieldProblem, InvalidInput, did_you_mean
from headrace.kernel.masking import NAMED_USER, is_secret, shown_url

ENV_PREFIX: Final = "HEADRACE_"
ENV_OUTSIDE_SECTIONS: Final = frozenset(
    {
        "HEADRACE_APP",
        "HEADRACE_CONFIG",
        "HEADRACE_SECRET",
        "HEADRACE_CRASH_AT",
        "HEADRACE_READY_FD",
        "HEADRACE_PARENT_PID",
        "HEADRACE_LOG_FILE",
    }
)
"""Variables that are no settings: other modules, units or compose files read them."""
S = TypeVar("S")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNIT_BYTES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class InvalidConfig(InvalidInput):
    """One or more settings are not valid; the error lists all of them."""

    code = "invalid_config"


def parse_duration_s(text: str) -> float:
    """Seconds of `250ms`, `30s`, `10m`, `2h`, `7d`. Raises: ValueError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(ms|s|m|h|d)", text.strip())
    if match is None:
        raise ValueError("a duration such as 30s, 10m or 2h")
    return float(match[1]) * _UNIT_S[match[2]]


def parse_rate(text: str) -> tuple[int, float]:
    """Starts and window in seconds of `600/m` or `20/5s`. Raises: ValueError."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9.]*)(ms|s|m|h|d)", text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError("a rate over 0 such as 600/m or 20/5s")
    return int(match[1]), parse_duration_s(f"{match[2] or 1}{match[3]}")


def parse_as(parse: Callable[[str], S], name: str, text: str, refusal: type[InvalidInput]) -> S:
    """The value that `parse` returns. Raises: `refusal`, with `name` and what is expected."""
    try:
        return parse(text)
    except ValueError as error:
        raise refusal(f"{name}: expected {error}, got {text[:80]!r}") from error


def moment_of(name: str, text: str | None, refusal: type[InvalidInput]) -> datetime | None:
    """The moment of an optional parameter. Raises: `refusal`."""
    return None if text is None else parse_as(parse_moment, name, text, refusal)


def parse_size_bytes(text: str) -> int:
    """Bytes of `512B`, `64KiB`, `25MiB`, `2GiB`. Raises: ValueError."""
    match = re.fullmatch(r"([0-9]{1,15})\s*(B|KiB|MiB|GiB|TiB)", text.strip())
    if match is None:
        raise ValueError("a size such as 64KiB or 25MiB")
    return int(match[1]) * _UNIT_BYTES[match[2]]


def parse_moment(text: str) -> datetime:
    """A moment of an ISO 8601 date or time; UTC if it has no offset. Raises: ValueError."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    except ValueError as error:
        raise ValueError("a date or a moment such as 2026-11-21 or 2026-11-21T10:00Z") from error


def parse_instant(text: str) -> datetime:
    """A moment of an ISO 8601 time with its offset. Raises: ValueError."""
    expected = "a moment with its offset such as 2026-11-21T10:00Z"
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ValueError(expected) from error
    if moment.tzinfo is None:
        raise ValueError(expected)
    return moment


def parse_byte_rate(text: str) -> int:
    """Bytes per second of `65536`, `64KiB`, `64KiB/s`. Raises: ValueError."""
    plain = text.strip().removesuffix("/s")
    try:
        return int(plain) if re.fullmatch(r"[0-9]{1,15}", plain) else parse_size_bytes(plain)
    except ValueError as error:
        raise ValueError("bytes per second such as 65536 or 64KiB/s") from error


def parse_count(text: str) -> int:
    """A whole number from 0. Raises: ValueError."""
    if not re.fullmatch(r"[0-9]{1,15}", text.strip()):
        raise ValueError("a whole number such as 20")
    return int(text)


def parse_count_between(least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers in bounds."""

    def parse(text: str) -> int:
        if not least <= (count := parse_count(text)) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return count

    return parse


def parse_share(text: str) -> float:
    """A fraction from 0 to 1. Raises: ValueError."""
    if not re.fullmatch(r"0(\.[0-9]{1,9})?|1(\.0+)?|\.[0-9]{1,9}", text.strip()):
        raise ValueError("a fraction from 0 to 1 such as 0.01")
    return float(text)


def parse_choice(*choices: str) -> Callable[[str], str]:
    """A parser of one of these words."""

    def parse(text: str) -> str:
        if text.strip() not in choices:
            raise ValueError(" or ".join(choices))
        return text.strip()

    return parse


def parse_text(text: str) -> str:
    """Any text that is not empty. Raises: ValueError."""
    if not text.strip():
        raise ValueError("a text that is not empty")
    return text.strip()


def parse_listen(text: str) -> tuple[str, int]:
    """Address and port of `127.0.0.1:8080` or `[::1]:8080`. Raises: ValueError."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("an address and a port such as 127.0.0.1:8080")
    return host, int(port)


def http_origin(listen: tuple[str, int]) -> str:
    """The URL of a listener without TLS, without a slash at its end."""
    host, port = listen
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_WITH_HOST: Final = frozenset({"http", "https", "s3", "valkey", "valkeys", "redis", "rediss"})
"""Schemes whose URLs need a host or a bucket; PostgreSQL and Unix sockets have none."""


_VALKEY: Final = ("db", "password", "username")
_VALKEY_TLS: Final = tuple(
    f"ssl_{name}" for name in ("ca_certs", "cert_reqs", "certfile", "check_hostname", "keyfile")
)
_SENTINEL: Final = ("sentinel", "sentinel_password", "sentinel_username")
_POSTGRES: Final = (
    *("application_name", "database", "dbname", "gsslib", "host", "krbsrvname", "options"),
    *("passfile", "password", "port", "service", "servicefile", "ssl_max_protocol_version"),
    *("ssl_min_protocol_version", "sslcert", "sslcrl", "sslkey", "sslmode", "sslnegotiation"),
    *("sslpassword", "sslrootcert", "target_session_attrs", "user"),
)
PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("postgresql", "postgres"), _POSTGRES),
    **dict.fromkeys(("valkey", "redis"), (*_VALKEY, *_SENTINEL)),
    **dict.fromkeys(("valkeys", "rediss"), (*_VALKEY, *_SENTINEL, *_VALKEY_TLS)),
    "unix": _VALKEY,
    "s3": (),
    "file": (),
}
"""Parameters that a URL of an engine may have; other settings of PostgreSQL are in `options`."""
VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "target_session_attrs": (
        *("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
    ),
}
"""Values of parameters that have few."""


def require_known_parameters(url: str) -> None:
    """Raises: ValueError for a parameter without effect in a URL of an engine."""
    known = PARAMETERS.get(url.partition(":")[0])
    query = url.partition("?")[2].partition("#")[0]
    if known is None or not query:
        return
    if "@" in query:
        raise ValueError("a URL whose `?` and `@` in a password are written as %3F and %40")
    follows_secret = False
    for pair in query.split("&"):
        name, equals, text = pair.partition("=")
        if follows_secret and unquote(name) not in known:
            raise ValueError("a URL whose `&` in a password is written as %26")
        follows_secret |= is_secret(name)
        if unquote(name) not in known:
            instead = (
                f"known are {', '.join(known)}"
                if known
                else "none is known; for S3 set variables such as AWS_REGION"
            )
            raise ValueError(f"a URL without the unknown parameter {name[:40]!r}; {instead}")
        if not equals:
            raise ValueError(f"a URL with a value for its parameter: {name}=VALUE")
        if text not in VALUES.get(name, (text,)):
            raise ValueError(
                f"a URL with {name}={', '.join(VALUES[name][:-1])} or {VALUES[name][-1]}"
            )


def _split_url(text: str) -> SplitResult:
    """The parts of a URL. Raises: ValueError for wrong brackets or an address that is none."""
    try:
        return urlsplit(text)
    except ValueError as error:
        raise ValueError("a URL with an IPv6 address between its brackets") from error


def _require_ports(hosts: str) -> None:
    """Raises: ValueError for a wrong port; PostgreSQL accepts several hosts, each with its port."""
    for host in hosts.rpartition("@")[2].split(","):
        try:
            _ = urlsplit(f"//{host}").port
        except ValueError as error:
            raise ValueError("a URL whose ports are numbers from 0 to 65535") from error


def parse_url(*schemes: str, takes_user: bool = True) -> Callable[[str], str]:
    """A parser of URLs with one of `schemes`; `takes_user` permits a user and password."""

    def parse(text: str) -> str:
        parts = _split_url(text.strip())
        if parts.scheme not in schemes or not text.strip()[len(parts.scheme) :].startswith("://"):
            path = (
                f", such as file://{text.strip()}" if "file" in schemes and text[:1] == "/" else ""
            )
            starts = " or ".join(f"{s}://" for s in schemes)
            raise ValueError(f"a URL starting with {starts}{path}")
        require_known_parameters(text.strip())
        if parts.scheme in PARAMETERS and parts.fragment:
            raise ValueError("a URL whose `#` in a password is written as %23")
        if parts.scheme in NAMED_USER and "@" in parts.path:
            raise ValueError("a URL whose `/` and `@` in a password are written as %2F and %40")
        _require_ports(parts.netloc)
        if parts.scheme in _WITH_HOST and not parts.hostname:
            raise ValueError(f"a URL with a name after {parts.scheme}://")
        if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
            raise ValueError("a URL of an absolute path such as file:///var/lib/blobs")
        if not takes_user and "@" in parts.netloc:
            raise ValueError("a URL without user and password before its host: they are never sent")
        return text.strip()

    return parse


def parse_networks(text: str) -> tuple[str, ...]:
    """Networks of `10.0.0.0/8, 127.0.0.2`; none for the empty text. Raises: ValueError."""
    try:
        return tuple(
            str(ipaddress.ip_network(part.strip())) for part in text.split(",") if part.strip()
        )
    except ValueError as error:
        raise ValueError("networks such as 127.0.0.0/8, separated by commas") from error


def parse_ports(text: str) -> tuple[int, ...]:
    """Ports and ranges of `80, 443, 8100-8199`. Raises: ValueError."""
    ports: list[int] = []
    for part in (p.strip() for p in text.split(",") if p.strip()):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 1 <= first <= last <= 65535:
            raise ValueError("ports such as 80, 443 or 8100-8199, separated by commas")
        ports.extend(range(first, last + 1))
    return tuple(ports)


def setting(
    default: Any, help_text: str, parse: Callable[[str], Any], *, secret: bool = False
) -> Any:
    """A field of a section; `default` is written as in a settings file, or None for unset."""
    value = parse(default) if isinstance(default, str) else default
    metadata = {"help": help_text, "parse": parse, "secret": secret, "written": default}
    return dataclasses.field(default=value, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Section `data`."""

    folder: str = setting(
        "headrace-data", "Folder of embedded engines, secret and root token.", parse_text
    )
    log_level: str = setting("info", "Minimum log level.", parse_text)
    metrics_listen: tuple[str, int] | None = setting(
        None,
        "Address and port that serve GET /metrics and GET /healthz without a token, for all"
        " roles of the data folder; unset: not served.",
        parse_listen,
    )


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting, as `headrace config show` and the reference page print it."""

    section: str
    name: str
    field: str
    env: str
    default: str
    help: str
    secret: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded sections, with the written value and the source of each setting."""

    sections: Mapping[str, Any]
    written: Mapping[str, tuple[str, str]]
    """Value as written and its source (`default`, file, variable or flag), by `jobs.lease`."""

    def section(self, kind: type[S]) -> S:
        """The section of class `kind`."""
        return next(value for value in self.sections.values() if isinstance(value, kind))


def setting_rows(sections: Mapping[str, type[Any]]) -> list[SettingRow]:
    """Every setting of `sections`, in order of section and declaration."""
    rows = []
    for section, kind in sections.items():
        for field in dataclasses.fields(kind):
            name = re.sub(r"_(s|bytes)$", "", field.name)
            env = f"{ENV_PREFIX}{section}_{name}".upper()
            written = field.metadata["written"]
            default = "" if written is None else str(written)
            help_text, secret = field.metadata["help"], field.metadata["secret"]
            rows.append(SettingRow(section, name, field.name, env, default, help_text, secret))
    return rows


def load_config(
    sections: Mapping[str, type[Any]],
    *,
    env: Mapping[str, str],
    file: Path | None = None,
    flags: Mapping[str, str] | None = None,
) -> Loaded:
    """Fill `sections` from flags, the environment and `file`; flags are keyed `section.name`.

    Raises: InvalidConfig, which lists every invalid, unknown and unreadable setting.
    """
    rows = setting_rows(sections)
    problems: list[FieldProblem] = []
    in_file = _read_file(file, rows, problems)
    in_env = _read_env(env, rows, problems)
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    written: dict[str, tuple[str, str]] = {}
    for row in rows:
        key = f"{row.section}.{row.name}"
        text, source = row.default, "default"
        for candidate in (
            (in_file.get(key), str(file)),
            (in_env.get(row.env), row.env),
            ((flags or {}).get(key), f"--{row.name.replace('_', '-')}"),
        ):
            if candidate[0] is not None:
                text, source = candidate[0], candidate[1]
        written[key] = (text, source)
        if source == "default":
            continue
        parse = sections[row.section].__dataclass_fields__[row.field].metadata["parse"]
        try:
            values[row.section][row.field] = parse(text)
        except ValueError as error:
            shown = repr(text)
            if row.secret:
                shown = shown_url(text) if row.name.endswith("url") else "a hidden value"
            name = (
                source
                if source.startswith(("--", ENV_PREFIX))
                else f"{source}: [{row.section}] {row.name}"
            )
            problems.append(FieldProblem(name, "invalid", f"expected {error}, got {shown}"))
    InvalidConfig.require_none(problems, "configuration")
    return Loaded({name: kind(**values[name]) for name, kind in sections.items()}, written)


def _read_file(
    file: Path | None, rows: list[SettingRow], problems: list[FieldProblem]
) -> dict[str, str]:
    if file is None:
        return {}
    try:
        parsed = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = "no such file: correct --config or HEADRACE_CONFIG; `headrace init` writes one"
        problems.append(FieldProblem(str(file), "unreadable", why))
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        why = str((error.strerror if isinstance(error, OSError) else None) or error)
        if isinstance(error, RecursionError):
            why = "its values are nested too deeply"
        problems.append(FieldProblem(str(file), "unreadable", f"expected a TOML file: {why}"))
        return {}
    found: dict[str, str] = {}
    known = {f"{row.section}.{row.name}" for row in rows}
    for section, table in parsed.items():
        for name, value in table.items() if isinstance(table, dict) else [("", table)]:
            key = f"{section}.{name}" if name else section
            if key not in known:
                problems.append(FieldProblem(f"{file}: {key}", "unknown", _unknown(key, known)))
            elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
                found[key] = json.dumps(value, default=str)
            elif isinstance(value, list):
                found[key] = ", ".join(str(item) for item in value)
            else:
                found[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _read_env(
    env: Mapping[str, str], rows: list[SettingRow], problems: list[FieldProblem]
) -> dict[str, str]:
    known = {row.env for row in rows}
    problems += [
        FieldProblem(name, "unknown", _unknown(name, known))
        for name in env
        if name.startswith(ENV_PREFIX) and name not in known | ENV_OUTSIDE_SECTIONS
    ]
    return {name: value for name, value in env.items() if name in known}


def _unknown(name: str, known: set[str]) -> str:
    return "no such setting" + did_you_mean(name, known)
