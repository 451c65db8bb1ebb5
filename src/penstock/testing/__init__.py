"""What tests stand on: real engines once a run, a fresh database a test, real processes to kill.

engines    embedded engines for a test run; a database per test, copied from a migrated template
processes  start `penstock` as users do, wait for what it says, kill it and all it started
"""
