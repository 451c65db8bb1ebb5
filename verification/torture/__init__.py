"""Torture: every fault meets every room many times, and a scoreboard shows what broke.

    python -m verification.torture --fault kill-postgres --room jobs --runs 20

faults      the table of faults: how each is injected and healed, its rooms, what it needs
site        real engines and roles, started once for many runs of a fault
results     the record of all runs, and the page `docs/reference/torture.md`
"""
