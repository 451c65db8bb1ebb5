-- The tables of the jobs room. Rows move between them: job_ready or lane_job -> job_lease -> away,
-- back, or into job_failed. Why two tables instead of a status column, and a lease row a batch instead
-- of a job: see the room's page; measured on PostgreSQL 18.

CREATE SEQUENCE headrace.job_id AS bigint;
CREATE SEQUENCE headrace.job_group_id AS bigint;

CREATE TABLE headrace.queue (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    limiter text NOT NULL,              -- where the lanes of its jobs belong
    paused boolean NOT NULL DEFAULT false
);

-- One row a running worker host. Leases hang on it, so that one small update renews them all and a
-- handler's own open transaction can never block the renewal.
CREATE TABLE headrace.host (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    queues integer[] NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
) WITH (fillfactor = 50);

-- Jobs that wait: due ones, future ones, and jobs of lanes that are not due (lane set).
CREATE TABLE headrace.job_ready (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamptz NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL DEFAULT 0,
    losses smallint NOT NULL DEFAULT 0,
    lane text,
    unique_key text,
    traceparent text,
    payload bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_ready_claim ON headrace.job_ready (queue, priority, run_at, id);
CREATE UNIQUE INDEX job_ready_id ON headrace.job_ready (id);
CREATE INDEX job_ready_lane_due ON headrace.job_ready (run_at) WHERE lane IS NOT NULL;
ALTER TABLE headrace.job_ready ALTER payload SET STORAGE EXTERNAL;

-- Handed-out batches, one row each, the jobs as parallel arrays. `settled`: ids already acked.
CREATE TABLE headrace.job_lease (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    host bigint NOT NULL,
    queue integer NOT NULL,
    limiter text,                       -- set: jobs of lanes, granted at granted_at
    granted_at timestamptz NOT NULL,
    settled bigint[] NOT NULL DEFAULT '{}',
    ids bigint[] NOT NULL,
    run_ats timestamptz[] NOT NULL,
    group_ids bigint[] NOT NULL,
    priorities smallint[] NOT NULL,
    attempts smallint[] NOT NULL,
    losses smallint[] NOT NULL,
    lanes text[] NOT NULL,
    unique_keys text[] NOT NULL,
    traceparents text[] NOT NULL,
    payloads bytea[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_threshold = 500,
        toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_lease_host ON headrace.job_lease (host);
-- No compression: it would cost CPU on the way in, and an ack reads none of these.
ALTER TABLE headrace.job_lease
    ALTER ids SET STORAGE EXTERNAL, ALTER run_ats SET STORAGE EXTERNAL,
    ALTER group_ids SET STORAGE EXTERNAL, ALTER priorities SET STORAGE EXTERNAL,
    ALTER attempts SET STORAGE EXTERNAL, ALTER losses SET STORAGE EXTERNAL,
    ALTER lanes SET STORAGE EXTERNAL, ALTER unique_keys SET STORAGE EXTERNAL,
    ALTER traceparents SET STORAGE EXTERNAL, ALTER payloads SET STORAGE EXTERNAL;

-- Jobs that ended otherwise than done, kept for inspection.
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
    lane text,
    unique_key text,
    traceparent text,
    error text NOT NULL,
    traceback text NOT NULL,
    payload bytea NOT NULL
);
CREATE INDEX job_failed_ended ON headrace.job_failed (ended_at);
CREATE INDEX job_failed_queue ON headrace.job_failed (queue, id);

-- Keys of unfinished jobs; jobs without a key never touch it.
CREATE TABLE headrace.job_unique (
    queue integer NOT NULL,
    key text NOT NULL,
    job_id bigint NOT NULL,
    PRIMARY KEY (queue, key)
);

-- Members still running and the callback that the last of them enqueues.
CREATE TABLE headrace.job_group (
    id bigint PRIMARY KEY,
    pending integer NOT NULL,
    done integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    cancelled integer NOT NULL DEFAULT 0,
    quarantined integer NOT NULL DEFAULT 0,
    queue integer NOT NULL,
    priority smallint NOT NULL,
    run_at timestamptz,
    delay_s double precision,
    lane text,
    unique_key text,
    traceparent text,
    payload bytea NOT NULL
) WITH (fillfactor = 70);

-- The lane row is the only mutex of everything that belongs to the lane. NULL limits mean none.
-- at[i], n[i]: n starts were granted at that instant. free_at: when the rate allows one more.
CREATE TABLE headrace.lane (
    limiter text NOT NULL,
    name text NOT NULL,
    starts_max integer CHECK (starts_max > 0),
    window_s double precision CHECK (window_s > 0),
    slack_s double precision NOT NULL DEFAULT 0.25,
    concurrency integer CHECK (concurrency > 0),
    weight integer NOT NULL DEFAULT 1 CHECK (weight > 0),
    paused boolean NOT NULL DEFAULT false,
    inflight integer NOT NULL DEFAULT 0,
    free_at timestamptz NOT NULL DEFAULT '-infinity',
    started_at timestamptz,
    at timestamptz[] NOT NULL DEFAULT '{}',
    n integer[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (limiter, name),
    CHECK ((starts_max IS NULL) = (window_s IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- What waits in a lane for one queue. ready_at says when a claim should look: it may be early, never
-- late; infinity: parked.
CREATE TABLE headrace.lane_queue (
    limiter text NOT NULL,
    lane text NOT NULL,
    queue integer NOT NULL,
    waiting integer NOT NULL DEFAULT 0,
    ready_at timestamptz NOT NULL DEFAULT 'infinity',
    PRIMARY KEY (limiter, lane, queue)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_queue_ready ON headrace.lane_queue (queue, ready_at) WHERE ready_at < 'infinity';

-- Due jobs of lanes.
CREATE TABLE headrace.lane_job (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamptz NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL DEFAULT 0,
    losses smallint NOT NULL DEFAULT 0,
    lane text NOT NULL,
    unique_key text,
    traceparent text,
    payload bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_job_claim ON headrace.lane_job (queue, lane, priority, id);
CREATE UNIQUE INDEX lane_job_id ON headrace.lane_job (id);
ALTER TABLE headrace.lane_job ALTER payload SET STORAGE EXTERNAL;

-- The journal: enqueue writes here and never locks a lane, since a direct count held lane locks until
-- the user's commit (20 deadlocks in 5 s where this had none).
CREATE TABLE headrace.lane_event (
    id bigint GENERATED ALWAYS AS IDENTITY,
    limiter text NOT NULL,
    lane text NOT NULL,
    queue integer NOT NULL,
    k integer NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_event_queue ON headrace.lane_event (queue, id);
