"""Deterministic simulation: the product's own code under a virtual clock, from one seed.

    python -m verification.simulation jobs --seed 7

A `World` runs many simulated processes in one event loop. Time, network, randomness and the order
of tasks come from the seed, so a seed replays exactly. Processes die, pause, lose their network and
step their clocks. Each engine is a model of its contract: what a statement or function returns, and
what survives a crash. The models are compared with the real engines by tests, and real processes on
real engines are tested by `tests/promises` and `verification.torture`.

| file | content |
| --- | --- |
| `loop.py` | the event loop: virtual time, processes that die or pause between two steps |
| `world.py` | processes, network, randomness and clocks of a run; its history |
| `postgres.py` | the model of PostgreSQL: tables, transactions, crashes |
| `postgres_client.py` | connections to it, whose requests and replies get lost |
| `faults.py` | the plan of faults of a seed |
| `run.py` | runs a scenario with a seed, shrinks the faults of a failing one |

The idea is that of FoundationDB's simulator and of TigerBeetle's VOPR.
"""
