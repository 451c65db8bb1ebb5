"""Fingerprints of the root secret of every host, to find a host with another HEADRACE_SECRET.

Such a host starts without an error, but the others refuse its URLs and cursors. So each role
writes the fingerprint of its secret into its metrics, the recorder of the host stores it in
PostgreSQL, and `headrace doctor` and the console compare. The fingerprint is the id of a key that
HMAC-SHA256 derives for this use alone, so it may be shown.

Hosts agree if each accepts the secret of the other, as while a secret is changed with
`media.accepted_secrets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.signing import derive_key

SQL: Final = load_queries("headrace.web")
USE: Final = "fingerprint"
SEEN_S: Final = 180.0
"""Roles that were not seen for this long have ended: three writes of a recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSecret:
    """The fingerprint of one role's secret, and those of the further secrets it accepts."""

    host: str
    role: str
    fingerprint: str
    accepted: frozenset[str] = frozenset()

    def agrees_with(self, other: RoleSecret) -> bool:
        """Whether each accepts what the other signs."""
        return self.fingerprint in {other.fingerprint, *other.accepted} and (
            other.fingerprint in {self.fingerprint, *self.accepted}
        )


def fingerprints_of(secret: str, accepted: Sequence[str]) -> tuple[str, str]:
    """The fingerprint of a root secret, and those of further ones. Raises: WeakSecret."""
    others = [derive_key(one, USE).id for one in accepted]
    return derive_key(secret, USE).id, ",".join(others)


async def note_secrets(postgres: Postgres, host: str, found: Sequence[RoleSecret]) -> None:
    """Store the fingerprints of all roles that run on `host`."""
    await postgres.run(
        SQL.note_secrets,
        host=host,
        roles=[one.role for one in found],
        fingerprints=[one.fingerprint for one in found],
        accepted=[",".join(sorted(one.accepted)) for one in found],
    )


async def read_secrets(postgres: Postgres) -> list[RoleSecret]:
    """The fingerprints of all running roles, by host and role."""
    return [
        RoleSecret(
            host=row["host"],
            role=row["role"],
            fingerprint=row["fingerprint"],
            accepted=accepted_in(row["accepted"]),
        )
        for row in await postgres.all(SQL.role_secrets, age_s=SEEN_S)
    ]


def accepted_in(text: str) -> frozenset[str]:
    """The fingerprints in a text with commas."""
    return frozenset(text.split(",")) - {""}


def differing(found: Iterable[RoleSecret]) -> dict[str, str]:
    """The hosts whose secret differs from that of most hosts, with the finding as text."""
    roles = sorted(found, key=lambda one: (one.host, one.role))

    def agreeing(one: RoleSecret) -> list[str]:
        return sorted({other.host for other in roles if one.agrees_with(other)})

    usual = max(roles, key=lambda one: len(agreeing(one)), default=None)
    if usual is None:
        return {}
    odd: dict[str, list[str]] = {}
    for one in roles:
        if not one.agrees_with(usual):
            odd.setdefault(one.host, []).append(one.role)
    others = ", ".join(agreeing(usual))
    return {
        host: f"{', '.join(named)} on {host} uses another HEADRACE_SECRET than {others}"
        for host, named in odd.items()
    }
