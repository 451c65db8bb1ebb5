"""What became of a command: never sent, sent without an answer, or answered with a no."""

from __future__ import annotations

from typing import Any, Final

from headrace.engines.valkey import ValkeyDown, moved_of

NOT_RUN: Final = frozenset(
    {
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOAUTH",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
    }
)
"""First words of refusals after which the server is as it was."""


class ValkeyBusy(ValkeyDown):
    """More callers wait for Valkey than may; the command was not sent."""

    code = "valkey.busy"

    @property
    def public_text(self) -> str:
        """The same for everybody."""
        return "too many requests wait for Valkey: try again in a moment"


class ValkeyLost(ValkeyDown):
    """The command was sent and its reply never came: it may have been run or not."""

    code = "valkey.reply_lost"

    @property
    def public_text(self) -> str:
        """What a caller has to decide now."""
        return (
            "Valkey did not answer in time, so it is not known whether this was done: try again if doing it"
            " twice does no harm"
        )


class ValkeyRefused(ValkeyDown):
    """Valkey answered a command with an error; `reply` is its text, which callers over the network never see."""

    code = "valkey.refused"

    def __init__(self, text: str, reply: str) -> None:
        super().__init__(text, retry_after_s=2)
        self.reply = reply

    @property
    def public_text(self) -> str:
        """Without the server's words."""
        return "Valkey refused the command: `headrace doctor` on the server says why"


class ValkeyPartlyDown(ValkeyDown):
    """Some primaries of the cluster do not answer: `found` has None in the places `lost`."""

    code = "valkey.partly_down"

    def __init__(self, found: list[Any], lost: set[int], text: str) -> None:
        super().__init__(text, retry_after_s=2)
        self.found, self.lost = found, lost


class ValkeyNotReady(ValkeyDown):
    """Valkey answered that it cannot run the command now; nothing was done. `word` is its reason, such as LOADING."""

    code = "valkey.not_ready"

    def __init__(self, word: str) -> None:
        super().__init__(
            f"Valkey is not ready ({word}), nothing was done: check it with `headrace doctor`, then try again",
            retry_after_s=2,
        )
        self.word = word


def refusal(reply: str) -> ValkeyDown:
    """The error that `reply` tells."""
    word = reply.split(" ", 1)[0]
    if word in NOT_RUN:
        return moved_of(reply) or ValkeyNotReady(word)
    return ValkeyRefused(
        f"Valkey refused the command ({reply[:200]}): check it with `headrace doctor`", reply
    )
