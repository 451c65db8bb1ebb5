"""`make bench`: the product's figures against its peers, on this machine, in one run.

`python -m bench jobs [--quick] [--churn-s 600] [--only drain]` starts engines of its own in a scratch folder (durable: fsync
on), measures, prints a table and writes `bench/results/<room>.json` and `.svg`. It ends with the rows that do not
hold and exits with 1 when there is one. No absolute figure is a promise: ratios of the same run are.

harness.py    one run: cells in turns A B A B, medians, CPU of server and clients    figures.py  one entry a figure, goals
children.py   processes started here, their CPU, their end                           report.py   table, JSON, SVG
engines.py    PostgreSQL and Valkey of this run, a fresh database a cell             machine.py  cores, versions, load
day/, jobs_day.py   the simulated day, run by itself
tally.py      how handlers report starts: a mapped page a process, no database       limits.py   COPY, commits, select 1
systems.py    ours and the peers, with the settings they run in                      peers/      one module a system
apps/         the applications that our workers run                                  jobs_*.py   one module a question
jobs.py       which modules make the room's figures
"""
