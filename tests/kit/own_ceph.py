"""Ceph with one monitor, one store in memory and its S3 gateway, for the tests of S3."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
from tests.kit.processes import free_ports, wait_until

from headrace.engines import launcher

CONFIGURATION: Final = """
[global]
fsid = {fsid}
mon_host = {monitor}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
keyring = /dev/null
ms_mon_client_mode = crc
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
run_dir = {folder}
admin_socket = {folder}/$name.asok
pid_file =
log_file = {folder}/$name.log
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
osd_objectstore = memstore
memstore_device_bytes = 1073741824
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = true
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_enable_usage_log = false
rgw_enable_gc_threads = true
"""


class OwnCeph:
    """The processes of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, monitor, first = free_ports(3)
        self._monitor = f"[v2:127.0.0.1:{monitor},v1:127.0.0.1:{first}]"
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, key: str, secret: str) -> None:
        """Start all, with one user."""
        fsid = str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (self.folder / name).mkdir(parents=True)
        text = CONFIGURATION.format(
            fsid=fsid, monitor=self._monitor, folder=self.folder, port=self.port
        )
        (self.folder / "ceph.conf").write_text(text)
        monmap = str(self.folder / "monmap")
        words = ("--create", "--fsid", fsid, "--addv", "a", self._monitor, monmap)
        self._finish("monmaptool", *words)
        self._finish("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", "/dev/null")
        self._run("ceph-mon", "-f", "-i", "a")
        own = str(uuid.uuid4())
        self._finish("ceph", "--connect-timeout", "60", "osd", "new", own)
        self._finish("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", own)
        self._run("ceph-osd", "-f", "-i", "0")
        user = ("--uid", "tests", "--display-name", "tests")
        user += ("--access-key", key, "--secret-key", secret)
        self._finish("radosgw-admin", "user", "create", *user)
        self._run("radosgw", "-f", "-n", "client.rgw")

        def answers() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{self.port}", timeout=1).status_code < 500
            except httpx.TransportError:
                return False

        wait_until(answers, what="the gateway answers")

    def _finish(self, program: str, *words: str) -> str:
        command = [program, "-c", str(self.folder / "ceph.conf"), *words]
        if program == "monmaptool":
            command = [program, *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, f"{command}: {ended.stderr[-2000:]}"
        return ended.stdout

    def _run(self, program: str, *words: str) -> None:
        bound = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
        bound += [str(int(signal.SIGKILL)), "same", "--", str(shutil.which(program))]
        with (self.folder / f"{program}.out").open("ab") as log:
            self.processes[program] = subprocess.Popen(
                [*bound, "-c", str(self.folder / "ceph.conf"), *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def end(self) -> None:
        """End what runs."""
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()


@contextmanager
def own_ceph(folder: Path, key: str, secret: str) -> Iterator[OwnCeph]:
    """A store that answers S3."""
    ceph = OwnCeph(folder)
    try:
        ceph.start(key, secret)
        yield ceph
    finally:
        ceph.end()
