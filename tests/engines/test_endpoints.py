"""URLs as people may see them: which server, and never a password, however the URL is written."""

from __future__ import annotations

import os

import pytest

from headrace.engines.endpoints import (
    masked_text,
    masked_url,
    parse_valkey_url,
    seeds_of,
    server_of,
)


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("postgresql://me:hunter2@db/site", "db:5432"),
        ("postgresql://me:hunter2@db:6000/site", "db:6000"),
        ("postgresql://me:hunter2@[::1]:6000/site", "[::1]:6000"),
        ("postgresql://me:hunter2@one:1,two:2/site", "one:1,two:2"),
        ("postgresql://me@/site?host=/run/pg&password=hunter2", "/run/pg/.s.PGSQL.5432"),
        ("postgresql://me@/site?host=db&port=6000", "db:6000"),
        ("postgresql:///site", "the configured address"),
        ("valkey://:hunter2@cache/0", "cache:5432"),
        ("unix:///run/my%20valkey/valkey.sock?db=0", "/run/my valkey/valkey.sock"),
        ("postgresql://me:hun/ter2@db/site", "the configured address"),
        ("postgresql://me:hun#ter2@db/site", "the configured address"),
        ("postgresql://me:hun?ter2@db/site", "the configured address"),
        ("postgresql://me:hun@ter2@db/site", "the configured address"),
        ("postgresql://[me:hunter2@db/site", "the configured address"),
    ],
)
def test_a_server_is_named_without_user_and_password(url, server):
    assert server_of(url, port=5432, socket=".s.PGSQL.5432") == server


def test_a_socket_behind_a_descriptor_is_named_by_its_path(tmp_path):
    descriptor = os.open(tmp_path, os.O_PATH)
    url = f"postgresql://headrace@/headrace?host=/proc/self/fd/{descriptor}"
    assert server_of(url, port=5432, socket="s") == f"{tmp_path}/s"
    os.close(descriptor)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:hunter2@db/site", "postgresql://me:(masked)@db/site"),
        ("postgresql://me@db:6000/site?sslmode=require", None),
        ("postgresql://me@db/site?password=hunter2", "postgresql://me@db/site?password=(masked)"),
        ("redis://:hunter2@cache:6379/1", "redis://:(masked)@cache:6379/1"),
        (
            "postgresql://me@db/site?pass%77ord=hunter2",
            "postgresql://me@db/site?pass%77ord=(masked)",
        ),
        (
            "postgresql://me@db/site?PGAUTH=hunter2&a=1",
            "postgresql://me@db/site?PGAUTH=(masked)&a=1",
        ),
        ("s3://AKIA:hunter2@bucket/prefix", "s3://(masked)@bucket/prefix"),
        ("s3://AKIA@bucket/prefix", "s3://(masked)@bucket/prefix"),
        ("https://hooks.example/services/T0/hunter2", "https://hooks.example/(masked)"),
        ("https://hooks.example/?x=hunter2", "https://hooks.example/(masked)"),
        ("https://hunter2@hooks.example/", "https://(masked)@hooks.example/"),
        ("https://hooks.example", "https://hooks.example/"),
        ("file:///srv/a@b#c", None),
        ("s3://bucket/prefix", None),
        ("s3://bucket?secret_access_key=hunter2", "s3://bucket?secret_access_key=(masked)"),
        ("postgresql://me:hun/ter2@db/site", "(masked)"),
        ("postgresql://me:hun#ter2@db/site", "(masked)"),
        ("postgresql://me:hun#ter2", "(masked)"),
        ("postgresql://me:hun@ter2@db/site", "(masked)"),
        ("hunter2", "(masked)"),
    ],
)
def test_of_a_url_only_the_password_is_masked(text, shown):
    assert masked_url(text) == (shown or text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HeadraceFetch/0.1 (+https://example.org/about)", None),
        ("https://me:hunter2@cdn.example/m", "https://(masked)@cdn.example/m"),
        (
            "a https://x/?token=hunter2, redis://:hunter2@c/0",
            "a https://x/?token=(masked), redis://:(masked)@c/0",
        ),
        ("127.0.0.1:8080", None),
    ],
)
def test_urls_within_a_text_are_masked_too(text, shown):
    assert masked_text(text) == (shown or text)


def test_a_valkey_url_may_name_several_nodes():
    url = parse_valkey_url("valkeys://me:pw@a:1,[::1]:2,c/3?timeout=1")
    assert seeds_of(url) == [
        "valkeys://me:pw@a:1/3?timeout=1",
        "valkeys://me:pw@[::1]:2/3?timeout=1",
        "valkeys://me:pw@c/3?timeout=1",
    ]
    assert seeds_of("unix:///run/a,b") == ["unix:///run/a,b"]
    assert masked_url("valkey://me:pw@a:1,b:2") == "valkey://me:(masked)@a:1,b:2"


@pytest.mark.parametrize("places", ["a:1,", ",a:1", "a:1,,b", "a:x,b", "a b,c"])
def test_a_valkey_url_with_a_node_that_is_none_is_refused(places):
    with pytest.raises(ValueError, match="nodes"):
        parse_valkey_url(f"valkey://{places}")
