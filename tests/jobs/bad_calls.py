"""The corpus of bad input of jobs: calls with the status and code of their refusal.

CALLS are verbs of `surfaces`, refused alike by Python, HTTP and the commands. Where a surface
differs, the refusal is a dict by surface with `else` for the others; None: it cannot be expressed
there. Names with a `$` are ids of stored jobs and leases.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

FAR = (datetime.now(UTC) + timedelta(days=400)).isoformat(timespec="seconds")
SOON = (datetime.now(UTC) + timedelta(hours=1)).isoformat(timespec="seconds")
NEVER = (0, 999_999, 2**63 - 1, 2**63)
LONG = "x" * 129
INVALID_JOB = "422 jobs.invalid_job"
NOT_AS_WORDS = {"commands": None}
BY_SHAPE = {"http": "422 web.invalid_input", "commands": "422 usage"}
"""Values of the wrong type are refused before the verb."""
QUEUE_UNKNOWN = "404 jobs.queue_unknown"
JOB_UNKNOWN = "404 jobs.job_unknown"
NOT_WAITING = "409 jobs.not_waiting"
NOT_ENDED = "409 jobs.not_ended"
LEASE_LOST = "409 jobs.lease_lost"
INVALID_TAKE = "422 jobs.invalid_take"
INVALID_FILTER = "422 jobs.invalid_filter"
INVALID_SETTING = "422 jobs.invalid_setting"
LANE_UNKNOWN = "404 jobs.lane_unknown"
LIMITER_UNKNOWN = "404 jobs.limiter_unknown"
CRON_UNKNOWN = "404 jobs.cron_unknown"
INVALID_CRON = "422 jobs.invalid_cron"

ENQUEUES = [
    ({"queue": "nobody"}, QUEUE_UNKNOWN),
    ({"queue": "Mail"}, QUEUE_UNKNOWN),
    ({"queue": "a\0"}, QUEUE_UNKNOWN),
    ({"payload": "x" * 65_536}, "413 jobs.payload_too_large"),
    ({"at": FAR}, INVALID_JOB),
    ({"at": "2026-11-21T10:00:00"}, INVALID_JOB),
    ({"at": "0001-01-01T00:00:00+14:00"}, INVALID_JOB),
    ({"at": SOON, "after_s": 1}, INVALID_JOB),
    ({"after_s": -1}, INVALID_JOB),
    ({"after_s": 4e7}, {"else": INVALID_JOB}),
    ({"after_s": 1e300}, {"else": INVALID_JOB}),
    ({"after_s": float("nan")}, {"http": "400 web.malformed_json", "else": INVALID_JOB}),
    ({"spread_s": -1}, INVALID_JOB),
    ({"at": SOON, "spread_s": 31_622_000}, INVALID_JOB),
    ({"priority": -1}, INVALID_JOB),
    ({"priority": 10}, INVALID_JOB),
    ({"priority": 2**70}, {"http": "422 web.invalid_input", "else": INVALID_JOB}),
    ({"priority": 1.5}, {**BY_SHAPE, "else": INVALID_JOB}),
    ({"version": 0}, INVALID_JOB),
    ({"lane": ""}, INVALID_JOB),
    ({"lane": LONG}, INVALID_JOB),
    ({"lane": "a\0b"}, {"http": "422 web.invalid_input", "else": INVALID_JOB}),
    ({"lane": "a\nb"}, INVALID_JOB),
    ({"unique": ""}, INVALID_JOB),
    ({"unique": LONG}, INVALID_JOB),
    ({"unique": "a\x7f"}, INVALID_JOB),
    ({"jobs": [{}, {"priority": 11}]}, {**NOT_AS_WORDS, "else": INVALID_JOB}),
    ({"jobs": [{}] * 10_001}, {**NOT_AS_WORDS, "else": "413 jobs.batch_too_large"}),
    (
        {"jobs": [{"payload": "x" * 65_000}] * 260},
        {"http": "413 web.body_too_large", **NOT_AS_WORDS, "else": "413 jobs.batch_too_large"},
    ),
]
SINGLE = [
    *((verb, {"job": one}, JOB_UNKNOWN) for verb in ("job", "why", "cancel") for one in NEVER),
    *((verb, {"job": one}, JOB_UNKNOWN) for verb in ("retry", "delete") for one in NEVER),
    *(("cancel", {"job": one}, NOT_WAITING) for one in ("$leased", "$gone", "$failed", "$kept")),
    *(("delete", {"job": one}, NOT_WAITING) for one in ("$leased", "$gone")),
    *(
        ("retry", {"job": one}, NOT_ENDED)
        for one in ("$ready", "$later", "$leased", "$gone", "$kept")
    ),
    ("retry", {"job": "$keyed"}, "409 jobs.key_taken"),
]
SEARCHES = [
    ({"queue": "nobody"}, QUEUE_UNKNOWN),
    ({"queue": "a\0"}, QUEUE_UNKNOWN),
    ({"state": "asleep"}, {"commands": "422 usage", "else": INVALID_FILTER}),
    ({"state": "gone"}, {"commands": "422 usage", "else": INVALID_FILTER}),
    ({"q": ""}, INVALID_FILTER),
    ({"q": "x" * 201}, INVALID_FILTER),
    ({"q": "a\0"}, INVALID_FILTER),
    ({"q": "x", "state": "ready"}, INVALID_FILTER),
    ({"lane": ""}, INVALID_FILTER),
    ({"lane": LONG}, INVALID_FILTER),
    ({"limit": 0}, {**BY_SHAPE, "else": INVALID_FILTER}),
    ({"limit": 1001}, {**BY_SHAPE, "else": INVALID_FILTER}),
]
BULKS = [
    ({"action": "explode", "queue": "mail"}, {"commands": "422 usage", "else": INVALID_FILTER}),
    ({"action": "retry"}, INVALID_FILTER),
    ({"action": "delete", "q": "x"}, INVALID_FILTER),
    ({"action": "cancel", "older_than_s": 60}, INVALID_FILTER),
    ({"action": "cancel", "queue": "nobody"}, QUEUE_UNKNOWN),
    ({"action": "cancel", "queue": "mail", "state": "leased"}, INVALID_FILTER),
    ({"action": "retry", "queue": "mail", "state": "ready"}, INVALID_FILTER),
    ({"action": "delete", "state": "leased"}, INVALID_FILTER),
    ({"action": "delete", "state": "asleep"}, INVALID_FILTER),
    ({"action": "delete", "ids": [0]}, INVALID_FILTER),
    (
        {"action": "delete", "ids": ["$ready", 2**63]},
        {"http": "422 web.invalid_input", "else": INVALID_FILTER},
    ),
    ({"action": "delete", "ids": [1] * 10_001}, INVALID_FILTER),
    ({"action": "delete", "queue": "mail", "older_than_s": -1}, INVALID_FILTER),
    ({"action": "cancel", "queue": "mail", "lane": LONG}, INVALID_FILTER),
]
TAKES = [
    ("take", {"queue": "nobody"}, QUEUE_UNKNOWN),
    ("take", {"queue": "a\0"}, QUEUE_UNKNOWN),
    ("take", {"queue": "mail", "n": 0}, INVALID_TAKE),
    ("take", {"queue": "mail", "n": -1}, INVALID_TAKE),
    ("take", {"queue": "mail", "n": 1001}, INVALID_TAKE),
    (
        "take",
        {"queue": "mail", "n": 2**70},
        {"http": "422 web.invalid_input", "else": INVALID_TAKE},
    ),
    ("take", {"queue": "mail", "lease": "0s"}, INVALID_TAKE),
    ("take", {"queue": "mail", "lease": "25h"}, INVALID_TAKE),
    *(("ack", {"lease": one, "rest": {"outcome": "done"}}, LEASE_LOST) for one in NEVER),
    ("ack", {"lease": "$over", "rest": {"outcome": "done"}}, LEASE_LOST),
    ("ack", {"lease": "$lease", "outcomes": {"$ready": {"outcome": "done"}}}, INVALID_TAKE),
    ("ack", {"lease": "$lease", "outcomes": {2**63: {"outcome": "done"}}}, INVALID_TAKE),
    *(
        ("ack", {"lease": "$lease", "outcomes": {"$leased": outcome}}, refusal)
        for outcome, refusal in (
            ({"outcome": "explode"}, {**NOT_AS_WORDS, "else": INVALID_TAKE}),
            ({"outcome": "snooze"}, INVALID_TAKE),
            ({"outcome": "send_to"}, {**NOT_AS_WORDS, "else": INVALID_TAKE}),
            ({"outcome": "done", "queue": "mail"}, {**NOT_AS_WORDS, "else": INVALID_TAKE}),
            ({"outcome": "send_to", "queue": "nobody"}, QUEUE_UNKNOWN),
            ({"outcome": "retry", "after_s": -1}, INVALID_TAKE),
            ({"outcome": "retry", "after_s": 4e7}, INVALID_TAKE),
            ({"decision": "approve"}, {**NOT_AS_WORDS, "else": INVALID_TAKE}),
            ({"by": "ann"}, {**NOT_AS_WORDS, "else": INVALID_TAKE}),
            (
                {"outcome": "done", "result": "x" * 70_000},
                {**NOT_AS_WORDS, "else": INVALID_TAKE},
            ),
        )
    ),
    *(("extend", {"lease": one}, LEASE_LOST) for one in (*NEVER, "$over")),
    ("extend", {"lease": "$lease", "lease_for": "0s"}, INVALID_TAKE),
    ("extend", {"lease": "$lease", "lease_for": "25h"}, INVALID_TAKE),
]
QUEUES = [
    ("queue", {"queue": "nobody"}, QUEUE_UNKNOWN),
    ("queue", {"queue": "a\0"}, QUEUE_UNKNOWN),
    ("pause_queue", {"queue": "nobody"}, {"http": None, "else": QUEUE_UNKNOWN}),
    ("resume_queue", {"queue": "a\0"}, {"http": None, "else": QUEUE_UNKNOWN}),
    ("set_queue", {"queue": "a\0", "importance": 1}, INVALID_SETTING),
    ("set_queue", {"queue": LONG, "importance": 1}, INVALID_SETTING),
    ("set_queue", {"queue": "mail", "importance": 10}, INVALID_SETTING),
    ("set_queue", {"queue": "mail", "importance": -1}, INVALID_SETTING),
    ("set_queue", {"queue": "mail", "slots_min": 4, "slots_max": 3}, INVALID_SETTING),
    ("set_queue", {"queue": "mail", "slots_max": 10**9}, INVALID_SETTING),
    ("set_queue", {"queue": "mail", "retries": 1001}, INVALID_SETTING),
    (
        "set_queue",
        {"queue": "mail", "retries": 1.5},
        {"http": "422 web.invalid_input", "else": INVALID_SETTING},
    ),
    *(
        ("set_queue", {"queue": "mail", "decisions": given}, {**NOT_AS_WORDS, "else": refusal})
        for given, refusal in (
            ({"-no": None}, INVALID_SETTING),
            ({"a b": None}, INVALID_SETTING),
            ({"yes": ""}, INVALID_SETTING),
            ({"yes": "mail"}, INVALID_SETTING),
            (dict.fromkeys(map(str, range(10))), INVALID_SETTING),
        )
    ),
]
HERE = {"limiter": "mail", "lane": "x"}
LANES = [
    ("lane", {"limiter": "mail", "lane": "nobody"}, LANE_UNKNOWN),
    ("lane", {"limiter": "\0", "lane": "x"}, LIMITER_UNKNOWN),
    ("reset_lane", {"limiter": "mail", "lane": "nobody"}, LANE_UNKNOWN),
    ("pause_lane", {"limiter": "mail", "lane": "nobody"}, LANE_UNKNOWN),
    ("resume_lane", {"limiter": "mail", "lane": "nobody"}, LANE_UNKNOWN),
    ("lanes", {"limiter": "mail", "limit": 0}, {**BY_SHAPE, "else": INVALID_FILTER}),
    ("lanes", {"limiter": "mail", "limit": 1001}, {**BY_SHAPE, "else": INVALID_FILTER}),
    ("reset_limiter", {"limiter": "nobody"}, LIMITER_UNKNOWN),
    ("remove_limiter", {"limiter": "nobody"}, LIMITER_UNKNOWN),
    ("remove_limiter", {"limiter": "\0"}, LIMITER_UNKNOWN),
    ("limiter", {"limiter": "nobody"}, LIMITER_UNKNOWN),
    ("limiter", {"limiter": "\0"}, LIMITER_UNKNOWN),
    ("set_lane", {**HERE, "starts_max": 0, "window_s": 60}, INVALID_JOB),
    ("set_lane", {**HERE, "starts_max": -1, "window_s": 60}, INVALID_JOB),
    ("set_lane", {**HERE, "starts_max": 5, "window_s": 0}, INVALID_JOB),
    ("set_lane", {**HERE, "starts_max": 5, "window_s": 1e9}, {"else": INVALID_JOB}),
    ("set_lane", {**HERE, "starts_max": 5}, {**NOT_AS_WORDS, "else": INVALID_JOB}),
    ("set_lane", {**HERE, "window_s": 5}, INVALID_JOB),
    ("set_lane", {**HERE, "concurrency": 0}, INVALID_JOB),
    ("set_lane", {**HERE, "concurrency": -1}, INVALID_JOB),
    ("set_lane", {**HERE, "weight": 0}, INVALID_JOB),
    ("set_lane", {**HERE, "weight": 101}, INVALID_JOB),
    ("set_lane", {"limiter": "mail", "lane": LONG}, INVALID_JOB),
    ("set_lane", {"limiter": LONG, "lane": "x"}, INVALID_JOB),
    ("set_lane", {"limiter": "mail", "lane": "a\nb"}, INVALID_JOB),
    ("set_limiter", {"limiter": "mail", "concurrency": 0}, INVALID_JOB),
    ("set_limiter", {"limiter": "mail", "starts_max": 0, "window_s": 1}, INVALID_JOB),
    ("set_limiter", {"limiter": "mail", "slack_s": 0}, INVALID_JOB),
    ("set_limiter", {"limiter": "mail", "slack_s": 61}, INVALID_JOB),
    ("set_limiter", {"limiter": LONG, "concurrency": 1}, INVALID_JOB),
]
NEW = {"name": "new", "spec": "0 4 * * *", "queue": "mail"}
CRONS = [
    ({**NEW, "spec": "soon"}, INVALID_CRON),
    ({**NEW, "spec": "0 0 30 2 *"}, INVALID_CRON),
    ({**NEW, "spec": ""}, INVALID_CRON),
    ({**NEW, "tz": "Mars/Olympus"}, INVALID_CRON),
    ({**NEW, "tz": "../../etc/passwd"}, INVALID_CRON),
    ({**NEW, "name": ".."}, INVALID_CRON),
    ({**NEW, "name": "a b"}, "422 invalid_id"),
    ({**NEW, "name": LONG}, "422 invalid_id"),
    ({**NEW, "queue": "nobody"}, QUEUE_UNKNOWN),
    ({**NEW, "priority": 99}, INVALID_JOB),
    ({**NEW, "payload": "x" * 70_000}, "413 jobs.payload_too_large"),
    ({**NEW, "name": "nightly"}, "409 jobs.cron_exists"),
]
CALLS = [
    *(("enqueue", {"queue": "mail", **fault}, refusal) for fault, refusal in ENQUEUES),
    *SINGLE,
    *(("find", fault, refusal) for fault, refusal in SEARCHES),
    *(("bulk", fault, refusal) for fault, refusal in BULKS),
    *TAKES,
    *QUEUES,
    *LANES,
    *(("add_cron", fault, refusal) for fault, refusal in CRONS),
    *((verb, {"name": "nobody"}, CRON_UNKNOWN) for verb in ("run_cron", "pause_cron")),
    *((verb, {"name": "nobody"}, CRON_UNKNOWN) for verb in ("resume_cron", "remove_cron")),
    ("minutes", {"queue": "nobody"}, QUEUE_UNKNOWN),
    ("hours", {"queue": "nobody"}, QUEUE_UNKNOWN),
    ("minutes", {"queue": "a\0"}, QUEUE_UNKNOWN),
    ("drain", {"host": "nobody"}, "404 jobs.host_unknown"),
    ("undrain", {"host": "a\0"}, "404 jobs.host_unknown"),
    ("forget", {"host": "nobody"}, "404 jobs.host_unknown"),
]
JOBS = "/v1/queues/mail/jobs"
ACK = "/v1/leases/$lease/ack"
SHAPE = "422 web.invalid_input"
REQUESTS = [
    ("POST", JOBS, b"", "400 web.malformed_json"),
    ("POST", JOBS, b"{", "400 web.malformed_json"),
    ("POST", JOBS, b'{"payload": "\xff"}', "400 web.malformed_json"),
    ("POST", JOBS, b'{"payload": "\\ud800"}', "400 web.malformed_json"),
    ("POST", JOBS, b"[" * 100_000, SHAPE),
    ("POST", JOBS, b"{}{}", "400 web.malformed_json"),
    ("POST", JOBS, b"3", SHAPE),
    ("POST", JOBS, b'"text"', SHAPE),
    ("POST", JOBS, b"null", SHAPE),
    ("POST", JOBS, b'{"no_such": 1}', SHAPE),
    ("POST", JOBS, b'{"priority": "5"}', SHAPE),
    ("POST", JOBS, b'{"priority": true}', SHAPE),
    ("POST", JOBS, b'[{"at": "noon"}]', SHAPE),
    ("POST", JOBS, b'{"unique": 7}', SHAPE),
    ("POST", "/v1/queues/nobody/jobs", b"[]", QUEUE_UNKNOWN),
    ("GET", "/v1/jobs/x", None, JOB_UNKNOWN),
    ("GET", "/v1/jobs/1_0", None, JOB_UNKNOWN),
    ("GET", "/v1/jobs/+1", None, JOB_UNKNOWN),
    ("GET", "/v1/jobs/%EF%BC%91/why", None, JOB_UNKNOWN),
    ("DELETE", "/v1/jobs/99999999999999999999", None, JOB_UNKNOWN),
    ("DELETE", "/v1/jobs/$ready?keep=perhaps", None, SHAPE),
    ("GET", "/v1/jobs?cursor=x", None, "400 cursor.invalid"),
    ("GET", "/v1/jobs?cursor=", None, "400 cursor.invalid"),
    ("GET", "/v1/jobs?cursor=" + "A" * 2000, None, "400 cursor.invalid"),
    ("GET", "/v1/jobs?limit=many", None, SHAPE),
    ("POST", "/v1/jobs/bulk", b'{"action": "delete", "filter": {"all": true}}', SHAPE),
    ("POST", "/v1/jobs/bulk", b'{"filter": {"queue": "mail"}}', SHAPE),
    (
        "POST",
        "/v1/jobs/bulk",
        b'{"action": "delete", "filter": {"queue": "mail"}, "cursor": "x"}',
        "400 cursor.invalid",
    ),
    ("POST", "/v1/queues/mail/take?n=all", None, SHAPE),
    ("POST", "/v1/queues/mail/take?lease=soon", None, INVALID_TAKE),
    ("POST", "/v1/queues/mail/take?wait=31s", None, INVALID_TAKE),
    ("POST", ACK, b"{}", INVALID_TAKE),
    ("POST", "/v1/leases/x/ack", b"{}", LEASE_LOST),
    ("POST", "/v1/leases/0/ack", b"{}", LEASE_LOST),
    ("POST", ACK, b'{"outcomes": {"x": {"outcome": "done"}}}', SHAPE),
    ("POST", ACK, b'{"rest": {"outcome": "done", "more": 1}}', SHAPE),
    ("POST", "/v1/leases/x/ack", b'{"rest": {}}', LEASE_LOST),
    ("POST", "/v1/leases/-1/extend", None, LEASE_LOST),
    ("PUT", "/v1/queues/nobody", b'{"importance": 1}', QUEUE_UNKNOWN),
    ("PUT", "/v1/queues/nobody?create=false", b"{}", QUEUE_UNKNOWN),
    ("PUT", "/v1/queues/nobody?create=perhaps", b"{}", SHAPE),
    ("PUT", "/v1/queues/mail", b'{"batch": 5}', SHAPE),
    ("PUT", "/v1/queues/mail", b'{"paused": "yes"}', SHAPE),
    ("PUT", "/v1/queues/mail", b'{"paused": null}', SHAPE),
    ("PUT", "/v1/limiters/mail/lanes/x", b'{"concurrency": 1.5}', SHAPE),
    ("POST", "/v1/limiters/mail/lanes/x/spend", b'{"starts": 0}', INVALID_JOB),
    ("POST", "/v1/limiters/mail/lanes/x/spend", b'{"wait_max_s": 4000}', INVALID_JOB),
    ("GET", "/v1/queues/mail/minutes?from=2026-01-01T00:00:00Z", None, "422 jobs.invalid_filter"),
    ("GET", "/v1/fleet/decisions?before=x", None, SHAPE),
    ("GET", "/v1/queues/mail/minutes?from=yesterday", None, "422 jobs.invalid_filter"),
    ("GET", "/v1/queues/mail/minutes?to=0001-01-01T00:00:00Z", None, "422 jobs.invalid_filter"),
    ("GET", "/v1/queues/mail/hours?from=2020-01-01T00:00:00Z", None, "422 jobs.invalid_filter"),
    ("GET", "/v1/crons/nobody", None, CRON_UNKNOWN),
    ("GET", "/v1/crons/%00", None, "422 invalid_id"),
    ("PUT", "/v1/crons/nobody", b'{"paused": true}', CRON_UNKNOWN),
    ("PUT", "/v1/crons/declared", b'{"spec": "0 5 * * *"}', "409 jobs.cron_fixed"),
    ("DELETE", "/v1/crons/declared", None, "409 jobs.cron_fixed"),
    ("POST", "/v1/crons", b'{"name": "new", "spec": "0 4 * * *", "queue": "\\u0000"}', SHAPE),
]
"""Requests that only HTTP can express."""
COMMANDS = [
    (("jobs", "add", "mail", "{"), INVALID_JOB),
    (("jobs", "add", "mail", "{}", "--after", "soon"), INVALID_JOB),
    (("jobs", "add", "mail", "{}", "--at", "noon"), INVALID_JOB),
    (("jobs", "add", "mail", "{}", "--priority", "first"), "422 usage"),
    (("jobs", "add"), "422 usage"),
    (("jobs", "show", "x"), "422 usage"),
    (("jobs", "bulk", "cancel", "--queue", "mail", "--older", "long"), INVALID_FILTER),
    (("jobs", "take", "mail", "--lease", "soon"), INVALID_TAKE),
    (("jobs", "extend", "$lease", "--lease", "soon"), INVALID_TAKE),
    (("jobs", "take", "mail", "--wait", "31s"), INVALID_TAKE),
    (("jobs", "ack", "$lease", "--done", "$leased", "--fail", "$leased"), INVALID_TAKE),
    (("jobs", "ack", "$lease", "--why", "because"), INVALID_TAKE),
    (("jobs", "ack", "$lease", "--done", "x"), "422 usage"),
    (("jobs", "ack", "$lease", "--by", "ann"), INVALID_TAKE),
    (("jobs", "ack", "$lease", "--decide", "$leased", "approve"), INVALID_TAKE),
    (("queues", "set", "mail", "--decisions", "a b"), INVALID_SETTING),
    (("queues", "set", "mail", "--decisions", "a,a"), INVALID_SETTING),
    (("queues", "set", "mail", "--decisions", "a=mail"), INVALID_SETTING),
    (("queues", "set", "nobody", "--importance", "1"), QUEUE_UNKNOWN),
    (("queues", "set", "mail", "--importance", "high"), INVALID_SETTING),
    (("lanes", "set", "mail", "x", "--rate", "fast"), INVALID_JOB),
    (("lanes", "set", "mail", "x", "--rate", "0/m"), INVALID_JOB),
    (("lanes", "limiter", "mail", "--slack", "soon"), INVALID_JOB),
    (("lanes", "limiter", "mail", "--as-declared", "--rate", "1/m"), INVALID_JOB),
    (("lanes", "spend", "mail", "x", "--starts", "0"), INVALID_JOB),
    (("lanes", "spend", "mail", "x", "--wait", "soon"), INVALID_JOB),
    (("crons", "add", "new", "0 4 * * *", "mail", "{"), INVALID_CRON),
    (("fleet", "minutes", "mail", "--from", "yesterday"), "422 jobs.invalid_filter"),
]
"""Words that only a command can express."""
