-- Keys of requests that create, with the answers they were given. A row is written in the transaction of the
-- request's effect, so one without an answer is never seen by others. caller 0: a route open to all.
CREATE TABLE headrace.idempotency_key (
    caller bigint NOT NULL,
    key text NOT NULL CHECK (length(key) BETWEEN 1 AND 128),
    sha256 bytea NOT NULL CHECK (length(sha256) = 32),
    status smallint,
    body bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (caller, key)
);
CREATE INDEX idempotency_key_created ON headrace.idempotency_key (created_at);
