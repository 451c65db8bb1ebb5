"""The TypeScript client against the real API, in Node.js; and its types, where tsc is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.kit.site import Site

import headrace

pytestmark = pytest.mark.slow
CLIENT = Path(__file__).parents[2] / "clients" / "typescript"
NODE, TSC = shutil.which("node"), shutil.which("tsc")
PROGRAM = """
import assert from "node:assert/strict";
import { Headrace, Problem } from "CLIENT/index.js";

const token = async () => process.env.HEADRACE_TOKEN;
const api = new Headrace({ baseUrl: `${process.env.URL}/`, token });

const added = await api.enqueueJobs({
  queue: "notes",
  body: [{ payload: { text: "a" }, after_s: 600 }, { payload: { text: "b" }, after_s: 600 }],
});
assert.equal(added.ids.length, 2);
const job = await api.getJob({ job_id: added.ids[0] });
assert.equal(job.state, "scheduled");
assert.deepEqual(job.payload, { text: "a" });
assert.equal(await api.cancelJob({ job_id: added.ids[0] }), undefined);

await api.hitItem({ id: "item:1@x", n: 3, class: "human" });
await api.hitItem({ id: "b", class: "human" });
const totals = await api.getTotals({ ids: ["item:1@x", "b"] });
assert.deepEqual(totals.map((one) => one.total), [3, 1]);

await api.putMediaObject({ key: "a/b.txt", body: new TextEncoder().encode("hello") });
assert.equal((await api.getMediaObject({ key: "a/b.txt" })).size_bytes, 5);
const stream = new Blob(["streamed"]).stream();
await api.putMediaObject({ key: "a/c.txt", body: stream });
assert.match(await (await api.getMetrics()).text(), /# HELP/);

const problem = await api.getQueue({ queue: "nowhere" }).catch((error) => error);
assert.ok(problem instanceof Problem);
assert.equal(problem.status, 404);
assert.equal(problem.code, "jobs.queue_unknown");
assert.match(problem.message, /nowhere/);
const other = new Headrace({ baseUrl: process.env.URL, token: "wrong" });
assert.equal((await other.listQueues().catch((error) => error)).status, 401);
await assert.rejects(api.getJob({}), /job_id is required/);
await assert.rejects(api.getJob({ job_id: 1, jobid: 2 }), /jobid is no parameter of GET/);
assert.throws(() => new Headrace({}), /baseUrl is required/);
const ended = AbortSignal.abort();
assert.equal((await api.listQueues({ signal: ended }).catch((error) => error)).name, "AbortError");
console.log("all right");
"""
TYPED = """
import { Headrace, Job, Problem } from "CLIENT/index.js";
const api = new Headrace({ baseUrl: "http://127.0.0.1:8080", token: "t" });
export async function all(): Promise<string> {
  const added = await api.enqueueJobs({ queue: "mail", body: { payload: { to: "ann" } } });
  const job: Job = await api.getJob({ job_id: added.ids[0] ?? 1 });
  // @ts-expect-error: a queue is required
  await api.enqueueJobs({ body: { payload: 1 } });
  // @ts-expect-error: there is no such field
  await api.enqueueJobs({ queue: "mail", body: { paylod: 1 } });
  return job.state satisfies string;
}
export const is = (error: unknown) => error instanceof Problem && error.code;
"""


def guide():
    """The program of docs/install.md, for a queue of the site and its address."""
    page = (CLIENT.parents[1] / "docs" / "install.md").read_text()
    text = re.search(r"```javascript\n(.*?)```", page, re.DOTALL)[1]
    for old, new in (
        ('from "headrace"', 'from "CLIENT/index.js"'),
        ('"http://127.0.0.1:8080"', "process.env.URL"),
        ('queue: "mail", body: { payload: { to:', 'queue: "notes", body: { payload: { text:'),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed: apt-get install nodejs")
def test_the_client_calls_the_real_api(tmp_path):
    site = Site(tmp_path / "site")
    try:
        site.up()
        programs = {"test.mjs": PROGRAM, "guide.mjs": guide()}
        for name, text in programs.items():
            (tmp_path / name).write_text(text.replace("CLIENT", str(CLIENT)))
        token = Path(site.facts["token_file"]).read_text().strip()
        env = {"URL": site.facts["api"], "HEADRACE_TOKEN": token, "PATH": "/usr/bin:/bin"}
        out = []
        for name in programs:
            ran = subprocess.run(
                [NODE, str(tmp_path / name)],
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert ran.returncode == 0, ran.stderr
            out.append(ran.stdout)
        assert out[0] == "all right\n"
        assert re.fullmatch(r"(ready|leased|gone)\n404 jobs.queue_unknown undefined\n", out[1])
    finally:
        site.end()


@pytest.mark.skipif(TSC is None, reason="tsc is not installed: npm install -g typescript")
def test_the_types_accept_what_the_api_accepts(tmp_path):
    program = tmp_path / "program.ts"
    program.write_text(TYPED.replace("CLIENT", str(CLIENT)))
    words = ["--strict", "--noEmit", "--target", "es2022", "--module", "nodenext"]
    ran = subprocess.run([TSC, *words, str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_types_name_only_what_is_declared():
    """A reference to a type that no one declares would be an error in every editor."""
    text = (CLIENT / "index.d.ts").read_text()
    declared = set(
        re.findall(r"^export (?:type|interface|declare class) (\w+)", text, re.MULTILINE)
    )
    own = {"Promise", "Record", "Array", "Response", "Error", "AbortSignal", "Blob", "ArrayBuffer"}
    own |= {"Uint8Array", "ReadableStream"}
    code = re.sub(r"/\*\*.*?\*/|\"[^\"]*\"|^//[^\n]*", "", text, flags=re.DOTALL)
    assert set(re.findall(r"\b[A-Z]\w+\b", code)) - declared - own == set()
    package = json.loads((CLIENT / "package.json").read_text())
    assert package["version"] == headrace.__version__
    assert all((CLIENT / name).is_file() for name in package["files"])
