"""What does tracing cost? `python -m bench.traces` prints CPU without it, at 1 % and for all.

Three cells run in turns: tracing off, 1 % of new traces sampled, all sampled. The receiver of spans
is beside them and is not counted. Each enqueue and each read begins a trace. The CPU of a job is
that of the whole, with PostgreSQL, as an operator pays it.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import uvloop

from bench.harness import Run, bench_run, drain, produce
from bench.views_stage import load, make_token, open_views, our_api, reads, view_items

RATIOS = {"off": None, "0.01": "0.01", "1": "1"}
JOBS = 6_000
READ_S = 4.0


class Sink(BaseHTTPRequestHandler):
    """Accepts every request."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read and forget it."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


def environment(ratio: str | None, port: int) -> dict[str, str]:
    """The variables of a cell."""
    if ratio is None:
        return {}
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": ratio,
    }


async def cell_of(run: Run, env: dict[str, str]) -> Mapping[str, float]:
    """CPU in microseconds of an enqueue, of a job's run, and of a read of 20 totals."""
    await run.engines.clear_valkey()
    async with run.cell() as cell:
        cell.env |= env
        produced = await produce(cell, "single", JOBS)
        drained = await drain(cell, produced.enqueued)
        app = open_views(cell)
        try:
            totals = await view_items(app)
            token = await make_token(app)
            async with our_api(cell, token) as api:
                kinds = [{"name": "read", "requests": reads(totals, checked=True)}]
                found, cpu = await load(cell, api, kinds, loop="closed", seconds=READ_S)
        finally:
            await app.close()
    read_us = cpu / found["read"]["rate_per_s"] * 1e6
    return {"enqueue": produced.cpu_us, "run": drained.cpu_us, "read": read_us}


async def main() -> None:
    """Print the medians, and their ratios to `off`."""
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    async with bench_run(quick=True) as run:
        cells = {
            name: partial(cell_of, run, environment(ratio, sink.server_port))
            for name, ratio in RATIOS.items()
        }
        found = await run.alternate(cells, pairs=3)
    sink.shutdown()
    for metric, runs in found.items():
        off_us = statistics.median(runs["off"].values)
        for name, each in runs.items():
            middle_us = statistics.median(each.values)
            print(f"{metric} {name}: {middle_us:.1f} us, {middle_us / off_us - 1:+.1%}", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
