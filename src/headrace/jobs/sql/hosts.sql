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
