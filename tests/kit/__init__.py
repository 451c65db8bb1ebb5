"""The test kit: real engines, real processes to kill, faulty networks, and checkers of histories.

engines     embedded engines for a test run; a database per test, copied from a migrated template
processes   `headrace` as a child process, with its output and its descendants
forked      functions in forked processes that may die at a crash point
site        a folder with an application, run by `headrace up`, and hosts that it fetches from
waiting     waits for a condition in an event loop
chaos       a proxy with delays, black holes, resets and lost replies
wire        requests and replies of a proxied connection
history     what clients and handlers saw, in files that survive a kill
checkers    judges of a history: lost, doubled, over a limit, over a concurrency
stepped_clock  the wall clock of child processes, off by a number in a file
storm/      roles under faults, with the workload and the checkers of each room
own_*       other servers than the embedded ones; stock_valkey, whole_nodes, run_cleanup

Tests import it as `tests.kit.X`: pytest puts the repository on `sys.path`. Bench imports it the
same way and runs from the repository. `HeadraceProcess` adds the repository to PYTHONPATH.
"""
