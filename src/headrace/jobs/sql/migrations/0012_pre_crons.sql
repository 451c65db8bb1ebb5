-- Crons: jobs that come again and again. Whoever moves next_at enqueues the job in the same transaction.

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
    declared_at timestamptz NOT NULL DEFAULT now(),     -- when running code last asked for it
    error text
);
CREATE INDEX cron_next ON headrace.cron (next_at) WHERE NOT paused;
