"""What tests stand on: real engines once a run, a fresh database a test, real processes to kill.

enqueued   for users' tests: `assert_enqueued`, `refute_enqueued`
drain      for users' tests: `drain` runs the due jobs in the test's process
engines    embedded engines for a test run; a database per test, copied from a migrated template
processes  start `headrace` as users do, wait for what it says, kill it and all it started
chaos      a network that fails on command: delays, black holes, resets, lost replies (wire: what passes)
history    what clients and handlers saw, written by several processes so that it survives their kill
checkers   judges of a history: lost, doubled, over a limit, over a concurrency, past a fence
"""

from __future__ import annotations

from headrace.testing.drain import drain
from headrace.testing.enqueued import assert_enqueued, refute_enqueued

__all__ = ["assert_enqueued", "drain", "refute_enqueued"]
