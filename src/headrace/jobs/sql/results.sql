-- name: find_ending
-- How a job ended, as far as that is kept, with its result.
SELECT 'done' AS state, ''::text AS error, d.result FROM headrace.job_done d WHERE d.id = :job
UNION ALL
SELECT f.state, f.error, NULL FROM headrace.job_failed f WHERE f.id = :job
LIMIT 1;
