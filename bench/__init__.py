"""`make bench`: the product's figures against its peers, on this machine, in one run.

`python -m bench jobs [--quick] [--churn-s 600] [--only drain]` starts engines of its own in a
scratch folder (durable: fsync on; TMPDIR sets the disk), measures, prints a table and writes
`bench/results/<room>.json`, `.md` and `.svg`: the record. `--quick` takes three minutes at most,
prints what it leaves out and writes to `build/bench`. `--list` prints the names for `--only`. A run
ends with the goals that are missed, each with its cause (`why` beside the goal), and then exits
with 1. No absolute figure is a promise: ratios of the same run are.

harness.py    one run: cells in turns A B A B, medians, CPU of server and clients
figures.py    one entry a figure, and its goal
report.py     table, JSON, SVG
children.py   processes started here, their CPU, their end
engines.py    PostgreSQL and Valkey of this run, a fresh database a cell, the server's log
machine.py    cores, versions, load, syncs of the disk
limits.py     COPY, commits, select 1: what no queue on this server can exceed
tally.py      how handlers report starts: a mapped page a process, no database
systems.py    ours and the peers, with the settings they run in; by which role our jobs run
ours.py, peers/   one module a system, driven alike; apps/ is what our workers run
jobs.py       which modules make the room's figures; jobs_*.py are one question each
day/, jobs_day.py   the simulated day, run by itself
fetch.py, fetch_*.py   the same for fetch; origins/ has the simulated hosts
views.py, views_*.py   the same for views; load.py sends requests in a closed or an open loop
feed.py, feed_*.py   the same for the feed
costs.py, costs_media.py   what one operation costs; relay.py counts bytes to PostgreSQL
media.py, media_*.py the same for media; native/ is its generator and its limit, in C
"""
