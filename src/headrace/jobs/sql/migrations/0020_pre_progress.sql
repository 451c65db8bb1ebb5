-- A word about a job's progress belongs to the lease under which it was said and goes with it, whoever ends the lease. A word
-- that arrives after the ack finds no lease and is not written.

TRUNCATE headrace.job_progress;
ALTER TABLE headrace.job_progress
    ADD COLUMN lease_id bigint NOT NULL REFERENCES headrace.job_lease (id) ON DELETE CASCADE;
CREATE INDEX job_progress_lease ON headrace.job_progress (lease_id);
