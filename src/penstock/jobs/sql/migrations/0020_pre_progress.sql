-- A word about a job's progress belongs to the lease under which it was said and goes with it, whoever ends the lease. A word
-- that arrives after the ack finds no lease and is not written.

TRUNCATE penstock.job_progress;
ALTER TABLE penstock.job_progress
    ADD COLUMN lease_id bigint NOT NULL REFERENCES penstock.job_lease (id) ON DELETE CASCADE;
CREATE INDEX job_progress_lease ON penstock.job_progress (lease_id);
