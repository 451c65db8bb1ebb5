-- What a queue, a limiter and a host have to say of themselves, and the version of a payload.

-- What running code declares of its queue. A person's word, in queue_override, wins.
ALTER TABLE headrace.queue
    ADD importance smallint NOT NULL DEFAULT 5 CHECK (importance BETWEEN 0 AND 9),
    ADD slots_min integer NOT NULL DEFAULT 0 CHECK (slots_min >= 0),
    ADD slots_max integer NOT NULL DEFAULT 100000 CHECK (slots_max >= slots_min),
    ADD batch integer NOT NULL DEFAULT 1 CHECK (batch > 0),
    ADD retries integer NOT NULL DEFAULT 5 CHECK (retries >= 0),
    ADD timeout_s double precision NOT NULL DEFAULT 7200,
    ADD tag text,                       -- only hosts with it may have its slots
    ADD keep_done_s double precision,   -- NULL: a done job is deleted
    ADD keep_result boolean NOT NULL DEFAULT false,
    ADD declared_at timestamptz NOT NULL DEFAULT now();

CREATE TABLE headrace.queue_override (
    queue integer PRIMARY KEY REFERENCES headrace.queue,
    importance smallint CHECK (importance BETWEEN 0 AND 9),
    slots_min integer CHECK (slots_min >= 0),
    slots_max integer CHECK (slots_max >= 0),
    retries integer CHECK (retries >= 0)
);

-- Former names of a queue: old code goes on to reach it.
CREATE TABLE headrace.queue_alias (
    name text PRIMARY KEY,
    queue integer NOT NULL REFERENCES headrace.queue
);

-- Limits of lanes that were not given their own. NULL: none.
CREATE TABLE headrace.limiter (
    name text PRIMARY KEY,
    starts_max integer CHECK (starts_max > 0),
    window_s double precision CHECK (window_s > 0),
    slack_s double precision NOT NULL DEFAULT 0.25,
    concurrency integer CHECK (concurrency > 0),
    CHECK ((starts_max IS NULL) = (window_s IS NULL))
);

-- is_own: its limits were set for this lane; else it follows its limiter's.
ALTER TABLE headrace.lane ADD is_own boolean NOT NULL DEFAULT false;
UPDATE headrace.lane SET is_own = true
WHERE starts_max IS NOT NULL OR concurrency IS NOT NULL OR paused OR weight <> 1;

-- kind: 'agent' and 'work' run handlers; 'taker' is one take by other code or a person, whose lease is this row.
ALTER TABLE headrace.host
    ADD kind text NOT NULL DEFAULT 'work' CHECK (kind IN ('agent', 'work', 'taker')),
    ADD tags text[] NOT NULL DEFAULT '{}',
    ADD cores integer NOT NULL DEFAULT 1,
    ADD capacity integer NOT NULL DEFAULT 0,
    ADD load_per_core real NOT NULL DEFAULT 0,
    ADD is_draining boolean NOT NULL DEFAULT false,
    ADD slots jsonb NOT NULL DEFAULT '[]',
    ADD reported_at timestamptz;

-- The version of a payload's shape, so that a task can bring old ones up to date.
ALTER TABLE headrace.job_ready ADD version smallint NOT NULL DEFAULT 1;
ALTER TABLE headrace.lane_job ADD version smallint NOT NULL DEFAULT 1;
ALTER TABLE headrace.job_failed ADD version smallint NOT NULL DEFAULT 1;
ALTER TABLE headrace.job_group ADD version smallint NOT NULL DEFAULT 1;
ALTER TABLE headrace.job_lease ADD versions smallint[];
ALTER TABLE headrace.job_lease ALTER versions SET STORAGE EXTERNAL;
