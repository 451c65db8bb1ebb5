-- Customers, runs of their catalogues, items, photos and the results for their consumers.

CREATE TABLE headrace.fetch_customer (
    customer text PRIMARY KEY,
    starts_max integer NOT NULL,
    window_s double precision NOT NULL,
    connections integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE headrace.fetch_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL REFERENCES headrace.fetch_customer,
    state text NOT NULL,
    file_name text NOT NULL,
    format text NOT NULL,
    reason text,
    rows_read integer NOT NULL DEFAULT 0,
    invalid integer NOT NULL DEFAULT 0,
    new integer NOT NULL DEFAULT 0,
    changed integer NOT NULL DEFAULT 0,
    unchanged integer NOT NULL DEFAULT 0,
    gone integer NOT NULL DEFAULT 0,
    problems integer NOT NULL DEFAULT 0,
    items_pending integer NOT NULL DEFAULT 0,
    photos integer NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz
);
CREATE INDEX fetch_run_customer ON headrace.fetch_run (customer, id);

CREATE TABLE headrace.fetch_problem (
    run_id bigint NOT NULL REFERENCES headrace.fetch_run ON DELETE CASCADE,
    id bigint GENERATED ALWAYS AS IDENTITY,
    row_number integer NOT NULL,
    line integer NOT NULL,
    item text,
    field text NOT NULL,
    code text NOT NULL,
    problem text NOT NULL,
    PRIMARY KEY (run_id, id)
);

-- The rows of a run between reading and applying; a held run keeps them until it is confirmed.
CREATE TABLE headrace.fetch_staged (
    run_id bigint NOT NULL REFERENCES headrace.fetch_run ON DELETE CASCADE,
    item text NOT NULL,
    hash bytea,
    fields text NOT NULL,
    photos text[] NOT NULL,
    refused jsonb NOT NULL,
    PRIMARY KEY (run_id, item)
);

CREATE TABLE headrace.fetch_item (
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL,
    is_gone boolean NOT NULL,
    run_id bigint NOT NULL,
    hash bytea NOT NULL,
    fields text NOT NULL,
    photos text[] NOT NULL,
    PRIMARY KEY (customer, item)
);

-- What a run does to an item: one row for each version, published once. A `retry` asks photos of an
-- unchanged item again; its version is the item's own, and it becomes `changed` if they changed.
CREATE TABLE headrace.fetch_change (
    run_id bigint NOT NULL REFERENCES headrace.fetch_run ON DELETE CASCADE,
    item text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('new', 'changed', 'gone', 'retry')),
    version bigint NOT NULL,
    has_other_photos boolean NOT NULL,
    published_at timestamptz,
    PRIMARY KEY (run_id, item)
);

-- The photos that a run must ask for; `outcome` is set once, which makes the counts add up.
CREATE TABLE headrace.fetch_need (
    run_id bigint NOT NULL REFERENCES headrace.fetch_run ON DELETE CASCADE,
    item text NOT NULL,
    url text NOT NULL,
    outcome text,
    id bigint GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (run_id, item, url)
);
CREATE INDEX fetch_need_bad ON headrace.fetch_need (run_id, id)
    WHERE outcome LIKE 'failed:%' OR outcome LIKE 'refused:%';

CREATE TABLE headrace.fetch_count (
    run_id bigint NOT NULL REFERENCES headrace.fetch_run ON DELETE CASCADE,
    outcome text NOT NULL,
    photos bigint NOT NULL,
    PRIMARY KEY (run_id, outcome)
);

-- One row a content, written only after its bytes are stored.
CREATE TABLE headrace.fetch_photo (
    sha256 text PRIMARY KEY,
    key text NOT NULL,
    format text NOT NULL,
    size_bytes bigint NOT NULL,
    width integer NOT NULL,
    height integer NOT NULL,
    stored_at timestamptz NOT NULL DEFAULT now()
);

-- The last thing known of a link; `sha256` stays the last good copy while later tries fail.
CREATE TABLE headrace.fetch_link (
    customer text NOT NULL,
    url text NOT NULL,
    outcome text NOT NULL,
    sha256 text REFERENCES headrace.fetch_photo,
    etag text,
    last_modified text,
    checked_at timestamptz NOT NULL DEFAULT now(),
    failures integer NOT NULL DEFAULT 0,
    run_id bigint NOT NULL,
    PRIMARY KEY (customer, url)
);
CREATE INDEX fetch_link_url ON headrace.fetch_link (url);
CREATE INDEX fetch_link_bad ON headrace.fetch_link (customer, url) WHERE sha256 IS NULL;

-- `seq` grows in the order of commits: its writers take turns by an advisory lock.
CREATE TABLE headrace.fetch_result (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL,
    action text NOT NULL CHECK (action IN ('publish', 'edit', 'unpublish')),
    fields text NOT NULL,
    photos text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (customer, item, version)
);

-- Whom results are delivered to; `id` tells one that was removed from the next of its name.
CREATE TABLE headrace.fetch_consumer (
    name text PRIMARY KEY,
    id bigint GENERATED ALWAYS AS IDENTITY,
    added_at timestamptz NOT NULL DEFAULT now()
);

-- How far a consumer is with an item, and which job is calling it now. Version 0 with `is_shown` is an
-- item that was shown once and is to be shown again.
CREATE TABLE headrace.fetch_delivery (
    consumer text NOT NULL,
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL DEFAULT 0,
    is_shown boolean NOT NULL DEFAULT false,
    busy_job bigint,
    busy_until timestamptz,
    PRIMARY KEY (consumer, customer, item)
);
