-- name: cancel_job
-- Cancel a waiting job; false: it does not wait.
SELECT penstock.cancel_v1(:job);

-- name: retry_ended
-- Give an ended job another life; false: it is not among the ended.
SELECT penstock.retry_ended_v1(:job);
