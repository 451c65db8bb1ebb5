"""`headrace size`: rates, costs times rates, and what is exhausted first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli import capacity
from headrace.cli.app_context import CommandLine
from headrace.cli.capacity import (
    InvalidRate,
    Load,
    costs,
    demands,
    machines,
    parse_per_second,
    size,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "per_second"),
    [("150", 150), ("9k/min", 150), ("4M/h", 1111.1), ("350M/day", 4050.9), ("1M/d", 11.574)],
)
def test_rates(text, per_second):
    assert parse_per_second(text) == pytest.approx(per_second, rel=1e-4)


@pytest.mark.parametrize(
    "text", ["", "x", "9k/week", "-1", "nan", "inf", "1e40", "5/month", "k", "5/"]
)
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(InvalidRate):
        parse_per_second(text)


def test_demand_grows_with_rates_and_bulk_calls_cost_less():
    once, ten = (demands(Load(jobs=100.0 * n, pages=5.0 * n), cores=16) for n in (1, 10))
    for small, large in zip(once, ten, strict=True):
        assert large.amount == pytest.approx(10 * small.amount)
    by_name = {one.resource: one.amount for one in ten}
    bulk = {
        one.resource: one.amount for one in demands(Load(jobs=1000, jobs_per_call=1000), cores=16)
    }
    assert bulk["syncs of the log"] < by_name["syncs of the log"] / 5
    assert bulk["CPU of PostgreSQL"] < by_name["CPU of PostgreSQL"]


def test_a_machine_is_added_where_one_does_not_suffice():
    found = demands(Load(jobs=10_000, job_cpu_s=0.01, media_bits=100e9), cores=16)
    needed = machines(found, cores=16, share=0.5)
    assert needed["agents"] >= 100 / 8
    assert needed["media nodes"] == 15
    long = demands(Load(jobs=4_000, job_s=40), cores=16)
    assert machines(long, cores=16, share=0.5)["agents"] == 157
    only_media = machines(demands(Load(media_bits=1e9), cores=16), cores=16, share=0.5)
    assert {kind for kind, count in only_media.items() if count} == {"media nodes"}


def test_the_command_prints_lines_and_json():
    line = CommandLine(lambda _: None, ())
    printed = CliRunner().invoke(size, ["--hits", "100k", "--peak", "2"], obj=line)
    assert printed.exit_code == 0
    assert "exhausted first" in printed.output
    assert printed.output.split()[:10] == (
        ["load", "at", "the", "peak:", "hits", "200,000", "a", "second", "(8,640,000,000", "in"]
    )
    assert "CPU of Valkey" in printed.output
    assert "left out" not in printed.output
    printed = CliRunner().invoke(size, ["--jobs", "4k", "--media", "100Gbit/s"], obj=line)
    assert printed.output.count("\n  ") >= 7
    assert "left out:\n  CPU of your handlers: --job-cpu-ms\n" in printed.output
    line.is_json = True
    value = json.loads(CliRunner().invoke(size, ["--hits", "200k"], obj=line).output)
    assert value["machines"]["Valkey, cores"] > 1


def test_the_costs_are_those_of_the_record():
    command = [sys.executable, "-m", "tools.costs", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert all(value > 0 for cost in costs().values() for value in cost.values())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--jobs", "0"],
        ["--jobs", "1", "--peak", "nan"],
        ["--jobs", "1", "--peak", "inf"],
        ["--photos", "1", "--photo-kb", "nan"],
        ["--photos", "1", "--photo-kb", "0"],
        ["--jobs", "-1"],
        ["--media", "1G", "--hops", "1.5"],
        ["--media", "1G", "--connections", "500k/min"],
        ["--jobs", "1", "--share", "0"],
        ["--media", "1G", "--from-disk", "0.6", "--fills", "0.6"],
    ],
)
def test_what_is_no_load_is_refused(words):
    ran = CliRunner().invoke(size, words, obj=CommandLine(lambda _: None, ()))
    assert getattr(ran.exception, "exit_code", ran.exit_code) == 2, ran.output


def test_ranges_of_disks_and_fills_cost_more_than_those_in_memory(monkeypatch):
    us = {"from memory": 30.0, "from the disk": 90.0, "filled": 300.0, "over HTTPS": 150.0}
    table = {**costs(), **{f"range of 256 KiB {name}": {"CPU": us[name]} for name in us}}
    monkeypatch.setattr(capacity, "costs", lambda: table)

    def cpu_of(*, is_tls=False, **shares):
        shares = {kind.replace("_", " "): share for kind, share in shares.items()}
        load = Load(media_bits=8 * 2**18 * 1e6, media_shares=shares, is_tls=is_tls)
        [found] = [one for one in demands(load, cores=16) if one.resource == "CPU of media nodes"]
        return found.amount

    assert cpu_of() == pytest.approx(30)
    assert cpu_of(from_the_disk=0.5, filled=0.1) == pytest.approx(0.4 * 30 + 0.5 * 90 + 0.1 * 300)
    assert cpu_of(is_tls=True) == pytest.approx(150)


def test_what_is_not_measured_is_shown_as_assumed(monkeypatch):
    line = CommandLine(lambda _: None, ())
    printed = CliRunner().invoke(size, ["--jobs", "100"], obj=line).output
    assert "assumed, not measured: " in printed
    assert "network card, used to 70 %: 10,000,000,000 bit/s" in printed
    line.is_json = True
    value = json.loads(CliRunner().invoke(size, ["--jobs", "100"], obj=line).output)
    states = {one["name"]: one["is_measured"] for one in value["constants"]}
    assert states["network card, used to 70 %"] is False
    assert states["syncs of a disk, one after the other"] is True


def test_growth_follows_the_average_and_not_the_peak():
    growth = [
        [one.amount for one in demands(load, cores=16) if one.unit == "GB/day"]
        for load in (Load(photos=1.0), Load(photos=10.0, peak=10.0))
    ]
    assert growth[0] == pytest.approx(growth[1])
