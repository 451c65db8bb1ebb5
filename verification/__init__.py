"""Verification beyond the test suite: faults in large numbers, with a page of results."""
