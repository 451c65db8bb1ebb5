"""Typical mistakes: each answer names what failed, the value and the fix, without a traceback.

Others are beside what they are about: a used port in `test_up_survives`, old data in
`test_embedded`, folders of other users in `test_other_users`, missing extras in `test_main`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from headrace.__main__ import main
from headrace.engines.embedded.data_folder import FolderLock
from headrace.kernel.errors import error_table

APP = "from headrace import Headrace\napp = Headrace()\n"
FILES = {
    "shop.py": APP,
    "empty.py": "",
    "factory.py": "from headrace import Headrace\ndef make():\n    return Headrace()\n",
    "failing.py": "raise RuntimeError('the password is not set')\n",
    "needy.py": "import no_such_library\n",
    "early.py": "from headrace import Headrace\n\napp = Headrace()\napp.jobs.enqueue('a')\n",
    "tasked.py": f"{APP}@app.task('mail', retry=3)\ndef mail(to): ...\n",
    "flow.py": f"{APP}@app.workflow('order', retry=3)\ndef order(ctx): ...\n",
    "timed.py": f"{APP}@app.cron('0 4 * * *', time_out='1m')\ndef nightly(): ...\n",
    "queued.py": f"{APP}app.queue('review', limter='a')\n",
    "limits.py": f"{APP}app.limiter('smtp', rates='600/m')\n",
    "shared.py": f"{APP}import tasked\n",
    "site/web.py": "from headrace import Headrace\nbackend = Headrace()\n",
    "key.toml": "[web]\nlisen = '127.0.0.1:8080'\n",
    "section.toml": "[wep]\nlisten = '127.0.0.1:8080'\n",
    "value.toml": "[web]\nbody_max = '5 apples'\n",
    "type.toml": "[web]\nprocesses = true\n",
    "syntax.toml": "[web\n",
    "items.txt": "these are no items",
}
POSTGRES = "postgresql://me:hunter2@127.0.0.1:1/site"
VALKEY = {"HEADRACE_VALKEY_URL": "valkey://127.0.0.1:1"}


class Mistake(NamedTuple):
    """A command line, the code of its error, and what the text must contain."""

    words: str
    code: str
    texts: tuple[str, ...]
    env: Mapping[str, str] = MappingProxyType({})


def usage(words, *texts):
    return Mistake(words, "cli.usage", (*texts, "--help`"))


def unknown(words, meant):
    return Mistake(
        words, "cli.unknown_command", (f"'{words}' is not a command", f"`headrace {meant}")
    )


def setting(name, *texts, words="queues ls", **env):
    return Mistake(words, "invalid_config", (name, *texts), env)


MISTAKES = [
    # Names of commands.
    unknown("job ls", "jobs ls"),
    unknown("ls jobs", "jobs ls"),
    unknown("jobs list", "jobs ls"),
    unknown("queue delete", "queues rm"),
    unknown("jobs shwo", "jobs show"),
    unknown("worker", "agent"),
    unknown("start", "up"),
    unknown("customer ls", "fetch customer ls"),
    unknown("customer list", "fetch customer ls"),
    unknown("pause", "crons pause"),
    unknown("media disk", "media disks"),
    unknown("media frobnicate", "media --help"),
    unknown("frobnicate", "--help"),
    # Arguments and options.
    usage("jobs", "`headrace jobs` needs the name of a command"),
    usage("jobs show", "Missing argument 'JOB_ID'", "headrace jobs show 12"),
    usage("jobs show seven", "'seven' is not a valid integer"),
    usage("jobs ls --queu mail", "No such option '--queu'", "'--queue'"),
    usage("jobs ls --max 0", "0 is not in the range"),
    usage("jobs ls --state broken", "'broken' is not one of", "'failed'"),
    usage("queues ls --jsn", "No such option '--jsn', did you mean --json?"),
    usage("--cofnig a.toml queues ls", "'--cofnig', did you mean --config?"),
    usage("queues ls --frobnicate", "No such option '--frobnicate': see"),
    usage("queues ls mail", "unexpected extra argument (mail)"),
    usage("tokens create ci", "--scope"),
    Mistake("jobs ls --json=yes", "cli.usage", ("--json=yes", "takes no value")),
    Mistake("jobs ls --data", "cli.option_without_value", ("--data", "--data path")),
    # Values.
    Mistake("jobs add mail {to:ann}", "jobs.invalid_job", ("'{to:ann}'", "JSON with its quotes")),
    Mistake("jobs add mail --at tomorrow", "jobs.invalid_job", ("'tomorrow'", "2026-11-21T10:00Z")),
    Mistake("jobs add mail --after 5minutes", "jobs.invalid_job", ("'5minutes'", "10m")),
    Mistake("lanes set smtp ann --rate 10", "jobs.invalid_job", ("'10'", "600/m")),
    Mistake("views series a --from yesterday", "views.invalid_span", ("'yesterday'", "2026-11-21")),
    Mistake("views export --file a.xlsx", "views.invalid_span", ("a.xlsx", ".csv or .parquet")),
    Mistake("media disks add d 900GX", "invalid_input", ("'900GX'", "64KiB or 25MiB")),
    Mistake("size --jobs many", "cli.invalid_rate", ("'many'", "350M/d")),
    Mistake("agent --name a/b?", "invalid_id", ("'a/b?'",)),
    # Files and folders.
    usage("media put a.mp3 absent.mp3", "'absent.mp3' does not exist"),
    usage("media put a.mp3 site", "'site' is a directory"),
    usage("feed import follows absent.csv", "'absent.csv': No such file"),
    Mistake(
        "fetch catalogue run absent.csv --customer a", "fetch.invalid_source", ("'absent.csv'",)
    ),
    Mistake("fetch catalogue run ftp://a/b --customer a", "fetch.invalid_source", ("http://",)),
    Mistake("fetch item send items.txt", "fetch.invalid_items", ("items.txt", "JSON list")),
    Mistake("media partitions simulate --plot absent/a.svg", "invalid_input", ("absent/a.svg",)),
    Mistake("init /proc/mine", "cli.folder_not_writable", ("/proc/mine", "choose a folder")),
    Mistake("queues ls", "engines.not_running", ("headrace-data", "`headrace up`")),
    Mistake("queues ls --data absent", "engines.not_running", ("absent", "`headrace up`")),
    Mistake("queues ls --data shop.py", "engines.folder_unusable", ("shop.py", "choose another")),
    Mistake("up --data shop.py", "engines.folder_unusable", ("shop.py", "choose a folder")),
    Mistake("up --engines-only --data used", "engines.folder_in_use", ("used", "choose another")),
    Mistake("console link", "engines.not_running", ("`headrace up`",)),
    # Applications.
    Mistake("up shop.py", "cli.app_not_found", ("'shop.py' names a file", "`shop:app`")),
    Mistake("up ./shop.py:app", "cli.app_not_found", ("'./shop.py:app'", "`shop:app`")),
    Mistake("up site/web.py", "cli.app_not_found", ("`site.web:app`",)),
    Mistake("up shop", "cli.app_not_found", ("'shop'", "module:attribute", "as shop:app")),
    Mistake("up :app", "cli.app_not_found", ("':app'", "as shop.site:app")),
    Mistake("jobs add a 1 --app site_app", "cli.app_not_found", ("'site_app'", "site_app:app")),
    Mistake("up shop:application", "cli.app_not_found", ("'application'", "shop:app?")),
    Mistake("up empty:app", "cli.app_not_found", ("'app'", "app = Headrace()")),
    Mistake("up factory:make", "cli.app_not_found", ("make is a function", "assign its result")),
    Mistake("up absent:app", "cli.app_not_found", ("no module 'absent'", "installed packages")),
    Mistake("up failing:app", "cli.app_broken", ("failing.py", "the password is not set")),
    Mistake("up needy:app", "cli.app_broken", ("needy.py", "No module named 'no_such_library'")),
    Mistake("up early:app", "cli.app_broken", ("early.py", "before engines run", "@app.task")),
    Mistake("up tasked:app", "jobs.invalid_task", ("tasked.py:3: task 'mail'", "mean retries?")),
    Mistake("up shared:app", "jobs.invalid_task", ("tasked.py:3: task 'mail'", "mean retries?")),
    Mistake("up flow:app", "jobs.invalid_task", ("flow.py:3: task 'workflow.order'", "retries?")),
    Mistake("up timed:app", "jobs.invalid_task", ("timed.py:3: task 'cron.nightly'", "timeout?")),
    Mistake("up queued:app", "jobs.invalid_task", ("queued.py:3: queue 'review'", "limiter?")),
    Mistake("up limits:app", "jobs.invalid_task", ("limits.py:3: limiter 'smtp'", "mean rate?")),
    # Settings.
    setting("absent.toml", "no such file", words="config show --config absent.toml"),
    setting(
        "key.toml", "web.lisen", "did you mean web.listen?", words="queues ls --config key.toml"
    ),
    setting("section.toml", "wep.listen", "did you mean", words="queues ls --config section.toml"),
    setting("value.toml", "'5 apples'", "64KiB", words="queues ls --config value.toml"),
    setting("type.toml", "'true'", "a whole number", words="queues ls --config type.toml"),
    setting("syntax.toml", "a TOML file", "line 1", words="queues ls --config syntax.toml"),
    setting("HEADRACE_WEB_LISTN", "did you mean HEADRACE_WEB_LISTEN?", HEADRACE_WEB_LISTN="a:1"),
    setting(
        "HEADRACE_POSTGRES_URL", "mysql://", "postgresql://", HEADRACE_POSTGRES_URL="mysql://a"
    ),
    setting("HEADRACE_VALKEY_URL", "http://", "valkey://", HEADRACE_VALKEY_URL="http://a:6379"),
    setting("HEADRACE_BLOBS_URL", "file:///srv/blobs", HEADRACE_BLOBS_URL="/srv/blobs"),
    Mistake(
        "queues ls",
        "postgres.unavailable",
        ("127.0.0.1:1", "does not respond"),
        {"HEADRACE_POSTGRES_URL": POSTGRES, **VALKEY},
    ),
    Mistake("backup", "backup.not_configured", ("backup.url", "HEADRACE_BACKUP_URL")),
    Mistake("completion install", "cli.shell_unknown", ("tcsh", "bash"), {"SHELL": "/bin/tcsh"}),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the mistakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def require_answer(code, err, mistake):
    """The error has the code, its exit code and all texts, and is no traceback of Headrace."""
    *_, last = err.strip().splitlines()
    assert last.endswith(f"[{mistake.code}]"), err
    assert code == error_table()[mistake.code].exit_code, err
    assert "Traceback" not in err
    assert "hunter2" not in err
    assert [text for text in mistake.texts if text.lower() not in err.lower()] == [], err


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words)
def test_a_mistake_is_answered_with_the_fix(folder, monkeypatch, capfd, mistake):
    for name, text in mistake.env.items():
        monkeypatch.setenv(name, text)
    for name in FILES:
        monkeypatch.delitem(sys.modules, name.partition(".")[0].replace("/", "."), raising=False)
    lock = FolderLock(folder / "used")
    if "used" in mistake.words:
        (folder / "used").mkdir(mode=0o700)
        lock.acquire()
    try:
        code = main(mistake.words.split())
    finally:
        lock.release()
    require_answer(code, capfd.readouterr().err, mistake)


def test_a_second_up_names_the_first_and_not_its_ports(folder, monkeypatch, capfd):
    used = folder / "used"
    (used / "run").mkdir(mode=0o700, parents=True)
    lock = FolderLock(used)
    lock.acquire()
    with socket.create_server(("127.0.0.1", 0)) as api:
        address = f"127.0.0.1:{api.getsockname()[1]}"
        (used / "run" / "api-address").write_text(address)
        monkeypatch.setenv("HEADRACE_WEB_LISTEN", address)
        code = main(["up", "--data", "used"])
    lock.release()
    texts = (f"already runs in data folder {used}", f"process {os.getpid()}", f"{address}/console")
    require_answer(code, capfd.readouterr().err, Mistake("up", "engines.folder_in_use", texts))


STORED = [
    Mistake("queues show mial", "jobs.queue_unknown", ("'mial'", "did you mean mail?")),
    Mistake("jobs add mial null", "jobs.queue_unknown", ("'mial'", "did you mean mail?")),
    Mistake("jobs take mial", "jobs.queue_unknown", ("'mial'", "did you mean mail?")),
    Mistake("lanes ls mial", "jobs.limiter_unknown", ("'mial'", "did you mean mail?")),
    Mistake("lanes show mial ann", "jobs.limiter_unknown", ("'mial'", "did you mean mail?")),
    Mistake("lanes show smtp ann", "jobs.limiter_unknown", ("limiter 'smtp' does not", "(known: ")),
    Mistake("lanes show mail ann", "jobs.lane_unknown", ("'mail' does not exist: set it",)),
    Mistake("jobs show 424242", "jobs.job_unknown", ("424242", "enqueue returned")),
    Mistake(f"jobs show {'9' * 30}", "jobs.job_unknown", ("does not exist",)),
    Mistake("tokens revoke nobody", "web.token_unknown", ("'nobody'", "`headrace tokens ls`")),
    Mistake("tokens create ci --scope job:write", "web.scope_unknown", ("jobs:write",)),
    Mistake("feed page bob --cursor x", "cursor.invalid", ("'x'", "the previous page")),
    Mistake("fetch customer show ann", "fetch.customer_unknown", ("'ann'", "customer set")),
]


async def test_mistakes_in_names_are_answered_with_the_fix(
    folder, database_url, running_engines, monkeypatch, capfd
):
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", database_url)
    monkeypatch.setenv("HEADRACE_VALKEY_URL", running_engines.endpoints.valkey_url)
    assert await asyncio.to_thread(main, ["queues", "set", "mail", "--create"]) == 0
    capfd.readouterr()
    for mistake in STORED:
        code = await asyncio.to_thread(main, mistake.words.split())
        require_answer(code, capfd.readouterr().err, mistake)


def headrace(*words, folder, **env):
    """A `headrace` process with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", *words],
        cwd=folder,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_files_named_like_modules_of_python_are_named_if_they_break_an_import(tmp_path):
    for name in ("queue.py", "secrets.py", "cmd.py"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "shop.py").write_text(FILES["shop.py"])
    # Importing `pdb` imports `cmd`.
    (tmp_path / "early.py").write_text("import pdb\n" + FILES["shop.py"])
    (tmp_path / "late.py").write_text(
        "from headrace import Headrace\nclass Late(Headrace):\n"
        "    def use_flags(self, flags):\n        import pdb\napp = Late()\n"
    )
    texts = (f"cmd.py in {tmp_path} hides Python's module 'cmd': rename it",)
    expected = {"early": "cli.module_hidden", "late": "cli.module_hidden"}
    expected["shop"] = "engines.not_running"
    started = {name: headrace("work", f"{name}:app", folder=tmp_path) for name in expected}
    for name, process in started.items():
        _, err = process.communicate(timeout=60)
        shown = texts if name != "shop" else ()
        require_answer(process.returncode, err.decode(), Mistake("work", expected[name], shown))


def test_a_file_of_pythonpath_that_hides_a_module_of_python_is_named(tmp_path):
    (own := tmp_path / "own").mkdir()
    (own / "cmd.py").write_text("x = 1\n")
    (tmp_path / "early.py").write_text("import pdb\n" + FILES["shop.py"])
    paths = os.pathsep.join(filter(None, [str(own), os.environ.get("PYTHONPATH")]))
    process = headrace("work", "early:app", folder=tmp_path, PYTHONPATH=paths)
    _, err = process.communicate(timeout=60)
    texts = (f"cmd.py in {own} hides Python's module 'cmd': rename it",)
    mistake = Mistake("work", "cli.module_hidden", texts)
    require_answer(process.returncode, err.decode(), mistake)


@pytest.mark.parametrize(
    ("name", "url", "engine", "other"),
    [
        ("POSTGRES", "postgres://me:hunter2@127.0.0.1:1/db", "PostgreSQL", "valkey"),
        ("VALKEY", "valkey://:hunter2@127.0.0.1:1", "Valkey", "postgres"),
    ],
)
def test_a_wrong_url_is_named_beside_the_one_that_is_not_set(tmp_path, name, url, engine, other):
    ours = {f"HEADRACE_{name}_URL": url}
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    process = subprocess.run(
        [sys.executable, "-m", "headrace", "queues", "ls"],
        check=False,
        cwd=tmp_path,
        env={**env, **ours},
        capture_output=True,
        text=True,
        timeout=60,
    )
    texts = (
        f"{engine} at 127.0.0.1:1 does not respond (no connection): correct",
        f"{other}.url (HEADRACE_{other.upper()}_URL) is not set",
    )
    mistake = Mistake("queues ls", "engines.not_running", texts)
    require_answer(process.returncode, process.stderr, mistake)
    assert "hunter2" not in process.stderr
    assert process.stderr.startswith("headrace: PostgreSQL at") is (name == "POSTGRES")


def test_a_closed_pipe_ctrl_c_and_a_poor_locale_are_no_faults(folder):
    piped = headrace("config", "show", folder=folder)
    piped.stdout.close()
    poor = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    plain = headrace("init", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", folder=folder, **poor)
    # It reads its standard input, until Ctrl-C.
    waiting = headrace("fetch", "item", "send", "-", "--json", folder=folder)
    assert (piped.wait(60), piped.stderr.read()) == (0, b"")
    out, err = plain.communicate(timeout=60)
    assert (plain.returncode, err) == (0, b"")
    assert rb"cd caf\xe9" in out
    wait_reading(waiting.pid)
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, b"")
    assert json.loads(err)["error"]["code"] == "cli.interrupted"


def wait_reading(pid):
    """Wait until the process reads its pipe."""
    for _ in range(6000):
        if "pipe" in Path(f"/proc/{pid}/wchan").read_text():
            return
        signal.sigtimedwait([], 0.01)
    raise AssertionError("the command does not read its standard input")
