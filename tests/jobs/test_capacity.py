"""The capacity of a host in slots: the rule, and the readings of the machine."""

from __future__ import annotations

import os

import pytest

from headrace.jobs.agent.capacity import (
    SLOT_BYTES_MIN,
    SlotCpu,
    cores,
    cpu_pressure,
    free_bytes,
    load_per_core,
    pss_bytes,
    slots_that_fit,
)

MB = 2**20
GB = 2**30


@pytest.mark.parametrize(
    ("free", "pss", "slots", "fit"),
    [
        pytest.param(4 * GB, [], 0, 100, id="nothing runs: the least size is assumed"),
        pytest.param(1 * GB, [], 0, 48, id="a gigabyte of which a quarter is reserved"),
        pytest.param(1 * GB, [100 * MB] * 4, 4, 11, id="what the slots have counts as theirs"),
        pytest.param(1 * GB, [100 * MB] * 4, 8, 15, id="slots not read yet have theirs"),
        pytest.param(1 * GB, [1 * MB] * 4, 4, 48, id="a young slot will grow"),
        pytest.param(0, [100 * MB] * 4, 4, 1, id="no memory: the reserve is taken back"),
        pytest.param(0, [], 0, 1, id="never none"),
        pytest.param(64 * GB, [], 0, 100, id="bounded by cores"),
    ],
)
def test_slots_that_fit(free, pss, slots, fit):
    found = slots_that_fit(free, pss, slots=slots, slots_max=100, reserve_bytes=256 * MB)
    assert found == fit


def machine(root, cgroup, files):
    """A machine of 8 GB in a folder."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        pytest.param("0::/\n", {}, 8 * GB, id="no groups at all"),
        pytest.param(
            "0::/pod/slot\n",
            {"pod/slot/memory.max": "max", "pod/slot/memory.current": "5"},
            8 * GB,
            id="no limit",
        ),
        pytest.param(
            "0::/pod/slot\n",
            {
                "pod/slot/memory.max": f"{2 * GB}",
                "pod/slot/memory.current": f"{GB}",
                "pod/slot/memory.stat": f"anon 5\ninactive_file {GB // 2}\n",
            },
            GB + GB // 2,
            id="its own limit; page cache can be had back",
        ),
        pytest.param(
            "0::/pod/slot\n",
            {
                "pod/slot/memory.max": "max",
                "pod/slot/memory.current": "5",
                "pod/memory.max": f"{GB}",
                "pod/memory.current": f"{GB // 4}",
            },
            GB - GB // 4,
            id="the limit of a group around it",
        ),
        pytest.param(
            "0::/pod\n",
            {"pod/memory.max": f"{GB}", "pod/memory.current": f"{2 * GB}"},
            0,
            id="over its limit",
        ),
        pytest.param(
            "4:memory:/docker/x\n0::/\n",
            {
                "memory/docker/x/memory.limit_in_bytes": f"{GB}",
                "memory/docker/x/memory.usage_in_bytes": f"{GB // 2}",
                "memory/docker/x/memory.stat": "total_inactive_file 0\n",
            },
            GB // 2,
            id="the first version",
        ),
        pytest.param(
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712"},
            8 * GB,
            id="the first version without a limit",
        ),
    ],
)
def test_free_memory_is_within_the_groups_limit(tmp_path, cgroup, files, free):
    assert free_bytes(machine(tmp_path, cgroup, files)) == free


def test_this_machine_can_be_read():
    assert free_bytes() > SLOT_BYTES_MIN
    assert load_per_core() >= 0
    assert pss_bytes(os.getpid()) > MB
    assert pss_bytes(2**22 + 1) is None


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        pytest.param("0::/\n", {}, None, id="no groups"),
        pytest.param("0::/pod\n", {"pod/cpu.max": "max 100000"}, None, id="no quota"),
        pytest.param("0::/pod\n", {"pod/cpu.max": "50000 100000"}, 1, id="half a core"),
        pytest.param(
            "0::/pod/slot\n",
            {"pod/slot/cpu.max": "max 100000", "pod/cpu.max": "100000 100000"},
            1,
            id="of a group around it",
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/x\n",
            {"cpu/docker/x/cpu.cfs_quota_us": "100000", "cpu/docker/x/cpu.cfs_period_us": "100000"},
            1,
            id="version 1",
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/x\n",
            {"cpu/docker/x/cpu.cfs_quota_us": "-1", "cpu/docker/x/cpu.cfs_period_us": "100000"},
            None,
            id="version 1 without a quota",
        ),
    ],
)
def test_cores_are_within_the_quota_of_the_group(tmp_path, cgroup, files, quota):
    available = len(os.sched_getaffinity(0))
    assert cores(machine(tmp_path, cgroup, files)) == min(available, quota or available)


@pytest.mark.parametrize(
    ("cgroup", "files", "is_measured", "pressure"),
    [
        pytest.param("0::/pod\n", {"pod/cpu.pressure": 85}, True, 0.85, id="of the group"),
        pytest.param("0::/pod\n", {}, True, 0.07, id="of the machine"),
        pytest.param("4:cpu,cpuacct:/x\n", {}, True, 0.07, id="version 1: of the machine"),
        pytest.param("0::/pod\n", {}, False, 0.0, id="not measured"),
    ],
)
def test_pressure_is_that_of_the_group(tmp_path, cgroup, files, is_measured, pressure):
    psi = (
        "some avg10=1.00 avg60={}.00 avg300=2.00 total=9\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    root = machine(tmp_path, cgroup, {name: psi.format(share) for name, share in files.items()})
    if is_measured:
        (root / "proc" / "pressure").mkdir()
        (root / "proc" / "pressure" / "cpu").write_text(psi.format(7))
    assert cpu_pressure(root) == pressure


def test_cores_that_processes_used():
    measured = SlotCpu()
    measured.cores_used([os.getpid()])
    sum(range(6_000_000))
    assert 0 < measured.cores_used([os.getpid(), 2**22 + 1]) <= os.cpu_count()
