-- name: add_host
-- Register a host; its leases hang on this row.
INSERT INTO headrace.host (name, queues, kind, tags, cores, expires_at)
VALUES (:name, :queues::integer[], :kind, :tags::text[], :cores,
        now() + :lease_s::double precision * interval '1 s')
RETURNING id;

-- name: renew_host
-- Renew every lease of a host at once; no row: it expired, its jobs are lost to it.
UPDATE headrace.host SET expires_at = now() + :lease_s::double precision * interval '1 s'
WHERE id = :host AND expires_at > now() RETURNING 1;

-- name: extend_take
-- Give a taker's lease so many seconds from now; no row: it is gone or over.
UPDATE headrace.host h SET expires_at = now() + :lease_s::double precision * interval '1 s'
FROM headrace.job_lease l
WHERE l.id = :lease AND h.id = l.host AND h.kind = 'taker' AND h.expires_at > now()
RETURNING h.expires_at;

-- name: host_expires_at
-- When a host's leases end unless they are renewed.
SELECT expires_at FROM headrace.host WHERE id = :host;

-- name: remove_host
-- Take a host away; leases that it still has are returned by the next sweep.
DELETE FROM headrace.host WHERE id = :host;

-- name: end_take
-- Remove a taker whose lease was settled whole.
DELETE FROM headrace.host h WHERE h.id = :host AND h.kind = 'taker'
AND NOT EXISTS (SELECT FROM headrace.job_lease l WHERE l.host = h.id);

-- name: expire_host
-- Let a host expire now, and its allowances end: its slots are known to have ended.
WITH freed AS (DELETE FROM headrace.slot_allowance WHERE host = :host)
UPDATE headrace.host SET expires_at = least(expires_at, now()) WHERE id = :host;

-- name: drop_hosts
-- Remove expired hosts without leases, and without allowances that still count. Skip locked rows.
DELETE FROM headrace.host WHERE id = ANY(ARRAY(
    SELECT h.id FROM headrace.host h WHERE h.expires_at <= now()
    AND NOT EXISTS (SELECT FROM headrace.job_lease l WHERE l.host = h.id)
    AND (h.expires_at <= now() - interval '5 s' OR NOT EXISTS (
        SELECT FROM headrace.slot_allowance a WHERE a.host = h.id AND a.slots > 0))
    FOR UPDATE SKIP LOCKED));

-- name: claim_ready
-- Take the acks of :done, then lease due jobs of a queue past the scan marks; a row a lease, one at least.
SELECT * FROM headrace.claim_ready_v1(
    :host, :queue, :leases_max, :batch, :priorities::smallint[], :marks_at::timestamptz[],
    :marks_id::bigint[], :done::bigint[]);

-- name: claim_lanes
-- Lease jobs of a queue's lanes within their limits; one row per lease, at least one.
SELECT * FROM headrace.claim_lanes_v1(
    :host, :queue, :leases_max, :batch, :lanes_max, :quantum);

-- name: settle
-- Settle whole leases with one word, and jobs of others each with its own; which leases were gone or held.
SELECT * FROM headrace.settle_v1(
    :whole::bigint[], :outcome, :leases::bigint[], :ids::bigint[], :outcomes::text[],
    :delays_s::double precision[], :errors::text[], :tracebacks::text[], :results::bytea[],
    :queues::text[], :losses_max, :progressed::bigint[]);

-- name: lock_lease
-- Hold a lease until the end of the transaction, if it still is there.
SELECT 1 FROM headrace.job_lease WHERE id = :lease FOR SHARE;

-- name: lock_leases
-- Hold leases until the end of the transaction, in order; those that still are there.
SELECT id FROM headrace.job_lease WHERE id = ANY(:leases::bigint[]) ORDER BY id FOR SHARE;

-- name: leases_of_host
-- The leases that a host has, to be compared with what it knows of.
SELECT id FROM headrace.job_lease WHERE host = :host;

-- name: expired_leases
-- Leases whose host expired or is gone, oldest first, at most :leases_max; not those that somebody holds.
SELECT l.id FROM headrace.job_lease l WHERE NOT EXISTS (
    SELECT FROM headrace.host h WHERE h.id = l.host AND h.expires_at > now())
ORDER BY l.id LIMIT :leases_max FOR UPDATE SKIP LOCKED;

-- name: end_stuck_claims
-- End claims whose answer nobody has read for :lease_s: who asked stands still, and they lock what they found.
SELECT count(pg_terminate_backend(a.pid)) FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.usename = current_user AND a.wait_event = 'ClientWrite'
AND position('headrace.claim_' IN a.query) > 0
AND a.query_start < now() - :lease_s::double precision * interval '1 s';

-- name: return_lease
-- Return one lease of a host that is no more; how many jobs went back.
SELECT headrace.return_lease_v1(:lease, :losses_max);

-- name: taken_jobs
-- The jobs of a taker's lease with the retries of their queue; none: the lease is gone.
SELECT l.ids, l.attempts, l.settled, l.host, coalesce(o.retries, q.retries) AS retries
FROM headrace.job_lease l
JOIN headrace.host h ON h.id = l.host AND h.kind = 'taker'
JOIN headrace.queue q ON q.id = l.queue
LEFT JOIN headrace.queue_override o ON o.queue = q.id
WHERE l.id = :lease;

-- name: work_ahead
-- Which of the queues have work that is due, and in how many seconds the next is.
SELECT * FROM headrace.work_ahead_v1(:queues::integer[]);
