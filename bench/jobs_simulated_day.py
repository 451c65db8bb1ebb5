"""The simulated day's rows, as `python -m bench.jobs_day` left them: it takes a quarter of an hour
and is run by itself.

They keep their own commit and date, shown with each row; without the file they are not measured.
"""

from __future__ import annotations

import json

from bench.figures import Figure, Goal, figure
from bench.harness import Run
from bench.report import RESULTS

FILE = "jobs_day.json"


async def measure(run: Run) -> list[Figure]:
    """Copy the rows."""
    path = RESULTS / FILE
    if not path.exists():
        why = "run `python -m bench.jobs_day`, which simulates the day and leaves its rows"
        goal = Goal(at_most=2)
        return [figure("simulated day", "s", "", ours=None, goal=goal, not_measured=[why])]
    document = json.loads(path.read_text())
    origin = f"this row is of commit {document['commit']}, {document['date']}"
    rows = [Figure(**row) for row in document["figures"]]
    for row in rows:
        row.not_measured = [origin, *row.not_measured]
    return rows
