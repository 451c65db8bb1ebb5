"""Listening sockets of several workers, and the numbers of clients and workers."""

from __future__ import annotations

import resource
import socket
import struct

import pytest

from headrace.media.errors import ListenFailed
from headrace.media.model import MediaConfig
from headrace.media.worker.socket_io import (
    Channel,
    clients_per_process,
    connections_of_worker,
    listening_sockets,
    workers_wanted,
)


def close_all(listeners) -> None:
    for listener in listeners:
        listener.close()


def test_workers_share_one_port_exclusively():
    first = listening_sockets(("127.0.0.1", 0), 3, "media.listen")
    ports = {listener.getsockname()[1] for listener in first}
    assert len(ports) == 1
    with pytest.raises(ListenFailed, match=r"choose another media\.listen"):
        listening_sockets(("127.0.0.1", ports.pop()), 2, "media.listen")
    close_all(first)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ListenFailed, match=r"cannot listen on 192\.0\.2\.1:0"):
        listening_sockets(("192.0.2.1", 0), 1, "media.listen")


@pytest.mark.parametrize(
    ("settings", "cores", "files_max", "expected"),
    [
        ({}, 4, 20_000, 4),
        ({"workers": 3}, 4, 20_000, 3),
        ({"workers": 500}, 4, 20_000, 64),
        ({"connections_max": 100_000}, 2, 20_000, 7),
        ({"connections_max": 100_000}, 2, resource.RLIM_INFINITY, 2),
        ({"connections_max": 10}, 2, 1024, 2),
    ],
)
def test_workers_follow_the_cores_and_the_limit_of_files(settings, cores, files_max, expected):
    config = MediaConfig(**settings)
    found = workers_wanted(config, cores=cores, files_max=files_max, files_per_client=1)
    assert found == expected


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_all_workers_together_hold_the_configured_number(workers):
    share = connections_of_worker(
        100_000, workers=workers, files_max=resource.RLIM_INFINITY, files_per_client=1
    )
    assert share * workers >= 100_000
    assert workers > 1 or share == 100_000


def test_the_limit_of_files_lowers_it():
    assert clients_per_process(1024, files_per_client=2) == 448
    assert clients_per_process(10_128, files_per_client=2) == 5_000
    assert clients_per_process(10, files_per_client=1) == 16
    assert connections_of_worker(4096, workers=1, files_max=1024, files_per_client=2) == 448


def test_a_client_that_is_gone_has_no_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
        assert Channel(served).peer() == "127.0.0.1"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with pytest.raises(ConnectionResetError):
            served.recv(1)
        assert Channel(served).peer() == ""
        served.close()
