"""`headrace size`: rates, costs times rates, and what is exhausted first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

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
    [("150", 150), ("9k/min", 150), ("4M/h", 1111.1), ("350M/d", 4050.9), ("0.5/s", 0.5)],
)
def test_rates(text, per_second):
    assert parse_per_second(text) == pytest.approx(per_second, rel=1e-4)


@pytest.mark.parametrize("text", ["", "x", "9k/week", "-1", "nan", "inf", "1e40", "5/month", "k"])
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


def test_the_command_prints_lines_and_json():
    line = CommandLine(lambda _: None, ())
    printed = CliRunner().invoke(size, ["--hits", "100k", "--peak", "2"], obj=line)
    assert printed.exit_code == 0
    assert "exhausted first" in printed.output
    assert "CPU of Valkey" in printed.output
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
        ["--jobs", "1", "--share", "0"],
    ],
)
def test_what_is_no_load_is_refused(words):
    ran = CliRunner().invoke(size, words, obj=CommandLine(lambda _: None, ()))
    assert getattr(ran.exception, "exit_code", ran.exit_code) == 2, ran.output


def test_growth_follows_the_average_and_not_the_peak():
    growth = [
        [one.amount for one in demands(load, cores=16) if one.unit == "GB/day"]
        for load in (Load(photos=1.0), Load(photos=10.0, peak=10.0))
    ]
    assert growth[0] == pytest.approx(growth[1])
