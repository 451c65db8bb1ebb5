"""Verification beyond the test suite: simulation from seeds, and faults on real engines."""
