"""The URL guard: no form of a forbidden address passes, ordinary URLs do."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from forbidden import FORBIDDEN_ADDRESSES, LOOPBACK_HOSTS, REFUSED
from hypothesis import given
from hypothesis import strategies as st

from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import Policy, forbidden_reason, judge_url
from headrace.fetch.model import URL_CHARACTERS_MAX

PUBLIC = Policy()
OPENED = Policy.of(("127.0.0.0/8",), (80, 8080))


def reason_of(url: str, policy: Policy = PUBLIC) -> str | None:
    """Why a URL is refused; None if it is allowed."""
    try:
        judge_url(url, policy)
    except UrlRefused as error:
        found = error
    else:
        return None
    assert found.code == "fetch.url_refused"
    assert len(found.text) < 250
    return found.reason


def test_every_form_of_a_forbidden_address_is_refused():
    for text in FORBIDDEN_ADDRESSES:
        assert forbidden_reason(ipaddress.ip_address(text), PUBLIC), text
    literals = [f"[{text}]" if ":" in text else text for text in FORBIDDEN_ADDRESSES]
    for host in (*literals, *LOOPBACK_HOSTS):
        assert reason_of(f"http://{host}/a.jpg") == "forbidden_address", host


NOT_PUBLIC = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 168.63.129.16/32 169.254.0.0/16 172.16.0.0/12
192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24
203.0.113.0/24 224.0.0.0/4 240.0.0.0/4
2001::/23 2001:db8::/32 3fff::/20 4000::/3 6000::/3 8000::/2 c000::/2
"""


def test_each_forbidden_network_ends_exactly_at_its_borders():
    networks = [ipaddress.ip_network(text) for text in NOT_PUBLIC.split()]
    for network in networks:
        for address in (network[0], network[network.num_addresses // 2], network[-1]):
            assert forbidden_reason(address, PUBLIC), address
        kind = type(network[0])
        for number in (int(network[0]) - 1, int(network[-1]) + 1):
            if not 0 <= number < 2**network.max_prefixlen:
                continue
            address = kind(number)
            is_inside = any(address in n for n in networks if n.version == network.version)
            assert (forbidden_reason(address, PUBLIC) is not None) == is_inside, address


@pytest.mark.parametrize("reason", REFUSED)
def test_an_odd_url_is_refused_with_its_reason(reason):
    assert {url: reason_of(url) for url in REFUSED[reason]} == dict.fromkeys(
        REFUSED[reason], reason
    )


def test_the_longest_allowed_url_host_label_and_port():
    longest = "http://example.com/" + "a" * 2029
    assert len(longest) == URL_CHARACTERS_MAX
    host = ".".join(["a" * 63] * 3 + ["a" * 61])
    for url in (longest, f"http://{host}/", f"http://{host}./"):
        assert reason_of(url) is None, url
    assert reason_of(f"http://a{host}/") == "host"
    ports = Policy.of((), (1, 65535))
    for port in (1, 65535):
        assert judge_url(f"http://example.com:{port}/", ports).port == port
    assert [reason_of(f"http://example.com:{port}/", ports) for port in (2, 80)] == ["port"] * 2


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTP://EXAMPLE.com:80/A.jpg?b=1#part", "http://example.com/A.jpg?b=1"),
        ("https://example.com./a", "https://example.com/a"),
        ("https://example.com:443/a", "https://example.com/a"),
        ("http://8.8.8.8/a", "http://8.8.8.8/a"),
        ("http://[2606:4700::1111]/a", "http://[2606:4700::1111]/a"),
        ("http://[64:ff9b::808:808]/", "http://[64:ff9b::808:808]/"),
        (
            "http://пример.рф/фото 1.jpg",
            "http://xn--e1afmkfd.xn--p1ai/%D1%84%D0%BE%D1%82%D0%BE%201.jpg",
        ),
        ("http://example.com/a%20b?x=[1]", "http://example.com/a%20b?x=[1]"),
        ("http://my_shop.example.com?x", "http://my_shop.example.com/?x"),
    ],
)
def test_an_ordinary_url_is_sent_in_one_form(url, sent):
    assert judge_url(url, PUBLIC).url == sent


def test_opened_networks_and_ports_are_open_in_every_form():
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
        assert reason_of(f"http://{host}:8080/", OPENED) is None
    assert reason_of("http://[::1]:8080/", Policy.of(("::1/128",), (8080,))) is None
    for url in ("http://[::1]:8080/", "http://10.0.0.1:8080/"):
        assert reason_of(url, OPENED) == "forbidden_address"
    assert reason_of("https://example.com/", OPENED) == "port"


@given(st.integers(0, 2**32 - 1))
def test_what_carries_a_v4_address_is_judged_as_that_address(number):
    inner = ipaddress.IPv4Address(number)
    is_forbidden = forbidden_reason(inner, PUBLIC) is not None
    if not inner.is_global or inner.is_multicast:
        assert is_forbidden
    high, low = number >> 16, number & 0xFFFF
    for text in (
        f"::ffff:{inner}",
        f"::ffff:{high:x}:{low:x}",
        f"::{high:x}:{low:x}",
        f"64:ff9b::{high:x}:{low:x}",
        f"64:ff9b:1:{high:x}:{low >> 8:x}:{(low & 255) << 8:x}::",
        f"2002:{high:x}:{low:x}::1",
    ):
        outer = ipaddress.ip_address(text)
        assert (forbidden_reason(outer, PUBLIC) is not None) == is_forbidden, text


@given(st.integers(0, 2**128 - 1))
def test_no_v6_address_that_the_library_calls_private_passes(number):
    address = ipaddress.IPv6Address(number)
    if forbidden_reason(address, PUBLIC) is None:
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_site_local


def written_forms(number: int) -> list[str]:
    a, b, c, d = number.to_bytes(4, "big")
    return [
        f"{a}.{b}.{c}.{d}",
        str(number),
        hex(number),
        f"0{number:o}",
        f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{number & 0xFFFF}",
        f"0x{a:x}.0{b:o}.{c}.{d}",
        f"{a}.{b}.{c}.{d}.",
        f"\uff10{a:o}.{b}.{c}.{d}",
    ]


@given(st.integers(0, 2**32 - 1))
def test_the_judge_reads_a_host_as_the_c_library_does(number):
    """Whatever getaddrinfo would connect to was judged, or the URL was refused."""
    for host in written_forms(number):
        try:
            target = judge_url(f"http://{host}/", PUBLIC)
        except UrlRefused:
            continue
        assert target.literal is not None
        found = socket.getaddrinfo(target.host, 80, type=socket.SOCK_STREAM)
        assert {answer[4][0] for answer in found} == {str(target.literal)}
        assert forbidden_reason(target.literal, PUBLIC) is None


@given(st.text(max_size=60))
def test_any_text_is_judged_or_refused_and_what_passes_is_plain_ascii(text):
    for url in (text, f"http://{text}", f"http://example.com/{text}"):
        try:
            target = judge_url(url, PUBLIC)
        except UrlRefused:
            continue
        assert target.url.isascii()
        assert target.url.isprintable()
        assert " " not in target.url
        assert judge_url(target.url, PUBLIC) == target
