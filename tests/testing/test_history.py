"""Histories of several processes, one of which is killed while it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.kit.history import Recorder, read_history
from tests.kit.processes import wait_until

from headrace.engines.postgres_errors import PostgresDown
from headrace.jobs import QueueUnknown

ENDLESS = """
import sys
from pathlib import Path
from tests.kit.history import Recorder
recorder, number = Recorder(Path(sys.argv[1])), 0
while True:
    number += 1
    recorder.note("ok", "count", number=number)
    print(number, flush=True)
"""


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "history")
    yield recorder
    recorder.close()


def test_an_operation_has_an_invoke_and_the_answer_it_got(recorder, tmp_path):
    with recorder.asking("enqueue", key="a") as asked:
        asked.ok(job=7)
    with pytest.raises(QueueUnknown), recorder.asking("enqueue", key="b"):
        raise QueueUnknown("nowhere")
    with pytest.raises(PostgresDown), recorder.asking("enqueue", key="c"):
        raise PostgresDown("no answer")
    with pytest.raises(KeyboardInterrupt), recorder.asking("enqueue", key="d"):
        raise KeyboardInterrupt
    with recorder.asking("enqueue", key="e"):
        pass
    history = read_history(tmp_path / "history")
    answers = {e.facts["key"]: e.kind for e in history.events if e.kind != "invoke"}
    assert answers == {"a": "ok", "b": "fail", "c": "unknown", "d": "unknown", "e": "unknown"}
    assert history.reported("ok", "enqueue", "job") == [7]
    assert [e.facts["key"] for e in history.of("invoke")] == list("abcde")
    [asked, answered] = [e for e in history.events if e.facts["key"] == "a"]
    assert asked.call == answered.call
    assert asked.at_ns < answered.at_ns
    assert "no answer" in history.of("unknown")[0].facts["error"]


def test_the_first_answer_of_an_operation_stays(recorder, tmp_path):
    def enqueue():
        with recorder.asking("enqueue") as asked:
            asked.ok(job=1)
            with pytest.raises(AssertionError, match="one answer"):
                asked.unknown()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        enqueue()
    assert [e.kind for e in read_history(tmp_path / "history").events] == ["invoke", "ok"]


def test_a_handler_that_raised_ended_with_its_error(recorder, tmp_path):
    with recorder.running("mail", job=1):
        pass
    with pytest.raises(RuntimeError), recorder.running("mail", job=[2, 3]):
        raise RuntimeError("no")
    history = read_history(tmp_path / "history")
    assert history.reported("start", "mail", "job") == [1, 2, 3]
    assert [e.facts.get("error") for e in history.of("end")] == [None, "RuntimeError: no"]


def test_a_forked_child_writes_a_file_of_its_own(recorder, tmp_path):
    recorder.note("start", "mail")
    child = os.fork()
    if child == 0:
        recorder.note("start", "mail")
        os._exit(0)
    os.waitpid(child, 0)
    recorder.note("end", "mail")
    recorder.note("lost", "process", pid=child)
    history = read_history(tmp_path / "history")
    pids = [os.getpid(), child, os.getpid(), child]
    assert [event.pid for event in history.events] == pids
    assert len(list((tmp_path / "history").iterdir())) == 2


@pytest.mark.slow
def test_events_of_killed_processes_are_kept_and_merged_by_time(tmp_path):
    folder, reported = tmp_path / "history", [tmp_path / "one.txt", tmp_path / "two.txt"]
    processes = []
    for file in reported:
        with file.open("w") as out:
            processes.append(subprocess.Popen([sys.executable, "-c", ENDLESS, folder], stdout=out))
    for process, file in zip(processes, reported, strict=True):
        wait_until(lambda file=file: len(file.read_text().split("\n")) > 50, what="it counts")
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    history = read_history(folder)
    moments = [event.at_ns for event in history.events]
    assert moments == sorted(moments)
    for process, file in zip(processes, reported, strict=True):
        noted = [e.facts["number"] for e in history.events if e.pid == process.pid]
        printed = file.read_text().split("\n")[:-1]
        assert noted[: len(printed)] == [int(word) for word in printed], (
            "recorded before it is printed"
        )


def test_a_line_cut_short_is_counted_and_one_that_is_no_event_is_refused(recorder, tmp_path):
    recorder.note("ok", "count")
    [file] = (tmp_path / "history").iterdir()
    with file.open("a") as cut:
        cut.write('{"kind": "ok", "wh')
    history = read_history(tmp_path / "history")
    assert (len(history.events), history.torn) == (1, 1)
    with file.open("a") as cut:
        cut.write("\n")
    with pytest.raises(ValueError, match=r"jsonl:2 is not an event"):
        read_history(tmp_path / "history")
