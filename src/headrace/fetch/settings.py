"""The settings of fetch: section `fetch` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.kernel.config import (
    parse_choice,
    parse_count,
    parse_duration_s,
    parse_networks,
    parse_ports,
    parse_share,
    parse_size_bytes,
    parse_text,
    parse_url,
    setting,
)

CLASS_S_MAX: Final = 600.0
CLASSES_MAX: Final = 10


def parse_classes(text: str) -> tuple[float, ...]:
    """Seconds of `1s, 5s, 30s`, shortest first; an empty text has none. Raises: ValueError."""
    times_s = sorted({parse_duration_s(part) for part in text.split(",") if part.strip()})
    if len(times_s) > CLASSES_MAX or any(not 0.05 <= s <= CLASS_S_MAX for s in times_s):
        raise ValueError(
            f"up to {CLASSES_MAX} durations from 50ms to {CLASS_S_MAX:.0f}s, separated by commas"
        )
    return tuple(times_s)


def parse_refresh_s(text: str) -> float:
    """Seconds of a duration of at least an hour; 0 for `off`. Raises: ValueError."""
    if text.strip() == "off":
        return 0.0
    try:
        found = parse_duration_s(text)
    except ValueError:
        found = 0.0
    if found < 3600:
        raise ValueError("off, or a duration of at least 1h such as 7d")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Section `fetch`."""

    user_agent: str = setting(
        "HeadraceFetch/0.1 (+https://example.org/about-our-fetcher)",
        "User-Agent sent to every host; include an address where its owner can reach you.",
        parse_text,
    )
    allow_networks: tuple[str, ...] = setting(
        "",
        "Networks from which files may be downloaded although they are not public, such"
        " as 10.0.0.0/8.",
        parse_networks,
    )
    allow_ports: tuple[int, ...] = setting(
        "80, 443",
        "Ports from which files may be downloaded, all of them: include 80 and 443 when you"
        " add one.",
        parse_ports,
    )
    classes: tuple[float, ...] = setting(
        "1s, 5s, 30s",
        "Timeout classes: time limits of one photo with its redirects.",
        parse_classes,
    )
    former_classes: tuple[float, ...] = setting(
        "",
        "Former timeout classes, whose queued photos are still downloaded.",
        parse_classes,
    )
    speed_half_life_s: float = setting(
        "6h",
        "Half-life of a host's measured download times, which decide its timeout class.",
        parse_duration_s,
    )
    crawl_delay: str = setting(
        "off",
        "Whether a Crawl-delay in robots.txt is applied: off or honor.",
        parse_choice("off", "honor"),
    )
    photo_max_bytes: int = setting("25MiB", "Largest photo accepted.", parse_size_bytes)
    decode_share: float = setting(
        "0.01",
        "Share of photos, 0 to 1, decoded completely before storing; suspicious ones always are."
        " Near-duplicates are found among decoded photos: 1 decodes all.",
        parse_share,
    )
    catalogue_max_bytes: int = setting(
        "1GiB", "Largest catalogue accepted, also after decompression.", parse_size_bytes
    )
    catalogue_timeout_s: float = setting(
        "10m", "Time limit of downloading a catalogue file from its URL.", parse_duration_s
    )
    host_connections: int = setting(
        "8",
        "Connections of the whole fleet to one host, shared by the slots of its timeout class.",
        parse_count,
    )
    recheck_s: float = setting(
        "24h",
        "Shortest time until a photo that was sent without ETag and Last-Modified is"
        " requested again.",
        parse_duration_s,
    )
    hold_share: float = setting(
        "0.3",
        "A catalogue that removes more than this share of the items needs a confirmation;"
        " 1: never.",
        parse_share,
    )
    hold_items: int = setting(
        "20",
        "A catalogue that removes at most this number of items needs no confirmation for that.",
        parse_count,
    )
    review_s: float = setting(
        "24h", "How long an upload for review waits for its confirmation.", parse_duration_s
    )
    seller_url: str | None = setting(
        None,
        "Where sellers reach the API, such as https://api.example.com: the begin of links"
        " to their pages. Unset: the address of the request, or web.listen for the command line.",
        parse_url("http", "https", takes_user=False),
    )
    refresh_s: float = setting(
        "off",
        "Age at which good photos are requested again, with their ETag or date; off, or e.g. 7d.",
        parse_refresh_s,
    )
    retry_after_max_s: float = setting(
        "15m",
        "Longest Retry-After that is honored.",
        parse_duration_s,
    )
    item_deadline_s: float = setting(
        "6h",
        "Time after which an item is published with the photos that it has.",
        parse_duration_s,
    )
    handler_timeout_s: float = setting(
        "60s",
        "Time limit of an on_item handler call; after a timeout the item is delivered again.",
        parse_duration_s,
    )
    webhook_timeout_s: float = setting(
        "15s", "Time limit of one message to a webhook.", parse_duration_s
    )
    name_servers: str | None = setting(
        None,
        "Name servers such as 10.0.0.2, 10.0.0.3:5353; default: those of the machine.",
        parse_text,
    )
    ca_file: str | None = setting(
        None, "File of trusted certificates for https; default: those of certifi.", parse_text
    )
