"""Embedded engines without an engine: settings, folders, locks, paths, leftover processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.processes import is_alive, wait_until

from headrace.engines.embedded import (
    EngineMissing,
    FolderInUse,
    FolderUnusable,
    NotRunning,
    running_endpoints,
)
from headrace.engines.embedded.data_folder import (
    LOG_BYTES_MAX,
    MARKER,
    FolderLock,
    is_locked,
    rotate_log,
    usable_folder,
)
from headrace.engines.embedded.process import kill_engine, processes_in
from headrace.engines.embedded.programs import packaged_file
from headrace.engines.embedded.settings import (
    ADDRESS_BYTES_MAX,
    Machine,
    endpoints_of,
    postgres_settings,
    reachable_folder,
    read_machine,
    valkey_settings,
)

GIB, MIB = 2**30, 2**20


def test_settings_follow_memory_and_durability(tmp_path):
    for memory_bytes, buffers, valkey_bytes in (
        (128 * MIB, "32MB", 64 * MIB),
        (4 * GIB, "512MB", GIB),
        (256 * GIB, "1024MB", 64 * GIB),
    ):
        machine = Machine(memory_bytes, cores=2)
        assert postgres_settings(machine, durable=True)["shared_buffers"] == buffers
        assert valkey_settings(machine, durable=True)["maxmemory"] == str(valkey_bytes)
    durable = postgres_settings(machine, durable=True)
    assert (durable["synchronous_commit"], "fsync" in durable) == ("on", False)
    assert postgres_settings(machine, durable=False)["fsync"] == "off"
    assert valkey_settings(machine, durable=True)["appendfsync"] == "everysec"
    group = tmp_path / "sys/fs/cgroup/outer/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("104857600\n")
    assert read_machine(tmp_path).memory_bytes == 104857600, "the limit of an outer cgroup"
    assert read_machine().memory_bytes > 0


def test_only_an_own_or_empty_folder_is_used(tmp_path):
    (tmp_path / "secret").write_text("created before the engines")
    assert usable_folder(tmp_path) == tmp_path
    (tmp_path / MARKER).write_text("")
    (tmp_path / "postgres").mkdir()
    assert usable_folder(tmp_path) == tmp_path
    other, long = tmp_path / "other", tmp_path.joinpath(*["d" * 200] * 5)
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    for path, match in (
        (other, r"thesis.tex.*choose an empty"),
        (long, "900"),
        *(
            (Path(path), "data folder")
            for path in ("/proc/headrace", "/dev/null", "/dev/null/below", "/tmp/a\nb")
        ),
    ):
        with pytest.raises(FolderUnusable, match=match):
            usable_folder(path)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    assert not long.parents[3].exists()


def test_a_folder_has_one_lock_that_any_process_can_check(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert not is_locked(tmp_path)
    first.acquire()
    assert is_locked(tmp_path)
    with pytest.raises(FolderInUse, match=f"{tmp_path}.*process {os.getpid()}"):
        second.acquire()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    first.release()
    assert not is_locked(tmp_path)
    second.acquire()
    second.release()


def test_errors_name_the_command_or_the_extra(tmp_path):
    with pytest.raises(NotRunning, match="headrace up"):
        running_endpoints(tmp_path / "never")
    with pytest.raises(EngineMissing, match=r"WHEEL\[embedded\]"):
        packaged_file("no_such_wheel", "bin", "postgres")


def test_a_log_over_its_limit_is_rotated(tmp_path):
    log = tmp_path / "postgres.log"
    rotate_log(log)
    log.write_text("short")
    rotate_log(log)
    assert log.exists()
    os.truncate(log, LOG_BYTES_MAX + 1)
    rotate_log(log)
    assert (log.exists(), (tmp_path / "postgres.log.1").exists()) == (False, True)


def test_a_long_path_is_reached_through_a_descriptor_that_follows_the_folder(tmp_path):
    run = Path("/tmp/with space/run")
    assert reachable_folder(run) == str(run)
    assert "host=/tmp/with%20space/run&port=5432" in endpoints_of(run.parent).postgres_url
    folder = tmp_path / ("n" * ADDRESS_BYTES_MAX)
    folder.mkdir()
    first = reachable_folder(folder)
    assert first.startswith("/proc/self/fd/")
    assert reachable_folder(folder) == first
    folder.rename(tmp_path / "aside")
    folder.mkdir()
    (folder / "new").touch()
    assert (Path(reachable_folder(folder)) / "new").exists()


def test_only_engines_of_the_folder_are_killed_as_leftovers(tmp_path):
    folder, elsewhere = tmp_path / "data", tmp_path / "database"
    folder.mkdir()
    elsewhere.mkdir()
    program = tmp_path / "postgres"
    shutil.copy("/bin/sleep", program)
    ours, *others = [
        subprocess.Popen([name, "60"], cwd=place)
        for name, place in ((program, folder), ("/bin/sleep", folder), (program, elsewhere))
    ]
    try:
        assert wait_until(lambda: processes_in(folder), what="leftover seen") == [ours.pid]
        for process in (ours, *others):
            kill_engine(process.pid, folder)
        assert ours.wait(60) == -9
        assert all(is_alive(process.pid) for process in others)
    finally:
        for process in (ours, *others):
            process.kill()
            process.wait()
