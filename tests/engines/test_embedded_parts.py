"""The parts of embedded engines that need no engine: settings, folders, locks, paths, leftovers."""

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
from headrace.engines.embedded.process import kill_engine, packaged_file, processes_in
from headrace.engines.embedded.settings import (
    ADDRESS_BYTES_MAX,
    Machine,
    endpoints_of,
    postgres_settings,
    reachable_folder,
    read_machine,
    valkey_settings,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("memory_bytes", "buffers", "valkey_bytes"),
    [(128 * 2**20, "32MB", 64 * 2**20), (4 * GIB, "512MB", GIB), (256 * GIB, "1024MB", 64 * GIB)],
)
def test_settings_follow_the_memory_within_bounds(memory_bytes, buffers, valkey_bytes):
    machine = Machine(memory_bytes, cores=2)
    assert postgres_settings(machine, durable=True)["shared_buffers"] == buffers
    assert valkey_settings(machine, durable=True)["maxmemory"] == str(max(valkey_bytes, 64 * 2**20))


def test_only_engines_that_need_not_be_durable_run_without_syncs():
    machine = Machine(GIB, cores=1)
    durable = postgres_settings(machine, durable=True)
    assert (durable["synchronous_commit"], "fsync" in durable) == ("on", False)
    assert postgres_settings(machine, durable=False)["fsync"] == "off"
    assert valkey_settings(machine, durable=True)["appendfsync"] == "everysec"


def test_the_limit_of_a_cgroup_above_ours_counts(tmp_path):
    group = tmp_path / "sys/fs/cgroup/outer/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("104857600\n")
    assert read_machine(tmp_path).memory_bytes == 104857600
    assert read_machine().memory_bytes > 0


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FolderUnusable, match=r"thesis.tex.*choose an empty"):
        usable_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_our_mark_or_with_just_the_secret_is_accepted(tmp_path):
    (tmp_path / "secret").write_text("made before the engines")
    assert usable_folder(tmp_path) == tmp_path
    (tmp_path / MARKER).write_text("")
    (tmp_path / "postgres").mkdir()
    assert usable_folder(tmp_path) == tmp_path


@pytest.mark.parametrize("path", ["/proc/headrace", "/dev/null", "/dev/null/below", "/tmp/a\nb"])
def test_a_path_that_cannot_be_a_data_folder_is_refused(path):
    with pytest.raises(FolderUnusable, match="data folder"):
        usable_folder(Path(path))


def test_a_path_longer_than_postgresql_holds_is_refused_before_anything_is_made(tmp_path):
    path = tmp_path.joinpath(*["d" * 200] * 5)
    with pytest.raises(FolderUnusable, match="900"):
        usable_folder(path)
    assert not list(tmp_path.iterdir())


def test_one_lock_a_folder_that_anyone_may_ask_about(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert not is_locked(tmp_path)
    first.acquire()
    assert is_locked(tmp_path)
    with pytest.raises(FolderInUse, match=f"{tmp_path}.*process {os.getpid()}"):
        second.acquire()
    child = subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert child.returncode == 0
    first.release()
    assert not is_locked(tmp_path)
    second.acquire()
    second.release()


def test_a_folder_where_nothing_runs_says_how_to_start_it(tmp_path):
    with pytest.raises(NotRunning, match="headrace up"):
        running_endpoints(tmp_path / "never")


def test_a_missing_wheel_names_the_extra():
    with pytest.raises(EngineMissing, match=r"WHEEL\[embedded\]"):
        packaged_file("no_such_wheel", "bin", "postgres")


def test_a_log_over_its_bound_is_put_aside(tmp_path):
    log = tmp_path / "postgres.log"
    rotate_log(log)
    log.write_text("short")
    rotate_log(log)
    assert log.exists()
    os.truncate(log, LOG_BYTES_MAX + 1)
    rotate_log(log)
    assert (log.exists(), (tmp_path / "postgres.log.1").exists()) == (False, True)


def test_a_short_plain_path_is_used_as_it_is(tmp_path):
    run = Path("/tmp/with space/run")
    assert reachable_folder(run) == str(run)
    assert "host=/tmp/with%20space/run&port=5432" in endpoints_of(run.parent).postgres_url


def test_a_long_path_goes_through_a_descriptor_that_follows_the_folder(tmp_path):
    folder = tmp_path / ("n" * ADDRESS_BYTES_MAX)
    folder.mkdir()
    first = reachable_folder(folder)
    assert first.startswith("/proc/self/fd/")
    assert reachable_folder(folder) == first
    folder.rename(tmp_path / "aside")
    folder.mkdir()
    (folder / "new").touch()
    assert (Path(reachable_folder(folder)) / "new").exists()


def test_only_engines_that_work_in_the_folder_are_leftovers(tmp_path):
    folder, elsewhere = tmp_path / "data", tmp_path / "database"
    folder.mkdir()
    elsewhere.mkdir()
    program = tmp_path / "postgres"
    shutil.copy("/bin/sleep", program)
    ours = subprocess.Popen([program, "60"], cwd=folder)
    stranger = subprocess.Popen(["/bin/sleep", "60"], cwd=folder)
    neighbour = subprocess.Popen([program, "60"], cwd=elsewhere)
    try:
        assert wait_until(lambda: processes_in(folder), what="leftover seen") == [ours.pid]
        for process in (ours, stranger, neighbour):
            kill_engine(process.pid, folder)
        assert ours.wait(60) == -9
        assert is_alive(stranger.pid)
        assert is_alive(neighbour.pid)
    finally:
        for process in (ours, stranger, neighbour):
            process.kill()
            process.wait()
