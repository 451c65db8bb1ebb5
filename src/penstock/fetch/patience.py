"""When a link that failed is asked again: after 1 run, then 2, then 3, and within a day in any case.

Asked in each of a week's hourly runs a dead link costs its host 168 requests; asked so, 17. Time alone
would be no measure: one customer sends a catalogue each minute, another each night, and a person who
mends a link looks for it in the next runs. So *rounds* are counted: whole catalogues of a customer that
were applied. A link that failed `failures` times in a row sits out as many rounds.

The day is kept by asking early: a link is due too where the round after this one would come too late for
it, supposed the gap to the last round returns, and a quarter of it on top. An item sent by itself, not
in a whole catalogue, is no round; its links are due again after an hour.

An edited link is another link and starts afresh; an answer that is good forgets the failures; a list of
links that was changed is asked whole. These rules are written in SQL too, where they run (`note_round`,
`note_needs` and `note_retries` in `needs.sql`, the function `fetch_decide`); a test holds the two together.
"""

from __future__ import annotations

from typing import Final

WAIT_MAX_S: Final = 86_400.0
"""No link that failed waits longer than that from one time it is asked to the next."""
GAP_SLACK: Final = 1.25
"""A round may come later than the gap to the last one foretells."""
SENT_WAIT_S: Final = 3600.0
"""The wait of a link whose item is sent by itself."""


def due_round(asked_round: int, failures: int) -> int:
    """The round in which a link is due that failed for the `failures`th time in `asked_round`."""
    return asked_round + failures + 1


def longest_wait_s(gap_s: float | None) -> float:
    """How long ago a link may have been asked to wait for one more round; `gap_s` is that to the last one."""
    return max(0.0, WAIT_MAX_S - GAP_SLACK * (gap_s or 0.0))


def is_due(*, this_round: int, due: int, asked_ago_s: float, gap_s: float | None) -> bool:
    """Whether a link that failed is asked in `this_round`, `due` being what `due_round` said."""
    return due <= this_round or asked_ago_s > longest_wait_s(gap_s)
