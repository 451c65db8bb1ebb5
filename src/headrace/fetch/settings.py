"""The settings of fetch: section `fetch` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.fetch.routing import parse_classes
from headrace.kernel.config import (
    parse_count,
    parse_duration_s,
    parse_networks,
    parse_ports,
    parse_share,
    parse_size_bytes,
    parse_text,
    setting,
)


def parse_crawl_delay(text: str) -> str:
    """`off` or `honour`. Raises: ValueError."""
    if text.strip() not in ("off", "honour"):
        raise ValueError("off or honour")
    return text.strip()


def parse_refresh_s(text: str) -> float:
    """Seconds of a duration from an hour on; 0 for `off`. Raises: ValueError."""
    if text.strip() == "off":
        return 0.0
    try:
        found = parse_duration_s(text)
    except ValueError:
        found = 0.0
    if found < 3600:
        raise ValueError("off, or a duration from 1h on such as 7d")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Section `fetch`."""

    user_agent: str = setting(
        "HeadraceFetch/0.1 (+https://example.org/about-our-fetcher)",
        "The User-Agent sent to every host; put an address there where its owner reaches you.",
        parse_text,
    )
    allow_networks: tuple[str, ...] = setting(
        "", "Networks that may be connected to although they are not public.", parse_networks
    )
    allow_ports: tuple[int, ...] = setting(
        "80, 443",
        "All ports that may be connected to: who adds one writes 80 and 443 as well.",
        parse_ports,
    )
    classes: tuple[float, ...] = setting(
        "1s, 5s, 30s",
        "Timeout classes: the longest time of one photo with its redirects, from class to class.",
        parse_classes,
    )
    former_classes: tuple[float, ...] = setting(
        "",
        "Classes no longer used whose waiting photos are still worked off, until their queues are empty.",
        parse_classes,
    )
    speed_half_life_s: float = setting(
        "6h", "What was measured of a host counts half as much after so long.", parse_duration_s
    )
    crawl_delay: str = setting(
        "off", "Whether a Crawl-delay in robots.txt is kept: off or honour.", parse_crawl_delay
    )
    photo_max_bytes: int = setting("25MiB", "Largest photo accepted.", parse_size_bytes)
    decode_share: float = setting(
        "0.01",
        "Share of the photos, 0 to 1, that is decoded whole before it is stored; odd ones always are.",
        parse_share,
    )
    catalogue_max_bytes: int = setting(
        "1GiB", "Largest catalogue accepted, also after unpacking.", parse_size_bytes
    )
    catalogue_timeout_s: float = setting(
        "10m", "Longest time of bringing a catalogue file from its URL.", parse_duration_s
    )
    host_connections: int = setting(
        "8",
        "Connections to one host of the whole fleet; each slot that fetches keeps to its share.",
        parse_count,
    )
    recheck_s: float = setting(
        "24h",
        "A stored photo whose host gave no ETag and no Last-Modified is not asked for again sooner.",
        parse_duration_s,
    )
    hold_share: float = setting(
        "0.3",
        "A catalogue that removes more than this share of the items is held; 1: none is.",
        parse_share,
    )
    hold_items: int = setting(
        "20", "A catalogue that removes so many items or fewer is not held for it.", parse_count
    )
    refresh_s: float = setting(
        "off",
        "Good photos are asked for again after this time, with their ETag or date; off, or such as 7d.",
        parse_refresh_s,
    )
    retry_after_max_s: float = setting(
        "15m",
        "Longest time that a host's Retry-After keeps its photos waiting.",
        parse_duration_s,
    )
    item_deadline_s: float = setting(
        "6h",
        "An item whose photos take longer than this is published with those that it has.",
        parse_duration_s,
    )
    handler_timeout_s: float = setting(
        "60s",
        "Longest time of one call of an on_item handler; over it the item is delivered again later.",
        parse_duration_s,
    )
    webhook_timeout_s: float = setting(
        "15s", "Longest time of one message to a webhook.", parse_duration_s
    )
    name_servers: str | None = setting(
        None,
        "Name servers such as 10.0.0.2, 10.0.0.3:5353; unset: those of the machine.",
        parse_text,
    )
    ca_file: str | None = setting(
        None, "File of trusted certificates for https; unset: those of certifi.", parse_text
    )
