"""The status board: an agent reads what a slot wrote, also after a fork and during writes."""

from __future__ import annotations

import os
import time

import pytest

from headrace.jobs.slots.status_board import CELL_BYTES, SLOTS_MAX, StatusBoard


@pytest.fixture
def board():
    """An empty board."""
    board = StatusBoard.make()
    yield board
    os.close(board.descriptor)


def test_an_empty_cell_says_that_nothing_runs(board):
    assert board.read(0).jobs == 0
    assert board.read(SLOTS_MAX - 1).job_id is None


def test_a_call_is_seen_until_it_ends(board):
    cell = board.cell(3)
    before_s = time.monotonic()
    cell.begin(41, 1, 2.5)
    status = board.read(3)
    assert (status.job_id, status.jobs, status.timeout_s) == (41, 1, 2.5)
    assert before_s <= status.started_s <= status.beat_s <= time.monotonic()
    cell.end()
    assert board.read(3).jobs == 0


def test_several_jobs_have_no_name(board):
    cell = board.cell(0)
    cell.begin(-1, 20, 1.0)
    assert (board.read(0).job_id, board.read(0).jobs) == (None, 20)


def test_a_beat_is_seen_and_changes_nothing_else(board):
    cell = board.cell(1)
    cell.begin(7, 1, 1.0)
    began = board.read(1)
    cell.beat()
    status = board.read(1)
    assert status.beat_s >= began.beat_s
    assert (status.job_id, status.started_s) == (7, began.started_s)


def test_neighbours_keep_to_their_cells(board):
    board.cell(4).begin(1, 1, 1.0)
    board.cell(6).begin(3, 1, 1.0)
    board.cell(5).begin(2**62, 1, 604_800.0)
    assert [board.read(n).job_id for n in (4, 5, 6)] == [1, 2**62, 3]
    board.clear(5)
    assert [board.read(n).jobs for n in (4, 5, 6)] == [1, 0, 1]
    assert CELL_BYTES == 64


@pytest.mark.slow
def test_a_reader_never_sees_half_a_write(board):
    """A forked writer alternates two calls that differ in every field."""
    pid = os.fork()
    if pid == 0:
        cell = board.cell(0)
        for number in range(20_000):
            cell.begin(*((1, 1, 1.0) if number % 2 else (2, 1, 2.0)))
        os._exit(0)
    pairs = set()
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        status = board.read(0)
        if status.is_whole:
            pairs.add((status.job_id, status.timeout_s))
    assert pairs <= {(None, 0.0), (1, 1.0), (2, 2.0)}
