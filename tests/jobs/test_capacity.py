"""How many slots a host can hold: the rule, and what it reads of the machine."""

from __future__ import annotations

import os

import pytest

from penstock.jobs.agent.capacity import (
    SLOT_BYTES_MIN,
    HostState,
    free_bytes,
    load_per_core,
    pss_bytes,
    slots_that_fit,
)

MB = 2**20
GB = 2**30


@pytest.mark.parametrize(
    ("free", "pss", "slots", "load", "fit"),
    [
        pytest.param(4 * GB, [], 0, 0.0, 100, id="nothing runs: the least size is assumed"),
        pytest.param(1 * GB, [], 0, 0.0, 48, id="a gigabyte of which a quarter is reserved"),
        pytest.param(1 * GB, [100 * MB] * 4, 4, 0.0, 11, id="what the slots have counts as theirs"),
        pytest.param(1 * GB, [100 * MB] * 4, 8, 0.0, 15, id="slots not read yet have theirs"),
        pytest.param(1 * GB, [1 * MB] * 4, 4, 0.0, 48, id="a young slot will grow"),
        pytest.param(0, [100 * MB] * 4, 4, 0.0, 1, id="no memory: the reserve is taken back"),
        pytest.param(0, [], 0, 0.0, 1, id="never none"),
        pytest.param(64 * GB, [], 0, 0.0, 100, id="bounded by cores"),
        pytest.param(64 * GB, [20 * MB] * 9, 9, 4.5, 9, id="overloaded: none is added"),
        pytest.param(64 * GB, [20 * MB] * 3, 3, 4.5, 4, id="overloaded: but the floating ones"),
        pytest.param(64 * GB, [20 * MB] * 3, 3, 3.5, 100, id="busy is not overloaded"),
    ],
)
def test_slots_that_fit(free, pss, slots, load, fit):
    state = HostState(
        free_bytes=free, pss_bytes=dict(enumerate(pss)), slots=slots, cores=2, load_per_core=load
    )
    assert slots_that_fit(state, reserve_bytes=256 * MB, slots_per_core=50, floats=4) == fit


def test_more_memory_never_means_fewer_slots():
    fits = [
        slots_that_fit(
            HostState(
                free_bytes=free * 64 * MB,
                pss_bytes={0: 70 * MB},
                slots=1,
                cores=8,
                load_per_core=1.0,
            ),
            reserve_bytes=256 * MB,
            slots_per_core=64,
            floats=4,
        )
        for free in range(200)
    ]
    assert fits == sorted(fits)


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
