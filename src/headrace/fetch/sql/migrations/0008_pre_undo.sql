-- Limits of what a catalogue may remove unasked, undoing a run, deadlines of items, refreshing photos.

-- Null: as the settings of the deployment say.
ALTER TABLE headrace.fetch_customer
    ADD hold_share double precision,
    ADD hold_items integer,
    ADD refresh_s double precision;

-- `undone_by`: the run that put the items back. `items_late`: items published at their deadline without all photos.
ALTER TABLE headrace.fetch_run
    ADD undone_by bigint,
    ADD items_late integer NOT NULL DEFAULT 0;

-- The content of changed and removed items before a run, kept for the customer's latest catalogues.
CREATE TABLE headrace.fetch_before (
    run_id bigint NOT NULL,
    item text NOT NULL,
    hash bytea NOT NULL,
    raw_hash bytea,
    fields text NOT NULL,
    photos text[] NOT NULL,
    PRIMARY KEY (run_id, item)
);
