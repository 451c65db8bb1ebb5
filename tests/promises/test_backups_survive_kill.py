"""Backups as an operator uses them: commands, kill -9 at each step, promotion, clear errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.kit.processes import HeadraceProcess, is_alive, wait_until
from tests.kit.site import Site

pytestmark = pytest.mark.slow


class BackedUpSite(Site):
    """A site with an archive; commands may use another data folder."""

    def __init__(self, folder: Path) -> None:
        self.archive = folder / "archive"
        super().__init__(
            folder,
            HEADRACE_BACKUP_URL=self.archive.as_uri(),
            HEADRACE_BACKUP_EVERY="200ms",
        )

    def refused(self, *arguments: str, exit_code: int, **env: str) -> str:
        """The error of a command that must fail."""
        process = HeadraceProcess([*arguments, "--json"], folder=self.folder, env=self.env | env)
        assert process.wait_exit() == exit_code, process.err
        return process.err

    def add(self, text: str) -> int:
        """Enqueue a job for later; an acknowledged one must not be lost."""
        body = {"payload": {"text": text}, "after_s": 3600}
        return self.document("POST", "/v1/queues/notes/jobs", json=body)["ids"][0]

    def is_archived(self) -> bool:
        """Whether everything committed so far is in the archive."""
        [found] = [one for one in self.doctor() if one["subject"] == "backup log"]
        return found["text"] == "all write-ahead log is archived"

    def doctor(self) -> list[dict[str, str]]:
        """The findings about backups."""
        found = self.run("doctor", exit_code=None)["items"]
        return [f for f in found if f["subject"].startswith("backup")]


@pytest.fixture
def backed_up(tmp_path):
    site = BackedUpSite(tmp_path / "site")
    yield site
    site.end()


@pytest.mark.soak
def test_acknowledged_jobs_survive_the_loss_of_the_disk_and_kills_of_each_step(backed_up):
    site, data = backed_up, backed_up.folder / "headrace-data"
    assert "backup.none" in site.refused("backup", "ls", exit_code=4)
    site.up()
    wait_until(lambda: site.process.events("base_backup_taken"), what="the first base backup")
    first = site.add("first")
    crash = {"HEADRACE_CRASH_AT": "backup_piece"}
    site.refused("backup", exit_code=-9, **crash)
    assert len(site.run("backup", "ls")["items"]) == 1, "the killed one does not count"
    taken = site.run("backup")
    last = site.add("last")
    wait_until(site.is_archived, what="the log is archived")
    killed = site.process.kill_all()
    wait_until(lambda: not any(map(is_alive, killed)), what="all are dead")
    shutil.rmtree(data)

    crash = {"HEADRACE_CRASH_AT": "restore_recovery"}
    site.refused("restore", "--data", "half", exit_code=-9, **crash)
    for words in (["up"], ["promote"]):
        assert "restore" in site.refused(*words, "--data", "half", exit_code=2)
    assert "backup.folder_exists" in site.refused("restore", "--data", "half", exit_code=5)
    assert "from" in site.refused("restore", "--data", "a", "--to", "2001-01-01", exit_code=2)
    assert "moment" in site.refused("restore", "--data", "a", "--to", "soon", exit_code=2)
    restored = site.run("restore")
    assert restored["base"] == taken["id"]
    assert "headrace promote" in site.refused("up", exit_code=5)
    site.run("promote")
    site.up()
    assert not site.process.events("host_waits"), "the lost host's agent has no lease"
    for job in (first, last):
        assert site.document("GET", f"/v1/jobs/{job}")["state"] == "scheduled"
    assert site.run("backup", "verify")["rows"] > 0
    wait_until(
        lambda: {finding["state"] for finding in site.doctor()} == {"ok"},
        what="the new primary is backed up",
    )
    metrics = site.call("GET", "/metrics").text
    assert 'backup_archive_lag_seconds{role="up"}' in metrics


@pytest.mark.soak
def test_a_promoted_standby_continues_as_the_site_and_the_former_primary_stops(backed_up):
    site = backed_up
    former = site.up()
    wait_until(lambda: former.events("base_backup_taken"), what="the first base backup")
    arguments = ["standby", "site_for_tests:app", "--json", "--data", "second"]
    crash = {"HEADRACE_CRASH_AT": "standby_promoted"}
    standby = HeadraceProcess(arguments, folder=site.folder, env=site.env | crash)
    try:
        standby.wait_out('"archive":')
        jobs = [site.add(f"job {number}") for number in range(20)]
        wait_until(site.is_archived, what="the log is archived")
        assert site.run("promote")["already"], "the primary stays as it is"
        [found] = [f for f in site.run("doctor", "--data", "second") if f["subject"] == "standby"]
        assert (found["state"], ": 0.0 MiB to replay" in found["text"]) == ("ok", True)
        assert site.run("promote", "--data", "second")["next"] == "headrace standby"
        assert standby.wait_exit() == -9, "killed between the promotion and its last step"
        standby = HeadraceProcess(arguments, folder=site.folder, env=site.env)
        assert former.wait_exit() == 5
        assert "backup.fenced" in former.err
        assert "backup.fenced" in site.refused("up", exit_code=5)
        out = standby.wait_out('"api":')
        site.process = None
        site.facts = json.loads(next(line for line in out.splitlines() if '"api":' in line))
        for job in jobs:
            assert site.document("GET", f"/v1/jobs/{job}")["state"] == "scheduled"
        wait_until(lambda: standby.events("base_backup_taken"), what="generation 2 has a backup")
        assert not standby.events("host_waits"), "the former primary's agent has no lease"
        assert standby.events("base_backup_taken")[-1]["role"] == "up"
        # Also without the archive the former primary does not start.
        nowhere = (site.folder / "other").as_uri()
        assert "backup.fenced" in site.refused("up", exit_code=5, HEADRACE_BACKUP_URL=nowhere)
    finally:
        standby.end()


def test_an_archive_that_is_away_is_reported_and_the_site_continues(backed_up):
    site = backed_up
    site.up()
    wait_until(lambda: site.process.events("base_backup_taken"), what="the first base backup")
    found = site.document("GET", "/v1/backups")
    assert [one["fault"] for one in found["backups"]] == [""]
    assert (found["generation"], found["is_late"], found["verified_at"]) == (1, False, None)
    shutil.move(site.archive, site.folder / "unmounted")
    assert site.call("GET", "/v1/backups").json()["code"] == "backup.unavailable"
    job = site.add("meanwhile")
    wait_until(lambda: site.process.events("log_not_archived"), what="the failure is logged")
    assert "mount its disk" in site.process.events("log_not_archived")[-1]["error"]
    assert [finding["state"] for finding in site.doctor()] == ["fail"]
    assert site.document("GET", f"/v1/jobs/{job}")["state"] == "scheduled"
    assert not site.archive.exists()
    shutil.move(site.folder / "unmounted", site.archive)
    wait_until(site.is_archived, what="the archiver catches up")
    assert site.process.events("role_died") == []


def test_a_standby_that_could_not_be_made_leaves_nothing(tmp_path):
    site, second = Site(tmp_path / "site"), tmp_path / "site" / "second"
    for url, code in [("archive", "backup.none"), ("second/inside", "backup.inside_data")]:
        env = {"HEADRACE_BACKUP_URL": (site.folder / url).as_uri()}
        for _ in range(2):
            arguments = ["standby", "--data", str(second)]
            process = HeadraceProcess(arguments, folder=site.folder, env=env)
            assert process.wait_exit() in (2, 4)
            assert code in process.err
            assert not second.exists()
        second.mkdir()
        process = HeadraceProcess(arguments, folder=site.folder, env=env)
        assert process.wait_exit() in (2, 4)
        assert list(second.iterdir()) == []
        second.rmdir()


def test_each_command_refuses_an_archive_inside_the_data_folder(tmp_path):
    site = Site(tmp_path / "site")
    env = {"HEADRACE_BACKUP_URL": (site.folder / "headrace-data" / "archive").as_uri()}
    for words in ("up", "backup", "backup ls", "backup verify", "restore", "promote", "standby"):
        process = HeadraceProcess(words.split(), folder=site.folder, env=env)
        assert process.wait_exit() == 2, words
        assert "backup.inside_data" in process.err, words


def test_other_servers_and_missing_settings_are_refused_with_the_way_out(tmp_path):
    site = Site(tmp_path / "site")
    site.env["HEADRACE_POSTGRES_URL"] = "postgresql://headrace@db/site"
    refused = HeadraceProcess(["backup"], folder=site.folder, env=site.env)
    assert refused.wait_exit() == 2
    assert "pgBackRest" in refused.err
    for words in (["backup", "ls"], ["restore"], ["standby"], ["promote"]):
        process = HeadraceProcess(words, folder=site.folder, env={})
        assert process.wait_exit() == 2
        assert "HEADRACE_BACKUP_URL" in process.err
