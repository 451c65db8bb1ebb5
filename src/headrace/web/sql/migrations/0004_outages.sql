-- Outages of engines as each host saw them, for marks in charts.

-- One row per host, engine and outage, by PostgreSQL's clock. The host's recorder writes it when
-- PostgreSQL takes writes, and extends it until the engine answers. `causes` are in the order in
-- which they appeared. A host keeps its newest 500.
CREATE TABLE headrace.engine_outage (
    id bigint PRIMARY KEY,          -- random, so that a write can be repeated
    host text NOT NULL,
    engine text NOT NULL,
    causes text[] NOT NULL,
    began_at timestamptz NOT NULL,  -- first check without an answer
    until_at timestamptz NOT NULL,  -- first check with an answer, or the last one without
    is_over boolean NOT NULL
);
CREATE INDEX engine_outage_until ON headrace.engine_outage (until_at);
CREATE INDEX engine_outage_host ON headrace.engine_outage (host, began_at);
