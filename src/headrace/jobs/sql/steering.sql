-- name: end_waiting
-- Take waiting jobs out, kept as cancelled or not at all; the ids of those that waited.
SELECT headrace.end_waiting_v1(:ids::bigint[], :is_kept);

-- name: retry_jobs
-- Give jobs that ended in :states another life; which got one, and which not since their key is taken.
SELECT retried, taken FROM headrace.retry_jobs_v1(:ids::bigint[], :states::text[]);

-- name: delete_jobs
-- Remove jobs in :states for good; the ids of those that were there.
SELECT headrace.delete_jobs_v1(:ids::bigint[], :states::text[]);
