-- Catalogues brought from a URL, items sent by themselves, cheap comparison of rows, the pace of runs.

-- Where a customer's catalogue is brought from. The validators are of the file that `good_run` applied; they are
-- sent while that run is the customer's newest whole one and rows are judged as they were (`rules`).
CREATE TABLE headrace.fetch_source (
    customer text PRIMARY KEY REFERENCES headrace.fetch_customer,
    url text NOT NULL,
    cron text NOT NULL,
    tz text NOT NULL,
    format text,
    mapping text,
    etag text,
    last_modified text,
    sha256 text,
    rules bytea,
    good_run bigint,
    outcome text,
    problem text,
    run_id bigint,
    tried_at timestamptz,
    failures integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- `is_whole`: it speaks for all items of the customer, as a catalogue does and items sent by themselves do not.
ALTER TABLE headrace.fetch_run
    ADD is_whole boolean NOT NULL DEFAULT true,
    ADD applied_at timestamptz,
    ADD sample text;

-- `raw_hash`: of the row as it was read, where nothing in it was at fault. `sent_run`: the last run that named
-- the item by itself; a catalogue that was read before does not overrule it.
ALTER TABLE headrace.fetch_item
    ADD raw_hash bytea,
    ADD sent_run bigint NOT NULL DEFAULT 0;

-- A row equal to the one its item was made of has empty `fields` and `photos`. The checks of foreign keys cost
-- more than the rows themselves in a first load of a million; runs delete what hangs on them.
ALTER TABLE headrace.fetch_staged
    ADD raw_hash bytea,
    ADD is_gone boolean NOT NULL DEFAULT false,
    DROP CONSTRAINT fetch_staged_run_id_fkey;

-- `fields`: those of a changed item that differ, for people to look at.
ALTER TABLE headrace.fetch_change
    ADD fields text[] NOT NULL DEFAULT '{}',
    DROP CONSTRAINT fetch_change_run_id_fkey;
ALTER TABLE headrace.fetch_need DROP CONSTRAINT fetch_need_run_id_fkey;

-- Photos decided by minute, from which a run's pace is told.
CREATE TABLE headrace.fetch_pace (
    run_id bigint NOT NULL,
    minute timestamptz NOT NULL,
    photos bigint NOT NULL,
    PRIMARY KEY (run_id, minute)
);
