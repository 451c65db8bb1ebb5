-- name: webhooks
-- Webhooks by customer, each with how many results it has not taken, counted up to a bound.
SELECT w.customer, w.url, w.secret, CASE WHEN w.old_until > now() THEN w.old_secret END AS old_secret,
    CASE WHEN w.old_until > now() THEN w.old_until END AS old_until,
    w.id, w.turn, w.taken_seq, w.failures, w.failing_since, w.next_at, w.last_at, w.last_status,
    w.last_error, w.disabled_at, w.created_at,
    (SELECT count(*) FROM (
        SELECT FROM headrace.fetch_result r
        WHERE r.customer = w.customer AND r.seq > w.taken_seq LIMIT :count_max
    ) few) AS waiting
FROM headrace.fetch_webhook w
WHERE (:customer::text IS NULL OR w.customer = :customer) AND w.customer > :after
ORDER BY w.customer LIMIT :rows_max;

-- name: set_webhook
-- Make a webhook or move it to another URL, enabled and with nothing to complain of; true: its secret is new.
INSERT INTO headrace.fetch_webhook AS w (customer, url, secret, taken_seq)
VALUES (:customer, :url, :secret, (SELECT coalesce(max(seq), 0) FROM headrace.fetch_result))
ON CONFLICT (customer) DO UPDATE SET url = excluded.url, turn = w.turn + 1, failures = 0,
    failing_since = NULL, next_at = NULL, last_error = NULL, disabled_at = NULL
RETURNING w.secret = :secret AS is_new, w.id, w.turn;

-- name: remove_webhook
-- Forget a webhook and its secrets; its job ends when its turn comes.
DELETE FROM headrace.fetch_webhook WHERE customer = :customer;

-- name: rotate_secret
-- A new secret; the one before signs as well for a while.
UPDATE headrace.fetch_webhook SET secret = :secret, old_secret = secret,
    old_until = now() + make_interval(secs => :overlap_s::double precision)
WHERE customer = :customer RETURNING old_until;

-- name: rewind_webhook
-- Send again what comes after result `after`, at once.
UPDATE headrace.fetch_webhook SET taken_seq = :after, turn = turn + 1, failures = 0,
    failing_since = NULL, next_at = NULL
WHERE customer = :customer RETURNING id, turn, disabled_at IS NOT NULL AS is_disabled;

-- name: lock_webhooks
-- The webhooks that results of these customers go to; none of them can rest until the transaction ends.
SELECT customer, id, turn FROM headrace.fetch_webhook
WHERE customer = ANY(:customers::text[]) AND disabled_at IS NULL ORDER BY customer FOR SHARE;

-- name: behind_webhooks
-- Webhooks with results that they have not taken, some of them.
SELECT customer, id, turn FROM headrace.fetch_webhook w
WHERE disabled_at IS NULL AND customer > :after AND EXISTS (
    SELECT FROM headrace.fetch_result r WHERE r.customer = w.customer AND r.seq > w.taken_seq
)
ORDER BY customer LIMIT :rows_max;

-- name: lock_webhook
-- A webhook that is about to rest: results that are published meanwhile wait for it.
SELECT taken_seq FROM headrace.fetch_webhook
WHERE customer = :customer AND turn = :turn AND disabled_at IS NULL FOR UPDATE;

-- name: has_results_after
-- Whether anything was published of a customer after a result.
SELECT EXISTS (SELECT FROM headrace.fetch_result WHERE customer = :customer AND seq > :after);

-- name: untold_results
-- What a webhook has not taken, as much as a message may carry; the sizes are known without reading the texts.
SELECT seq, customer, item, version, action, fields, photos, at FROM (
    SELECT few.*, sum(octet_length(fields) + octet_length(photos)) OVER (ORDER BY seq) AS bytes,
        row_number() OVER (ORDER BY seq) AS position
    FROM (
        SELECT seq, customer, item, version, action, fields, photos, at FROM headrace.fetch_result
        WHERE customer = :customer AND seq > :after ORDER BY seq LIMIT :rows_max
    ) few
) sized
WHERE bytes <= :bytes_max OR position = 1 ORDER BY seq;

-- name: end_turn
-- The job of this turn has told all there is; the next result makes a job of the next turn.
UPDATE headrace.fetch_webhook SET turn = turn + 1 WHERE customer = :customer AND turn = :turn;

-- name: note_taken
-- The receiver took the results up to `seq`; of another turn nothing is noted.
UPDATE headrace.fetch_webhook SET taken_seq = greatest(taken_seq, :seq), failures = 0, failing_since = NULL, next_at = NULL,
    last_at = now(), last_status = :status, last_error = NULL
WHERE customer = :customer AND turn = :turn;

-- name: note_refused
-- The receiver did not take them; it is asked again after `delay_s`.
UPDATE headrace.fetch_webhook SET failures = failures + 1, failing_since = coalesce(failing_since, now()),
    next_at = now() + make_interval(secs => :delay_s::double precision),
    last_at = now(), last_status = :status, last_error = :error
WHERE customer = :customer AND turn = :turn;

-- name: disable_webhook
-- The receiver is gone for good (410): nothing is sent until a person sets it again.
UPDATE headrace.fetch_webhook SET disabled_at = now(), turn = turn + 1, next_at = NULL,
    failures = failures + 1, failing_since = coalesce(failing_since, now()),
    last_at = now(), last_status = :status, last_error = :error
WHERE customer = :customer AND turn = :turn;
