"""Outcomes in plain words: what became of a photo, and who can do what about it.

The sentences are for the seller and for whoever runs the site; a code without a sentence of its own is
still said in words, by its kind.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.fetch.guard import OPEN_NETWORK, OPEN_PORT

_WORDS: Final = {
    "stored": "the photo was downloaded and is stored",
    "unchanged": "the photo did not change, the stored copy is used",
    "known": "the photo was stored before and was not asked for",
    "refused:forbidden_address": "the link leads to an address that is not public; " + OPEN_NETWORK,
    "refused:port": "the link asks a port that is not allowed; " + OPEN_PORT,
    "refused:redirect_port": "the host redirects to a port that is not allowed; " + OPEN_PORT,
    "refused:length": "the link is too long",
    "refused:syntax": "the link holds characters that no link may hold",
    "refused:scheme": "the link must start with http:// or https://",
    "refused:host": "the link names no host that can be read",
    "refused:userinfo": "the link holds a user name or password: leave it out",
    "refused:not_an_image": "what came is no JPEG, PNG, WebP, GIF or AVIF image",
    "refused:too_large": "the photo has too many bytes: fetch.photo_max is the bound",
    "refused:too_many_pixels": "the photo has too many pixels",
    "refused:headers_too_large": "the host's answer begins with too many headers",
    "refused:encoding": "the host packed the photo although plain was asked for",
    "refused:redirect_limit": "the host redirects too many times",
    "refused:redirect_loop": "the host's redirects go in a circle",
    "refused:redirect_downgrade": "the host redirects from https to http",
    "refused:redirect_without_location": "the host redirects to nowhere",
    "failed:dns": "the name of the host cannot be resolved",
    "failed:connect": "the host cannot be connected to",
    "failed:reset": "the host broke the connection",
    "failed:timeout": "the host did not deliver in time: fetch.timeout is the bound",
    "failed:slow": "the host delivered too slowly and was given up",
    "failed:rate_limited": "the host asks for fewer requests (429): lower the customer's rate",
    "failed:truncated": "the photo broke off in the middle",
    "failed:tls": "the host's certificate or its encryption is not valid",
    "failed:lost": "the job of this photo ended without an outcome; the next run asks again",
    "failed:not_asked": "the photo was not asked for yet",
    "failed:http_401": "the host wants a password (401)",
    "failed:http_403": "the host does not give this photo to us (403)",
    "failed:http_404": "there is nothing at this link (404)",
    "failed:http_410": "the photo was taken away for good (410)",
}


def describe_outcome(outcome: str) -> str:
    """One sentence about `outcome`."""
    words = _WORDS.get(outcome)
    if words is not None:
        return words
    kind, _, code = outcome.partition(":")
    status = re.fullmatch(r"http_(\d+)", code)
    if status is not None:
        return f"the host answers with status {status[1]}"
    plain = code.replace("_", " ")
    return (
        f"the photo was refused: {plain}"
        if kind == "refused"
        else f"the host did not deliver: {plain}"
    )


def is_bad(outcome: str) -> bool:
    """Whether the photo failed or was refused."""
    return outcome.startswith(("failed:", "refused:"))
