-- A job that failed and runs again carries its last error while it waits; a lease does not carry it. NULL of all
-- that never failed, which costs no space.

ALTER TABLE headrace.job_ready ADD COLUMN last_error text;
ALTER TABLE headrace.lane_job ADD COLUMN last_error text;
