"""Configuration: sources in their order, units, and all faults at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace.engines.blobs import BlobsConfig
from headrace.engines.postgres import PostgresConfig
from headrace.engines.valkey import ValkeyConfig
from headrace.kernel import config
from headrace.kernel.config import InvalidConfig, load_config, setting


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    lease_s: float = setting("30s", "How long a lease lasts.", config.parse_duration_s)
    body_bytes: int = setting("64KiB", "Largest body.", config.parse_size_bytes)
    url: str | None = setting(None, "Where it is.", config.parse_url("valkey"), secret=True)
    ports: tuple[int, ...] = setting("80, 443", "Ports.", config.parse_ports)


SECTIONS = {"queue": QueueConfig}


def load(*, env=None, file=None, flags=None):
    return load_config(SECTIONS, env=env or {}, file=file, flags=flags)


def test_defaults_are_parsed_and_named_as_such():
    loaded = load()
    assert loaded.section(QueueConfig) == QueueConfig(
        lease_s=30.0, body_bytes=65536, url=None, ports=(80, 443)
    )
    assert loaded.written["queue.lease"] == ("30s", "default")


def test_a_flag_wins_over_the_environment_over_the_file(tmp_path):
    file = tmp_path / "headrace.toml"
    file.write_text('[queue]\nlease = "1s"\nbody = "1KiB"\nports = [8080]\n')
    env = {"HEADRACE_QUEUE_LEASE": "2s", "HEADRACE_QUEUE_BODY": "2KiB", "HOME": "/nowhere"}
    loaded = load(env=env, file=file, flags={"queue.lease": "3s"})
    assert loaded.section(QueueConfig).lease_s == 3.0
    assert loaded.section(QueueConfig).body_bytes == 2048
    assert loaded.section(QueueConfig).ports == (8080,)
    assert loaded.written["queue.body"] == ("2KiB", "HEADRACE_QUEUE_BODY")
    assert loaded.written["queue.ports"] == ("8080", str(file))


def test_every_fault_is_reported_and_no_secret(tmp_path):
    file = tmp_path / "headrace.toml"
    file.write_text('[queue]\nlease = "soon"\nleese = "1s"\n')
    env = {"HEADRACE_QUEUE_URL": "http://user:hunter2@host", "HEADRACE_QUEUE_LEESE": "1s"}
    with pytest.raises(InvalidConfig) as raised:
        load(env=env, file=file, flags={"queue.body": "much"})
    text = str(raised.value)
    assert "expected a duration such as 30s, 10m or 2h, got 'soon'" in text
    assert "did you mean queue.lease?" in text
    assert "did you mean HEADRACE_QUEUE_LEASE?" in text
    assert "--body: expected a size such as 64KiB or 25MiB, got 'much'" in text
    assert "HEADRACE_QUEUE_URL: expected a URL starting with valkey://" in text
    assert "hunter2" not in text
    assert len(raised.value.problems) == 5


WRONG_URLS = {
    "postgres//user:hunter2@host/db": "'postgres//user:(masked)@host/db', which has no \":\"",
    "postgres//user@host/db": "'postgres//user@host/db', which has no \":\" after postgres",
    "postgres:/user:hunter2@host/db": 'a hidden value without "://"',
    "user:hunter2@host/db": 'a hidden value without "://"',
    "postgres://user:hunter2/x@host/db": "'postgres://user:(masked)@host/db'",
    "postgres://user:2/hunter2@host/db": "'postgres://user:(masked)@host/db'",
    "postgres://user:2#hunter2@host/db": "'postgres://user:(masked)@host/db'",
    "postgres://user:2@hunter2?@host/db": "'postgres://user:(masked)@host/db'",
    "postgres://user:hunter2": "'postgres://user:(masked)'",
    "postgres://user:hunter2/x": "'postgres://user:(masked)'",
    "postgres://me:hunter2@host:99999/db": "'postgres://me:(masked)@host:99999/db'",
    "postgres://me:hunter2@host/db?foo=1": "'postgres://me:(masked)@host/db?foo=1'",
    "postgres://host/db?password=a&hunter2": "'postgres://host/db?password=(masked)'",
    "postgres://host/db?password=a&hunter2=b": "'postgres://host/db?password=(masked)'",
    "postgres://host/db?password=a@hunter2": "'postgres://(masked)'",
    "mysql://user:hunter2@host/db": "a URL starting with mysql://",
}


@pytest.mark.parametrize("url", WRONG_URLS)
def test_a_wrong_url_is_shown_without_its_password(url):
    sections = {"postgres": PostgresConfig}
    with pytest.raises(InvalidConfig) as raised:
        config.load_config(sections, env={"HEADRACE_POSTGRES_URL": url})
    assert WRONG_URLS[url] in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_wrong_urls_of_the_other_engines_are_shown_without_their_secrets():
    sections = {"valkey": ValkeyConfig, "blobs": BlobsConfig}
    env = {
        "HEADRACE_VALKEY_URL": "redis//:hunter2@host",
        "HEADRACE_BLOBS_URL": "s3//KEY:hunter2@bucket",
    }
    with pytest.raises(InvalidConfig) as raised:
        config.load_config(sections, env=env)
    texts = [one.text for one in raised.value.problems]
    assert texts[0].endswith("""got 'redis//:(masked)@host', which has no ":" after redis""")
    assert texts[1].endswith("""got 's3//(masked)@bucket', which has no ":" after s3""")


def test_a_url_with_a_user_that_would_not_be_sent_is_refused():
    for url in ("http://bob:secret@host/hook", "https://bob@host", "http://@host"):
        with pytest.raises(ValueError, match="without user and password"):
            config.parse_url("http", "https", takes_user=False)(url)
    assert config.parse_url("http", takes_user=False)("http://host/a@b") == "http://host/a@b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://db/x?sslmod=require", "'sslmod'; known are application_name, "),
        ("postgresql://db/x?connect_timeout=3", "'connect_timeout'; known are "),
        ("postgresql://me:pa?ss=w@db/x", "%3F"),
        ("postgresql://db/x?sslmode", "sslmode=VALUE"),
        ("postgresql://db/x?sslmode=requir", "sslmode=disable, allow"),
        ("postgresql://a:1,b:54x22/x", "ports are numbers"),
        ("file://var/lib/blobs", "file:///var/lib/blobs"),
        ("s3://bucket/prefix?region=us-east-1", "'region'; none is known"),
        ("file:///folder?mode=7", "'mode'; none is known"),
    ],
)
def test_an_unknown_parameter_of_an_engine_is_named(text, expected):
    with pytest.raises(ValueError, match="a URL") as refused:
        config.parse_url("postgresql", "s3", "file")(text)
    assert expected in str(refused.value)
    assert "w@db" not in str(refused.value)
    for good in (
        "postgresql://db/x?host=/run&sslmode=require&options=-c%20a%3Db",
        "http://h?any=1",
    ):
        assert config.parse_url("postgresql", "http")(good) == good


def test_a_file_that_was_named_must_be_there(tmp_path):
    with pytest.raises(InvalidConfig, match="no such file: correct --config"):
        load(file=tmp_path / "absent.toml")


def test_durations_ports_and_addresses():
    seconds = {"250ms": 0.25, "30s": 30, "1.5m": 90, "2h": 7200, "7d": 604800}
    assert {text: config.parse_duration_s(text) for text in seconds} == seconds
    assert config.parse_listen("127.0.0.1:8080") == ("127.0.0.1", 8080)
    assert config.parse_listen("[::1]:0") == ("::1", 0)
    for parse, match, texts in (
        (config.parse_duration_s, "duration such as", "|30|s|-1s|1 week|1e3s|٣s"),
        (config.parse_ports, "ports such as", "0|80-70|65536|http|80;443"),
        (config.parse_listen, "address and a port", "8080|:8080|host:|host:99999"),
    ):
        for text in texts.split("|"):
            with pytest.raises(ValueError, match=match):
                parse(text)


@pytest.mark.parametrize(
    ("schemes", "text"),
    [
        (("s3", "file"), "s3://"),
        (("s3", "file"), "s3:///prefix"),
        (("s3", "file"), "file://"),
        (("s3", "file"), "file://folder"),
        (("valkey",), "valkey://h:abc"),
        (("postgresql",), "postgresql://h:99999/x"),
        (("http",), "ftp://h"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(schemes, text):
    with pytest.raises(ValueError, match="a URL"):
        config.parse_url(*schemes)(text)
    assert (
        config.parse_url("postgresql")("postgresql:///x?host=/run") == "postgresql:///x?host=/run"
    )


def test_a_file_nested_too_deeply_is_unreadable(tmp_path):
    file = tmp_path / "headrace.toml"
    for text in ("a = " + "[" * 5000, "a = " + "{a=" * 5000):
        file.write_text(text)
        with pytest.raises(InvalidConfig, match="expected a TOML file"):
            load_config(SECTIONS, env={}, file=file)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (config.parse_size_bytes, "9" * 5000 + "MiB", "a size such as"),
        (config.parse_duration_s, "9" * 5000 + "s", "a duration such as"),
        (config.parse_duration_s, "9" * 400 + "s", "a duration such as"),
        (config.parse_url("http", "https"), "http://[", "a URL with an IPv6 address"),
        (config.parse_url("http", "https"), "http://[a]", "a URL with an IPv6 address"),
    ],
)
def test_an_error_names_what_is_expected_and_never_an_error_of_python(parse, text, expected):
    with pytest.raises(ValueError, match=expected):
        parse(text)
