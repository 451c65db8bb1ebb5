"""Settings that cannot work are refused at the start, each with the expected value."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.kit.certificates import EXPIRED, self_signed_files

from headrace.kernel.config import InvalidConfig, load_config
from headrace.media.cluster.membership import InvalidNode
from headrace.media.model import MediaConfig, parse_origins
from headrace.media.worker.supervisor import require_servable


def config_of(**settings: str) -> MediaConfig:
    flags = {f"media.{name}": text for name, text in settings.items()}
    return load_config({"media": MediaConfig}, env={}, flags=flags).section(MediaConfig)


@pytest.mark.parametrize(
    ("setting", "text", "expected"),
    [
        ("connections_max", "0", "from 1 to"),
        ("send_timeout", "0s", "above zero"),
        ("header_timeout", "0ms", "above zero"),
        ("workers", "100000", "from 0 to 64"),
        ("replicas", "9", "from 0 to 8"),
        ("weight", "0", "from 0.01 to 100"),
        ("node", "a b", "A-Z a-z 0-9 . _ -"),
        ("upstream", "https://a.example/m", "without a path"),
        ("upstream", "http://a.example, http://A.example/", "different URLs"),
        ("upstream_secret", "short", "32 characters"),
        ("preferred_url", "https://media.example.com/{name}", "in its host"),
        ("preferred_url", "http://[", "in its host"),
        ("disks", "/var/cache/a:1KiB", "from 16MiB to 256TiB"),
        ("disks", "/var/cache/a:900TiB", "from 16MiB to 256TiB"),
    ],
)
def test_an_invalid_value_is_refused_where_it_is_read(setting, text, expected):
    with pytest.raises(InvalidConfig, match=setting.replace("_", "-")) as refused:
        config_of(**{setting: text})
    assert expected in refused.value.text


def test_values_at_the_bounds_are_accepted():
    config = config_of(
        connections_max="1",
        workers="64",
        replicas="8",
        weight="0.01",
        node="a.b_c-9",
        disks="/a:16MiB, /b:256TiB",
        stop_timeout="0s",
    )
    assert (config.connections_max, config.workers, config.replicas) == (1, 64, 8)
    require_servable(config)


def test_https_needs_a_certificate_that_can_be_read(tmp_path: Path):
    names = ("tls_cert", "tls_key")
    cert, key = self_signed_files(tmp_path)
    require_servable(config_of(listen_tls="127.0.0.1:0", tls_cert=cert, tls_key=key))
    text, locked = f"{tmp_path}/text.pem", f"{tmp_path}/locked.pem"
    Path(text).write_text("no certificate")
    Path(locked).write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "other").mkdir()
    old = dict(zip(names, self_signed_files(tmp_path / "old", valid_days=EXPIRED), strict=True))
    other = self_signed_files(tmp_path / "other")[1]
    for files, expected in (
        ({}, "got none"),
        (old, "expired"),
        ({"tls_cert": cert, "tls_key": other}, "key values mismatch"),
        ({"tls_cert": "/nope", "tls_key": key}, "cannot read /nope: No such file or directory"),
        ({"tls_cert": cert, "tls_key": "/nope"}, "cannot read /nope: No such file or directory"),
        ({"tls_cert": str(tmp_path), "tls_key": key}, f"cannot read {tmp_path}: Is a directory"),
        ({"tls_cert": text}, "text.pem contains no certificate in PEM format"),
        ({"tls_cert": cert}, "cert.pem contains no private key in PEM format"),
        ({"tls_cert": cert, "tls_key": text}, "text.pem contains no private key in PEM format"),
        ({"tls_cert": cert, "tls_key": locked}, f"the private key in {locked} has a password"),
    ):
        with pytest.raises(InvalidConfig, match=r"media\.tls_cert") as refused:
            require_servable(config_of(listen_tls="127.0.0.1:0", **files))
        assert expected in refused.value.text


def test_a_disk_is_a_folder_or_a_device_and_a_missing_one_is_no_fault(tmp_path: Path):
    away = tmp_path / "away"
    require_servable(config_of(disks=f"{tmp_path}:16MiB, {away}:16MiB"))
    with pytest.raises(InvalidConfig, match="a folder or a block device") as refused:
        require_servable(config_of(disks="/etc/passwd:16MiB, /dev/null:16MiB"))
    assert "/etc/passwd" in refused.value.text
    assert "/dev/null" in refused.value.text


def test_a_site_of_another_cluster_makes_no_variants():
    require_servable(config_of(upstream="http://127.0.0.1:1"))
    with pytest.raises(
        InvalidConfig, match=r"media\.variants: expected unset, since media.upstream"
    ):
        require_servable(config_of(upstream="http://127.0.0.1:1", variants="320"))


def test_a_node_that_others_could_not_reach_is_refused():
    with pytest.raises(InvalidNode, match=r"media\.advertise"):
        require_servable(config_of(node="n1", listen="0.0.0.0:8081"))
    require_servable(config_of(node="n1", listen="0.0.0.0:8081", advertise="10.0.0.1:8081"))


@pytest.mark.slow
def test_the_command_ends_with_2_and_no_traceback(tmp_path: Path):
    environment = os.environ | {
        "HEADRACE_DATA_FOLDER": str(tmp_path),
        "HEADRACE_MEDIA_LISTEN": "127.0.0.1:0",
        "HEADRACE_MEDIA_LISTEN_TLS": "127.0.0.1:0",
        "HEADRACE_MEDIA_TLS_CERT": "/nope",
    }
    command = [sys.executable, "-m", "headrace", "media", "serve"]
    ended = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2, ended.stderr
    assert "invalid_config" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("*", ("*",)),
        (" https://A.example ,http://[::1]:3000", ("https://a.example", "http://[::1]:3000")),
    ],
)
def test_origins_are_parsed(text, found):
    assert parse_origins(text) == found


@pytest.mark.parametrize(
    "text",
    ["*, https://a.example", "https://a.example/", "a.example", "null", "https://a.example:0"],
)
def test_invalid_origins_are_refused(text):
    with pytest.raises(ValueError, match="origins without a path"):
        parse_origins(text)
