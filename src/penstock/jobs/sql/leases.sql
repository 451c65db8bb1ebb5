-- name: claim_ready
-- Lease up to :jobs_max due jobs of a queue past the scan marks; one row always.
SELECT * FROM penstock.claim_ready_v1(
    :host, :queue, :jobs_max, :priorities::smallint[], :marks_at::timestamptz[],
    :marks_id::bigint[]);

-- name: claim_lanes
-- Lease up to :jobs_max jobs of a queue's lanes within their limits; one row always.
SELECT * FROM penstock.claim_lanes_v1(:host, :queue, :jobs_max, :lanes_max, :quantum);

-- name: settle
-- Settle jobs of a lease (ids NULL: all left); false: the lease is gone.
SELECT penstock.settle_v1(
    :lease, :ids::bigint[], :outcomes::text[], :delays_s::double precision[], :errors::text[],
    :tracebacks::text[]);

-- name: lock_lease
-- Hold a lease until the end of the transaction, if it still is there.
SELECT 1 FROM penstock.job_lease WHERE id = :lease FOR SHARE;

-- name: leases_of_host
-- The leases that a host has, to be compared with what it knows of.
SELECT id FROM penstock.job_lease WHERE host = :host;

-- name: expired_leases
-- Leases whose host expired or is gone, oldest first, at most :leases_max.
SELECT l.id FROM penstock.job_lease l LEFT JOIN penstock.host h ON h.id = l.host
WHERE h.id IS NULL OR h.expires_at <= now() ORDER BY l.id LIMIT :leases_max;

-- name: return_lease
-- Return one lease of a host that is no more; how many jobs went back.
SELECT penstock.return_lease_v1(:lease, :losses_max);
