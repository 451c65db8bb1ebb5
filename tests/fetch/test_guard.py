"""The judge: no form of a forbidden address passes, and ordinary URLs do."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from forbidden import FORBIDDEN_ADDRESSES, LOOPBACK_HOSTS, REFUSED_URLS
from hypothesis import given
from hypothesis import strategies as st

from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import Policy, forbidden_reason, judge_url

PUBLIC = Policy()
OPENED = Policy.of(("127.0.0.0/8",), (80, 8080))


@pytest.mark.parametrize("text", FORBIDDEN_ADDRESSES)
def test_a_forbidden_address_is_refused(text):
    assert forbidden_reason(ipaddress.ip_address(text), PUBLIC)
    host = f"[{text}]" if ":" in text else text
    with pytest.raises(UrlRefused) as refused:
        judge_url(f"http://{host}/a.jpg", PUBLIC)
    assert refused.value.reason == "forbidden_address"


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
def test_every_way_to_write_loopback_is_refused(host):
    with pytest.raises(UrlRefused) as refused:
        judge_url(f"http://{host}/a.jpg", PUBLIC)
    assert refused.value.reason == "forbidden_address"


@pytest.mark.parametrize(("url", "reason"), REFUSED_URLS)
def test_an_odd_url_is_refused_with_its_reason(url, reason):
    with pytest.raises(UrlRefused) as refused:
        judge_url(url, PUBLIC)
    assert refused.value.reason == reason
    assert refused.value.code == "fetch.url_refused"


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
        judge_url(f"http://{host}:8080/", OPENED)
    with pytest.raises(UrlRefused):
        judge_url("http://[::1]:8080/", OPENED)
    judge_url("http://[::1]:8080/", Policy.of(("::1/128",), (8080,)))
    with pytest.raises(UrlRefused):
        judge_url("http://10.0.0.1:8080/", OPENED)
    with pytest.raises(UrlRefused):
        judge_url("https://example.com/", OPENED)


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
        f"64:ff9b::{high:x}:{low:x}",
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
