-- name: bound_key_wait
-- Wait at most so long for another request with the same key.
SELECT set_config('lock_timeout', :wait_ms, true);

-- name: drop_old_keys
-- Forget a few keys that were kept long enough; each keyed request does its share.
DELETE FROM headrace.idempotency_key WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM headrace.idempotency_key
    WHERE created_at < now() - :kept_s::float8 * interval '1 second'
    ORDER BY created_at LIMIT 20 FOR UPDATE SKIP LOCKED));

-- name: take_key
-- Take a caller's key for a request; no row: it is taken.
INSERT INTO headrace.idempotency_key (caller, key, sha256)
VALUES (:caller, :key, :sha256) ON CONFLICT DO NOTHING;

-- name: find_key
-- What a key was taken for, and the answer.
SELECT sha256, status, body FROM headrace.idempotency_key WHERE caller = :caller AND key = :key;

-- name: keep_answer
-- Keep the answer beside the key, in the transaction of the effect.
UPDATE headrace.idempotency_key SET status = :status, body = :body
WHERE caller = :caller AND key = :key;
