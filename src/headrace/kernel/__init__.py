"""The ground floor: pure code that every room stands on. No sockets, no SQL, no drivers.

errors   the taxonomy and its one table       config   settings as rows, all problems at once
ids      names of users' things, UUIDv7       secrets  keys for what leaves the house and comes back
clock    wall, monotonic and virtual time     backoff  when to try again
logs     one JSON line an event               metrics  bounded Prometheus series
trace    W3C traceparent through every hop    limits   bounds that more than one room needs
crash    points where a test may kill us      terminal what a room's commands are given
"""
