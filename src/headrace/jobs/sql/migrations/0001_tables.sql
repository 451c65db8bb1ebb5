-- Tables of the jobs room. A job's row moves: job_ready or lane_job -> job_lease -> deleted, back
-- to waiting, job_failed or job_done. Waiting jobs need no status column, and one lease row holds
-- a whole batch, so that an ack is one delete.
--
-- Each function of the following files does all or nothing. Functions set the planner options that
-- they need: a plan cached while a table was empty would otherwise stay a sequential scan.

CREATE SEQUENCE headrace.job_id AS bigint;
CREATE SEQUENCE headrace.job_group_id AS bigint;

-- Queues. ----------------------------------------------------------------------------------------

-- A queue with what running code declares of it. A row of queue_override wins over these columns.
CREATE TABLE headrace.queue (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    limiter text NOT NULL,              -- limiter of its lanes
    paused boolean NOT NULL DEFAULT false,
    needs_lane boolean NOT NULL DEFAULT false,  -- refuse jobs without a lane
    importance smallint NOT NULL DEFAULT 5 CHECK (importance BETWEEN 0 AND 9),
    slots_min integer NOT NULL DEFAULT 0 CHECK (slots_min >= 0),
    slots_max integer NOT NULL DEFAULT 100000 CHECK (slots_max >= slots_min),
    batch integer NOT NULL DEFAULT 1 CHECK (batch > 0),
    retries integer NOT NULL DEFAULT 5 CHECK (retries >= 0),
    timeout_s double precision NOT NULL DEFAULT 7200,
    tag text,                           -- only hosts with this tag may work the queue
    keep_done_s double precision,       -- NULL: delete done jobs
    keep_result boolean NOT NULL DEFAULT false,
    decisions text NOT NULL DEFAULT '{}',   -- JSON: target queue or null by decision
    declared_at timestamptz NOT NULL DEFAULT now(),
    -- Hidden, as an operator removed it. Processes that know its id may still enqueue: a job in it
    -- brings it back, so the row stays.
    is_removed boolean NOT NULL DEFAULT false
);

-- Settings of a queue made by an operator. NULL: the declared value holds.
CREATE TABLE headrace.queue_override (
    queue integer PRIMARY KEY REFERENCES headrace.queue,
    importance smallint CHECK (importance BETWEEN 0 AND 9),
    slots_min integer CHECK (slots_min >= 0),
    slots_max integer CHECK (slots_max >= 0),
    retries integer CHECK (retries >= 0),
    decisions text
);

-- Former names of a queue, so that code with an old name still reaches it.
CREATE TABLE headrace.queue_alias (
    name text PRIMARY KEY,
    queue integer NOT NULL REFERENCES headrace.queue
);

-- Settings in force: as declared, unless an operator set others.
CREATE VIEW headrace.queue_setting AS
SELECT q.id, q.name, q.limiter, q.paused, q.is_removed, q.needs_lane, q.batch, q.timeout_s,
       q.tag, q.keep_done_s, q.keep_result, coalesce(o.retries, q.retries) AS retries,
       coalesce(o.importance, q.importance) AS importance,
       coalesce(o.slots_min, q.slots_min) AS slots_min,
       coalesce(o.slots_max, q.slots_max) AS slots_max,
       coalesce(o.decisions, q.decisions) AS decisions, to_json(o)::text AS override,
       ARRAY(SELECT a.name FROM headrace.queue_alias a WHERE a.queue = q.id
             ORDER BY a.name) AS aliases
FROM headrace.queue q LEFT JOIN headrace.queue_override o ON o.queue = q.id;

-- Waiting jobs. ----------------------------------------------------------------------------------

-- Due jobs without a lane, and every job whose run_at lies in the future.
CREATE TABLE headrace.job_ready (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamptz NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL DEFAULT 0,
    losses smallint NOT NULL DEFAULT 0,     -- runs that ended with the death of the process
    version smallint NOT NULL DEFAULT 1,    -- of the payload's shape; a task can upgrade old ones
    lane text,
    unique_key text,
    headers text,                       -- traceparent, and own options: see headers.py
    last_error text,
    payload bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_ready_claim ON headrace.job_ready (queue, priority, run_at, id);
CREATE UNIQUE INDEX job_ready_id ON headrace.job_ready (id);
CREATE INDEX job_ready_lane_due ON headrace.job_ready (run_at) WHERE lane IS NOT NULL;
CREATE INDEX job_ready_lane ON headrace.job_ready (lane, id) WHERE lane IS NOT NULL;
ALTER TABLE headrace.job_ready ALTER payload SET STORAGE EXTERNAL;

-- Due jobs of lanes. The columns are those of job_ready, in the same order.
CREATE TABLE headrace.lane_job (LIKE headrace.job_ready INCLUDING DEFAULTS INCLUDING STORAGE)
WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
      autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_cost_delay = 0);
ALTER TABLE headrace.lane_job ALTER lane SET NOT NULL;
CREATE INDEX lane_job_claim ON headrace.lane_job (queue, lane, priority, id);
CREATE UNIQUE INDEX lane_job_id ON headrace.lane_job (id);

-- Unique keys of unfinished jobs, and of done ones that are kept for a time.
CREATE TABLE headrace.job_unique (
    queue integer NOT NULL,
    key text NOT NULL,
    job_id bigint NOT NULL,
    kept_until timestamptz,             -- the end of its job does not release it before
    is_done boolean NOT NULL DEFAULT false,
    PRIMARY KEY (queue, key)
);
CREATE INDEX job_unique_kept ON headrace.job_unique (kept_until) WHERE is_done;

-- Unfinished jobs of chains, in order of n. The first of a chain may run; the others are in
-- job_ready with run_at in the year 9999, and are due at due_at or when they become the first.
CREATE TABLE headrace.job_chain (
    queue integer NOT NULL,
    chain text NOT NULL,
    n bigint GENERATED ALWAYS AS IDENTITY,
    job_id bigint NOT NULL,
    due_at timestamptz NOT NULL,
    PRIMARY KEY (queue, chain, n)
);
CREATE UNIQUE INDEX job_chain_job ON headrace.job_chain (job_id);

-- Groups: unfinished members, and the callback that the last member enqueues. An open group counts
-- one member more than it has, so that it cannot end while it is being filled.
CREATE TABLE headrace.job_group (
    id bigint PRIMARY KEY,
    pending integer NOT NULL,
    done integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    cancelled integer NOT NULL DEFAULT 0,
    quarantined integer NOT NULL DEFAULT 0,
    queue integer NOT NULL,
    priority smallint NOT NULL,
    version smallint NOT NULL DEFAULT 1,
    run_at timestamptz,
    delay_s double precision,
    opened_at timestamptz,              -- start of the open block; NULL: closed
    keeps_results boolean NOT NULL DEFAULT false,   -- members' results go to group_result
    workflow bigint,                    -- the last member wakes this job and enqueues nothing
    lane text,
    unique_key text,
    headers text,
    payload bytea NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX job_group_opened ON headrace.job_group (opened_at) WHERE opened_at IS NOT NULL;

-- Leases. ----------------------------------------------------------------------------------------

-- One row per running worker host. Leases refer to it, so one small update renews them all, and a
-- handler's open transaction cannot block the renewal.
CREATE TABLE headrace.host (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    queues integer[] NOT NULL,
    -- 'agent' and 'work' run handlers; 'taker' is one lease taken over the API or by a person.
    kind text NOT NULL DEFAULT 'work' CHECK (kind IN ('agent', 'work', 'taker')),
    tags text[] NOT NULL DEFAULT '{}',
    cores integer NOT NULL DEFAULT 1,
    capacity integer NOT NULL DEFAULT 0,
    load_per_core real NOT NULL DEFAULT 0,
    -- Share of the last minute in which tasks of the host's slots waited for a core; 0 while the
    -- slots use less than half of the cores.
    cpu_pressure real NOT NULL DEFAULT 0,
    is_draining boolean NOT NULL DEFAULT false,
    slots jsonb NOT NULL DEFAULT '[]',
    jobs_ended bigint NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    reported_at timestamptz
) WITH (fillfactor = 50);

-- Leased batches, one row each, with the jobs as parallel arrays.
CREATE TABLE headrace.job_lease (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    host bigint NOT NULL,
    queue integer NOT NULL,
    jobs integer NOT NULL,              -- number of jobs, so that an ack need not read the arrays
    is_plain boolean NOT NULL DEFAULT false,    -- no keys, groups or kept results: one delete acks
    limiter text,                       -- set: jobs of lanes, with starts granted at granted_at
    is_counted boolean NOT NULL DEFAULT false,  -- a lane of it had a concurrency limit when claimed
    granted_at timestamptz NOT NULL,
    settled bigint[] NOT NULL DEFAULT '{}',     -- ids already acked
    acked bigint[] NOT NULL DEFAULT '{}',       -- of a taker: hashes of its acked outcomes
    ids bigint[] NOT NULL,
    run_ats timestamptz[] NOT NULL,
    group_ids bigint[] NOT NULL,
    priorities smallint[] NOT NULL,
    attempts smallint[] NOT NULL,
    losses smallint[] NOT NULL,
    versions smallint[] NOT NULL,
    lanes text[] NOT NULL,
    unique_keys text[] NOT NULL,
    headers text[] NOT NULL,
    payloads bytea[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_threshold = 500,
        toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_lease_host ON headrace.job_lease (host);
-- No compression: it costs CPU at the claim, and an ack reads none of these columns.
ALTER TABLE headrace.job_lease
    ALTER ids SET STORAGE EXTERNAL, ALTER run_ats SET STORAGE EXTERNAL,
    ALTER group_ids SET STORAGE EXTERNAL, ALTER priorities SET STORAGE EXTERNAL,
    ALTER attempts SET STORAGE EXTERNAL, ALTER losses SET STORAGE EXTERNAL,
    ALTER versions SET STORAGE EXTERNAL, ALTER lanes SET STORAGE EXTERNAL,
    ALTER unique_keys SET STORAGE EXTERNAL, ALTER headers SET STORAGE EXTERNAL,
    ALTER payloads SET STORAGE EXTERNAL;

-- Progress reported by running jobs. It belongs to the lease and is deleted with it. Unlogged:
-- after a crash the next report writes it again.
CREATE UNLOGGED TABLE headrace.job_progress (
    job_id bigint PRIMARY KEY,
    lease_id bigint NOT NULL REFERENCES headrace.job_lease (id) ON DELETE CASCADE,
    ratio real NOT NULL,
    text text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
CREATE INDEX job_progress_lease ON headrace.job_progress (lease_id);

-- A job of a lease with its outcome: the argument of the settle functions.
CREATE TYPE headrace.settlement AS (
    lease bigint, ord integer, id bigint, queue integer, limiter text, granted_at timestamptz,
    lane text, group_id bigint, unique_key text, outcome text, delay_s double precision, error text,
    traceback text, result bytea, target integer
);

-- Ended jobs. ------------------------------------------------------------------------------------

-- Jobs that failed, were cancelled or were quarantined.
CREATE TABLE headrace.job_failed (
    id bigint PRIMARY KEY,
    queue integer NOT NULL,
    state text NOT NULL CHECK (state IN ('failed', 'cancelled', 'quarantined')),
    run_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL DEFAULT now(),
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    losses smallint NOT NULL,
    version smallint NOT NULL DEFAULT 1,
    lane text,
    unique_key text,
    headers text,
    error text NOT NULL,
    traceback text NOT NULL,
    payload bytea NOT NULL
);
CREATE INDEX job_failed_ended ON headrace.job_failed (ended_at);
-- With the state, the counts of a queue read no rows of the table.
CREATE INDEX job_failed_queue ON headrace.job_failed (queue, id) INCLUDE (state);
CREATE INDEX job_failed_lane ON headrace.job_failed (lane, id) WHERE lane IS NOT NULL;

-- Done jobs that their queue keeps, with their results. Partitions by drop_at are dropped whole;
-- the default partition holds rows that no partition covers yet.
CREATE TABLE headrace.job_done (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    drop_at timestamptz NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    losses smallint NOT NULL,
    lane text,
    unique_key text,
    headers text,
    version smallint NOT NULL,
    payload bytea NOT NULL,
    result bytea,
    PRIMARY KEY (id, drop_at)
) PARTITION BY RANGE (drop_at);
CREATE TABLE headrace.job_done_rest PARTITION OF headrace.job_done DEFAULT;
CREATE INDEX job_done_rest_drop ON headrace.job_done_rest (drop_at);
CREATE INDEX job_done_queue ON headrace.job_done (queue, id);

-- Lanes and limiters. ----------------------------------------------------------------------------

-- Limits of lanes without limits of their own. NULL: no limit.
CREATE TABLE headrace.limiter (
    name text PRIMARY KEY,
    starts_max integer CHECK (starts_max > 0),
    window_s double precision CHECK (window_s > 0),
    slack_s double precision NOT NULL DEFAULT 0.25,
    concurrency integer CHECK (concurrency > 0),
    is_set boolean NOT NULL DEFAULT false,      -- set by an operator; declarations do not change it
    is_spread boolean NOT NULL DEFAULT true,    -- every lane that follows it has these limits
    -- Limits that code declared last, for a reset. declared_slack_s NULL: none declared yet.
    declared_starts_max integer,
    declared_window_s double precision,
    declared_slack_s double precision,
    declared_concurrency integer,
    CHECK ((starts_max IS NULL) = (window_s IS NULL))
);

-- The lane row is the only mutex of all that belongs to the lane. NULL limits: none. at[i], n[i]:
-- n starts were granted at that instant. free_at: when the rate allows one more. Jobs in flight are
-- counted only while the lane has a concurrency limit, so that settling a job of another lane
-- writes nothing: inflight has the jobs of leases above counted_from, uncounted those of older
-- leases when last read from job_lease (never too few).
CREATE TABLE headrace.lane (
    limiter text NOT NULL,
    name text NOT NULL,
    starts_max integer CHECK (starts_max > 0),
    window_s double precision CHECK (window_s > 0),
    slack_s double precision NOT NULL DEFAULT 0.25,
    concurrency integer CHECK (concurrency > 0),
    weight integer NOT NULL DEFAULT 1 CHECK (weight > 0),
    paused boolean NOT NULL DEFAULT false,
    is_own boolean NOT NULL DEFAULT false,      -- false: it follows its limiter's limits
    inflight integer NOT NULL DEFAULT 0,
    uncounted integer NOT NULL DEFAULT 0,
    counted_from bigint NOT NULL DEFAULT 0,
    free_at timestamptz NOT NULL DEFAULT '-infinity',
    started_at timestamptz,
    at timestamptz[] NOT NULL DEFAULT '{}',
    n integer[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (limiter, name),
    CHECK ((starts_max IS NULL) = (window_s IS NULL))
) WITH (fillfactor = 40, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Waiting jobs of a lane in one queue. ready_at: when a claim should look; it may be early, never
-- late; infinity: parked. credit: what remains of a round-robin share that the end of a claim cut
-- short; the lane's next claim uses it up first.
CREATE TABLE headrace.lane_queue (
    limiter text NOT NULL,
    lane text NOT NULL,
    queue integer NOT NULL,
    waiting integer NOT NULL DEFAULT 0,
    credit integer NOT NULL DEFAULT 0,
    ready_at timestamptz NOT NULL DEFAULT 'infinity',
    PRIMARY KEY (limiter, lane, queue)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_queue_ready ON headrace.lane_queue (queue, ready_at) WHERE ready_at < 'infinity';

-- Journal of jobs added to lanes and removed from them. Enqueue writes here and never locks a
-- lane: a lane lock held until the caller's commit would deadlock. fold_lanes adds the rows up.
CREATE TABLE headrace.lane_event (
    id bigint GENERATED ALWAYS AS IDENTITY,
    limiter text NOT NULL,
    lane text NOT NULL,
    queue integer NOT NULL,
    k integer NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_event_queue ON headrace.lane_event (queue, id);

-- Counts. ----------------------------------------------------------------------------------------

-- Counts that fold_counts has not added up yet. Each is written in the transaction of the claim or
-- the settlement that it counts, as a row of its own, so none is lost or counted twice. NULL:
-- zero.
CREATE TABLE headrace.job_count (
    at timestamptz NOT NULL DEFAULT now(),
    queue integer NOT NULL,
    done integer,
    failed integer,                     -- failed, quarantined
    cancelled integer,                  -- cancelled by its handler or while it ran
    retried integer,                    -- waits for a later moment, or in another queue
    lost integer,                       -- waits again, since its process died
    claimed integer,
    calls integer,
    run_s double precision,
    wait_s double precision,
    wait_max_s double precision,
    slot_s double precision
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_count_at ON headrace.job_count (at);

-- Lock of fold_counts. From whole_at on, the next call reads the whole of job_count.
CREATE TABLE headrace.job_count_fold (
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one),
    whole_at timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);
INSERT INTO headrace.job_count_fold DEFAULT VALUES;

-- Counts of each queue per minute.
CREATE TABLE headrace.queue_minute (
    queue integer NOT NULL,
    minute timestamptz NOT NULL,
    done bigint NOT NULL,
    failed bigint NOT NULL,
    cancelled bigint NOT NULL DEFAULT 0,
    retried bigint NOT NULL,
    lost bigint NOT NULL,
    claimed bigint NOT NULL DEFAULT 0,
    calls bigint NOT NULL,
    run_s double precision NOT NULL,        -- run time of handlers
    wait_s double precision NOT NULL,       -- from due to claimed, summed over claimed jobs
    wait_max_s double precision NOT NULL,
    slot_s double precision NOT NULL,       -- life time of the slots that worked the queue
    -- Backlog at the last count of the minute; NULL if there was none.
    ready integer,
    scheduled integer,
    running integer,
    failed_kept integer,                    -- failed or quarantined jobs that are kept
    oldest_s double precision,              -- age of the oldest ready job
    PRIMARY KEY (queue, minute)
) WITH (fillfactor = 50);
CREATE INDEX queue_minute_minute ON headrace.queue_minute (minute);

-- The same per hour; the backlog is the highest of the hour's minutes.
CREATE TABLE headrace.queue_hour (
    LIKE headrace.queue_minute INCLUDING DEFAULTS, PRIMARY KEY (queue, minute)
) WITH (fillfactor = 70);
ALTER TABLE headrace.queue_hour RENAME minute TO hour;
CREATE INDEX queue_hour_hour ON headrace.queue_hour (hour);

-- Counts of each queue since its creation. They never decrease.
CREATE TABLE headrace.queue_total (
    queue integer PRIMARY KEY,
    done bigint NOT NULL,
    failed bigint NOT NULL,
    cancelled bigint NOT NULL DEFAULT 0,
    retried bigint NOT NULL,
    lost bigint NOT NULL,
    calls bigint NOT NULL,
    run_s double precision NOT NULL,
    wait_s double precision NOT NULL,
    slot_s double precision NOT NULL
) WITH (fillfactor = 50);

-- Fleet. -----------------------------------------------------------------------------------------

-- The plan's head. `leader` may write until `leads_until`. `term` grows with each change of the
-- leader and `version` with each change of the map, so a leader that was suspended is refused when
-- it resumes.
CREATE TABLE headrace.fleet_plan (
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one),
    leader text,
    leads_until timestamptz NOT NULL DEFAULT '-infinity',
    term bigint NOT NULL DEFAULT 0,
    version bigint NOT NULL DEFAULT 0,
    planned_at timestamptz
) WITH (fillfactor = 50);
INSERT INTO headrace.fleet_plan DEFAULT VALUES;

-- The plan's map: slots of a host bound to a queue. Slots in no row float between queues.
CREATE TABLE headrace.fleet_slot (
    host text NOT NULL,
    queue integer NOT NULL,
    slots integer NOT NULL CHECK (slots > 0),
    PRIMARY KEY (host, queue)
) WITH (fillfactor = 50);

-- Changes of the plan with their reasons.
CREATE TABLE headrace.fleet_decision (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    version bigint NOT NULL,
    host text NOT NULL,
    queue text NOT NULL,
    before integer NOT NULL,
    after integer NOT NULL,
    code text NOT NULL,
    why text NOT NULL
);
CREATE INDEX fleet_decision_at ON headrace.fleet_decision (at);

-- Slots of a queue with a maximum that each host may work at once, floating slots included. The
-- sum over hosts never exceeds the maximum: one host gives up slots before another receives them.
-- An allowance ends with its host row, 5 s after that expired, since the host's slots are killed
-- within that time.
CREATE TABLE headrace.slot_allowance (
    queue integer NOT NULL,
    host bigint NOT NULL REFERENCES headrace.host (id) ON DELETE CASCADE,
    slots integer NOT NULL CHECK (slots >= 0),
    is_short boolean NOT NULL DEFAULT false,    -- the host requested more
    call bigint NOT NULL,                       -- number of the host's call that wrote the row
    PRIMARY KEY (queue, host)
) WITH (fillfactor = 50);
CREATE INDEX slot_allowance_host ON headrace.slot_allowance (host);

-- One row per violation of an alert rule. cleared_at NULL: it is still open.
CREATE TABLE headrace.alert (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rule text NOT NULL,
    subject text NOT NULL,
    text text NOT NULL,
    raised_at timestamptz NOT NULL DEFAULT now(),
    cleared_at timestamptz,
    is_raise_sent boolean NOT NULL DEFAULT false,   -- the webhook accepted it
    is_clear_sent boolean NOT NULL DEFAULT false
);
CREATE UNIQUE INDEX alert_open ON headrace.alert (rule, subject) WHERE cleared_at IS NULL;
CREATE INDEX alert_raised ON headrace.alert (raised_at);

-- Recurring jobs. One transaction moves next_at and enqueues the job.
CREATE TABLE headrace.cron (
    name text PRIMARY KEY,
    spec text NOT NULL,
    tz text NOT NULL,
    queue text NOT NULL,
    payload bytea NOT NULL,
    priority smallint NOT NULL,
    next_at timestamptz NOT NULL,
    last_at timestamptz,
    last_job bigint,
    paused boolean NOT NULL DEFAULT false,
    source text NOT NULL CHECK (source IN ('code', 'api')),
    declared_at timestamptz NOT NULL DEFAULT now(),     -- last declaration by running code
    error text
);
CREATE INDEX cron_next ON headrace.cron (next_at) WHERE NOT paused;
