-- name: limit_key_wait
-- Limit the wait for another request with the same key.
SELECT set_config('lock_timeout', :wait_ms, true);

-- name: delete_old_keys
-- Delete up to 20 keys older than :kept_s; each request with a key deletes its share.
DELETE FROM headrace.idempotency_key WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM headrace.idempotency_key
    WHERE created_at < now() - :kept_s::float8 * interval '1 second'
    ORDER BY created_at LIMIT 20 FOR UPDATE SKIP LOCKED));

-- name: insert_key
-- Reserve a caller's key for a request; zero rows if the key exists.
INSERT INTO headrace.idempotency_key (caller, key, sha256)
VALUES (:caller, :key, :sha256) ON CONFLICT DO NOTHING;

-- name: find_key
-- The digest of the request that used a key, and the stored response.
SELECT sha256, status, body FROM headrace.idempotency_key WHERE caller = :caller AND key = :key;

-- name: store_response
-- Store the response with its key, in the transaction of the effect.
UPDATE headrace.idempotency_key SET status = :status, body = :body
WHERE caller = :caller AND key = :key;
