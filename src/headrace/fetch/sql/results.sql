-- name: lock_changes
-- Unpublished changes of a batch, with their items locked in order.
SELECT c.run_id, c.item, c.kind, c.version, c.late_at IS NOT NULL AS is_late, i.customer,
    i.version AS item_version, i.is_gone, coalesce((
        SELECT (i.fields::jsonb || o.fields)::text FROM headrace.fetch_overlay o
        WHERE o.customer = i.customer AND o.item = i.item
    ), i.fields) AS fields, i.photos
FROM unnest(:runs::bigint[], :items::text[]) g (run_id, item)
JOIN headrace.fetch_run r ON r.id = g.run_id
JOIN headrace.fetch_change c ON c.run_id = g.run_id AND c.item = g.item AND c.published_at IS NULL
JOIN headrace.fetch_item i ON i.customer = r.customer AND i.item = c.item
ORDER BY i.customer, i.item
FOR UPDATE OF i, c;

-- name: late_runs
-- Runs with open changes that were applied before the item deadline.
SELECT id FROM headrace.fetch_run
WHERE state = 'applied'
    AND applied_at < now() - make_interval(secs => :deadline_s::double precision) ORDER BY id;

-- name: lock_late
-- New and changed items of a run with undecided photos, locked in order.
SELECT c.run_id, c.item, c.kind, c.version, false AS is_late, i.customer,
    i.version AS item_version, i.is_gone, coalesce((
        SELECT (i.fields::jsonb || o.fields)::text FROM headrace.fetch_overlay o
        WHERE o.customer = i.customer AND o.item = i.item
    ), i.fields) AS fields, i.photos
FROM headrace.fetch_run r
JOIN headrace.fetch_change c ON c.run_id = r.id
JOIN headrace.fetch_item i ON i.customer = r.customer AND i.item = c.item
WHERE r.id = :run_id AND c.item > :after AND c.kind IN ('new', 'changed')
    AND c.published_at IS NULL AND c.late_at IS NULL AND EXISTS (
        SELECT FROM headrace.fetch_need n
        WHERE n.run_id = c.run_id AND n.item = c.item AND n.outcome IS NULL
    )
ORDER BY c.item LIMIT :rows_max
FOR UPDATE OF i, c;

-- name: note_late
-- Record items published without all photos, and which were missing; their changes stay open.
WITH given AS (
    SELECT g.run_id, g.item FROM unnest(:runs::bigint[], :items::text[]) g (run_id, item)
), changes AS (
    UPDATE headrace.fetch_change c SET late_at = now()
    FROM given g WHERE c.run_id = g.run_id AND c.item = g.item
), needs AS (
    UPDATE headrace.fetch_need n SET is_late = true
    FROM given g WHERE n.run_id = g.run_id AND n.item = g.item AND n.outcome IS NULL
)
UPDATE headrace.fetch_run r SET items_late = r.items_late + s.items
FROM (SELECT run_id, count(*) AS items FROM given GROUP BY run_id) s WHERE r.id = s.run_id;

-- name: lock_result_order
-- Serialize writers of results until the transaction ends, so `seq` grows in the order of commits.
SELECT pg_advisory_xact_lock(hashtextextended('headrace.fetch_result', 0));

-- name: last_results
-- The last published result per item.
SELECT DISTINCT ON (r.customer, r.item) r.customer, r.item, r.action, r.photos
FROM unnest(:customers::text[], :items::text[]) g (customer, item)
JOIN headrace.fetch_result r ON r.customer = g.customer AND r.item = g.item
ORDER BY r.customer, r.item, r.version DESC;

-- name: photos_of_items
-- Every link of some items, in order, with its outcome and its last good copy. OFFSET 0 as in
-- known_photos.
SELECT i.customer, i.item, p.url, coalesce(l.outcome, 'pending') AS outcome,
    f.key, f.sha256, f.width, f.height, f.size_bytes
FROM unnest(:customers::text[], :items::text[]) g (customer, item)
CROSS JOIN LATERAL (
    SELECT * FROM headrace.fetch_item i WHERE i.customer = g.customer AND i.item = g.item OFFSET 0
) i
CROSS JOIN LATERAL unnest(i.photos) WITH ORDINALITY AS p (url, position)
LEFT JOIN LATERAL (
    SELECT * FROM headrace.fetch_link l WHERE l.customer = i.customer AND l.url = p.url OFFSET 0
) l ON true
LEFT JOIN LATERAL (
    SELECT * FROM headrace.fetch_photo f WHERE f.sha256 = l.sha256 OFFSET 0
) f ON true
ORDER BY i.customer, i.item, p.position;

-- name: insert_results
-- Publish one row per version of an item, in the given order.
INSERT INTO headrace.fetch_result (customer, item, version, action, fields, photos)
SELECT customer, item, version, action, fields, photos FROM unnest(
    :customers::text[], :items::text[], :versions::bigint[], :actions::text[], :fields::text[],
    :photos::text[]
) WITH ORDINALITY AS g (customer, item, version, action, fields, photos, position)
ORDER BY position
ON CONFLICT (customer, item, version) DO NOTHING
RETURNING seq, customer;

-- name: note_photo_edits
-- Assign a new version to items whose photos changed after publication; unchanged ones become
-- changed.
WITH given AS (
    SELECT g.run_id, g.item, r.customer
    FROM unnest(:runs::bigint[], :items::text[]) g (run_id, item)
    JOIN headrace.fetch_run r ON r.id = g.run_id
), items AS (
    UPDATE headrace.fetch_item i SET version = i.version + 1, run_id = g.run_id
    FROM given g WHERE i.customer = g.customer AND i.item = g.item
), changes AS (
    UPDATE headrace.fetch_change c SET version = c.version + 1,
        kind = CASE WHEN c.late_at IS NULL THEN 'changed' ELSE c.kind END
    FROM given g WHERE c.run_id = g.run_id AND c.item = g.item
    RETURNING c.run_id, c.late_at
), sums AS (
    SELECT run_id, count(*) AS items FROM changes WHERE late_at IS NULL GROUP BY run_id
)
UPDATE headrace.fetch_run r SET unchanged = r.unchanged - s.items, changed = r.changed + s.items
FROM sums s WHERE r.id = s.run_id;

-- name: undecided_needs
-- Photos of these items whose jobs ended without an outcome.
SELECT n.run_id, n.item, n.url FROM unnest(:runs::bigint[], :items::text[]) g (run_id, item)
JOIN headrace.fetch_need n ON n.run_id = g.run_id AND n.item = g.item AND n.outcome IS NULL;

-- name: note_published
-- Close changes, and runs whose last change this was.
WITH closed AS (
    UPDATE headrace.fetch_change c SET published_at = now()
    FROM unnest(:runs::bigint[], :items::text[]) g (run_id, item)
    WHERE c.run_id = g.run_id AND c.item = g.item AND c.published_at IS NULL
    RETURNING c.run_id
), sums AS (
    SELECT run_id, count(*) AS items FROM closed GROUP BY run_id ORDER BY run_id
)
UPDATE headrace.fetch_run r SET
    items_pending = r.items_pending - s.items,
    state = CASE WHEN r.items_pending = s.items THEN 'done' ELSE r.state END,
    ended_at = CASE WHEN r.items_pending = s.items THEN now() END
FROM sums s WHERE r.id = s.run_id;

-- name: results
-- A page of results in the order of their commits.
SELECT seq, customer, item, version, action, fields, photos, at FROM headrace.fetch_result
WHERE seq > :after AND (:customer::text IS NULL OR customer = :customer)
ORDER BY seq LIMIT :rows_max;

-- name: results_before
-- Results before a number, newest first.
SELECT seq, customer, item, version, action, fields, photos, at FROM headrace.fetch_result
WHERE seq < :before AND (:customer::text IS NULL OR customer = :customer)
ORDER BY seq DESC LIMIT :rows_max;

-- name: results_between
-- The same for results of a time. `seq + 0` makes the index of times find them.
SELECT seq, customer, item, version, action, fields, photos, at FROM headrace.fetch_result
WHERE at >= :from_at AND at < :to_at AND seq < :before
    AND (:customer::text IS NULL OR customer = :customer)
ORDER BY seq + 0 DESC LIMIT :rows_max;

-- name: item
-- Current state of an item, with the fields that the supplemental feed sets.
SELECT i.customer, i.item, i.version, i.is_gone, i.run_id, i.fields,
    coalesce(o.fields, '{}')::text AS supplemental
FROM headrace.fetch_item i LEFT JOIN headrace.fetch_overlay o USING (customer, item)
WHERE i.customer = :customer AND i.item = :item;

-- name: begin_deliveries
-- Claim the items of some results for their consumers, one entry per job: the newest version of
-- each item, and whether the job has the claim. It has none if this version was delivered, or if
-- another job, also of this batch, has it. Rows are locked in the order of the key.
WITH found AS MATERIALIZED (
    SELECT g.position, g.consumer, g.job_id, g.seq AS asked_seq, r.*
    FROM unnest(:consumers::text[], :seqs::bigint[], :job_ids::bigint[])
        WITH ORDINALITY AS g (consumer, seq, job_id, position)
    JOIN headrace.fetch_result s ON s.seq = g.seq
    CROSS JOIN LATERAL (
        SELECT r.seq, r.customer, r.item, r.version, r.action, r.fields, r.photos, r.at
        FROM headrace.fetch_result r WHERE r.customer = s.customer AND r.item = s.item
        ORDER BY r.version DESC LIMIT 1
    ) r
), taken AS (
    INSERT INTO headrace.fetch_delivery AS d (consumer, customer, item, busy_job, busy_until)
    SELECT DISTINCT ON (consumer, customer, item) consumer, customer, item, job_id,
        now() + make_interval(secs => :busy_s::double precision)
    FROM found ORDER BY consumer, customer, item, position
    ON CONFLICT (consumer, customer, item) DO UPDATE
    SET busy_job = excluded.busy_job, busy_until = excluded.busy_until
    WHERE d.version < (SELECT f.version FROM found f WHERE f.job_id = excluded.busy_job)
        AND (d.busy_job IS NULL OR d.busy_job = excluded.busy_job OR d.busy_until < now())
    RETURNING d.busy_job, d.is_shown, d.version
)
SELECT f.position, f.seq, f.customer, f.item, f.version, f.action, f.fields, f.photos, f.at,
    t.busy_job IS NOT NULL AS is_taken, coalesce(t.is_shown, false) AS is_shown,
    coalesce(t.version, d.version, 0) AS delivered_version
FROM found f
LEFT JOIN taken t ON t.busy_job = f.job_id
LEFT JOIN headrace.fetch_delivery d
    ON d.consumer = f.consumer AND d.customer = f.customer AND d.item = f.item
    AND t.busy_job IS NULL
ORDER BY f.position;

-- name: end_deliveries
-- Record versions as delivered, and whether the consumer now shows each item.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(
        :consumers::text[], :customers::text[], :items::text[], :seqs::bigint[],
        :job_ids::bigint[], :versions::bigint[], :are_shown::boolean[]
    ) AS g (consumer, customer, item, seq, job_id, version, is_shown)
), absent AS (
    DELETE FROM headrace.fetch_absent a USING given g
    WHERE a.consumer = g.consumer AND a.seq = g.seq
), locked AS MATERIALIZED (
    SELECT d.ctid, g.version, g.is_shown
    FROM given g JOIN headrace.fetch_delivery d
        ON d.consumer = g.consumer AND d.customer = g.customer AND d.item = g.item
        AND d.busy_job = g.job_id
    ORDER BY d.consumer, d.customer, d.item FOR UPDATE OF d
)
UPDATE headrace.fetch_delivery d SET version = l.version, is_shown = l.is_shown, busy_job = NULL,
    busy_until = NULL
FROM locked l WHERE d.ctid = l.ctid;

-- name: drop_delivery
-- Release the claim on an item whose handler failed.
UPDATE headrace.fetch_delivery SET busy_job = NULL, busy_until = NULL
WHERE consumer = :consumer AND customer = :customer AND item = :item AND busy_job = :job_id;

-- name: add_consumers
-- Record consumers; return the new ones.
INSERT INTO headrace.fetch_consumer (name)
SELECT name FROM unnest(:names::text[]) g (name) ORDER BY name
ON CONFLICT (name) DO NOTHING
RETURNING name;

-- name: has_results
-- Whether any result exists.
SELECT EXISTS (SELECT FROM headrace.fetch_result);

-- name: consumer_ids
-- Every consumer with the id that its deliveries carry.
SELECT name, id FROM headrace.fetch_consumer ORDER BY name;

-- name: consumers
-- Every consumer with the number of items delivered to it, those due again included.
SELECT c.name, c.added_at, (
    SELECT count(*) FROM headrace.fetch_delivery d
    WHERE d.consumer = c.name AND (d.version > 0 OR d.is_shown)
) AS items
FROM headrace.fetch_consumer c
ORDER BY c.name;

-- name: remove_consumer
-- Delete a consumer and its delivery state; its jobs are dropped when they run.
WITH deliveries AS (
    DELETE FROM headrace.fetch_delivery WHERE consumer = :name
), absent AS (
    DELETE FROM headrace.fetch_absent WHERE consumer = :name
)
DELETE FROM headrace.fetch_consumer WHERE name = :name;

-- name: lock_consumer
-- The id of a consumer, locked until the transaction ends.
SELECT id FROM headrace.fetch_consumer WHERE name = :name FOR SHARE;

-- name: replay_page
-- Newest results after an item, in order: of published items, and of those the consumer still
-- shows.
SELECT i.customer, i.item, r.seq
FROM headrace.fetch_item i
CROSS JOIN LATERAL (
    SELECT seq, action FROM headrace.fetch_result r
    WHERE r.customer = i.customer AND r.item = i.item
    ORDER BY r.version DESC LIMIT 1
) r
LEFT JOIN headrace.fetch_delivery d
    ON d.consumer = :name AND d.customer = i.customer AND d.item = i.item
WHERE (i.customer, i.item) > (:after_customer::text, :after_item::text)
    AND (:customer::text IS NULL OR i.customer = :customer)
    AND (r.action <> 'unpublish' OR d.is_shown)
ORDER BY i.customer, i.item LIMIT :rows_max;

-- name: rewind_deliveries
-- Mark items for redelivery to a consumer; keep whether it shows them.
UPDATE headrace.fetch_delivery d SET version = 0
FROM unnest(:customers::text[], :items::text[]) g (customer, item)
WHERE d.consumer = :name AND d.customer = g.customer AND d.item = g.item;

-- name: note_absent
-- Record a delivery without a handler in this process; return the seconds since the first attempt.
INSERT INTO headrace.fetch_absent (consumer, seq) VALUES (:consumer, :seq)
ON CONFLICT (consumer, seq) DO UPDATE SET seq = excluded.seq
RETURNING extract(epoch FROM now() - since)::double precision;

-- name: forget_absent
-- Delete the record of a delivery that waited for its consumer.
DELETE FROM headrace.fetch_absent WHERE consumer = :consumer AND seq = :seq;

-- name: take_absent
-- Pop some deliveries that waited for these consumers.
DELETE FROM headrace.fetch_absent a USING (
    SELECT consumer, seq FROM headrace.fetch_absent WHERE consumer = ANY(:names::text[])
    ORDER BY consumer, seq LIMIT :rows_max FOR UPDATE SKIP LOCKED
) few
WHERE a.consumer = few.consumer AND a.seq = few.seq
RETURNING a.consumer, a.seq, (
    SELECT r.customer FROM headrace.fetch_result r WHERE r.seq = a.seq
) AS customer;

-- name: webhooks
-- Webhooks by customer, each with its backlog, counted up to a bound.
SELECT w.customer, w.url, w.secret,
    CASE WHEN w.old_until > now() THEN w.old_secret END AS old_secret,
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
-- Create a webhook or change its URL, enabled and without failures; `is_new`: the secret is new.
INSERT INTO headrace.fetch_webhook AS w (customer, url, secret, taken_seq)
VALUES (:customer, :url, :secret, (SELECT coalesce(max(seq), 0) FROM headrace.fetch_result))
ON CONFLICT (customer) DO UPDATE SET url = excluded.url, turn = w.turn + 1, failures = 0,
    failing_since = NULL, next_at = NULL, last_error = NULL, disabled_at = NULL
RETURNING w.secret = :secret AS is_new, w.id, w.turn;

-- name: remove_webhook
-- Delete a webhook and its secrets; its job ends when it runs next.
DELETE FROM headrace.fetch_webhook WHERE customer = :customer;

-- name: rotate_secret
-- Replace the secret; the previous one also signs for :overlap_s.
UPDATE headrace.fetch_webhook SET secret = :secret, old_secret = secret,
    old_until = now() + make_interval(secs => :overlap_s::double precision)
WHERE customer = :customer RETURNING old_until;

-- name: rewind_webhook
-- Resend the results after :after, at once.
UPDATE headrace.fetch_webhook SET taken_seq = :after, turn = turn + 1, failures = 0,
    failing_since = NULL, next_at = NULL
WHERE customer = :customer RETURNING id, turn, disabled_at IS NOT NULL AS is_disabled;

-- name: lock_webhooks
-- Enabled webhooks of these customers, locked so that none goes idle before the transaction ends.
SELECT customer, id, turn FROM headrace.fetch_webhook
WHERE customer = ANY(:customers::text[]) AND disabled_at IS NULL ORDER BY customer FOR SHARE;

-- name: behind_webhooks
-- Enabled webhooks with unsent results, a page by customer.
SELECT customer, id, turn FROM headrace.fetch_webhook w
WHERE disabled_at IS NULL AND customer > :after AND EXISTS (
    SELECT FROM headrace.fetch_result r WHERE r.customer = w.customer AND r.seq > w.taken_seq
)
ORDER BY customer LIMIT :rows_max;

-- name: lock_webhook
-- Lock a webhook before it goes idle; a publisher waits for the lock.
SELECT taken_seq FROM headrace.fetch_webhook
WHERE customer = :customer AND turn = :turn AND disabled_at IS NULL FOR UPDATE;

-- name: has_results_after
-- Whether a customer has results after :after.
SELECT EXISTS (SELECT FROM headrace.fetch_result WHERE customer = :customer AND seq > :after);

-- name: unsent_results
-- Unsent results of a webhook within both bounds, at least one.
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
-- End the turn of a job without unsent results; the next result enqueues a job of the next turn.
UPDATE headrace.fetch_webhook SET turn = turn + 1 WHERE customer = :customer AND turn = :turn;

-- name: note_taken
-- Record results up to :seq as accepted; ignored for another turn.
UPDATE headrace.fetch_webhook SET taken_seq = greatest(taken_seq, :seq), failures = 0,
    failing_since = NULL, next_at = NULL,
    last_at = now(), last_status = :status, last_error = NULL
WHERE customer = :customer AND turn = :turn;

-- name: note_refused
-- Record a failed message; the next attempt is after :delay_s.
UPDATE headrace.fetch_webhook SET failures = failures + 1,
    failing_since = coalesce(failing_since, now()),
    next_at = now() + make_interval(secs => :delay_s::double precision),
    last_at = now(), last_status = :status, last_error = :error
WHERE customer = :customer AND turn = :turn;

-- name: disable_webhook
-- Disable a webhook whose receiver answered 410, until a person sets it again.
UPDATE headrace.fetch_webhook SET disabled_at = now(), turn = turn + 1, next_at = NULL,
    failures = failures + 1, failing_since = coalesce(failing_since, now()),
    last_at = now(), last_status = :status, last_error = :error
WHERE customer = :customer AND turn = :turn;

-- name: hold_items
-- Hold versions of items back; a newer one replaces the one before.
INSERT INTO headrace.fetch_held AS h (customer, item, version, reason)
SELECT * FROM unnest(:customers::text[], :items::text[], :versions::bigint[], :reasons::text[])
    AS g (customer, item, version, reason) ORDER BY customer, item
ON CONFLICT (customer, item) DO UPDATE SET version = excluded.version, reason = excluded.reason,
    held_at = CASE WHEN h.version = excluded.version THEN h.held_at ELSE now() END;

-- name: forget_held
-- Items that are published or gone are held no more.
DELETE FROM headrace.fetch_held h
USING unnest(:customers::text[], :items::text[]) g (customer, item)
WHERE h.customer = g.customer AND h.item = g.item;

-- name: lock_held
-- A held item whose held version is its newest, locked, as `lock_changes` returns it.
SELECT 0::bigint AS run_id, i.item, 'changed' AS kind, i.version, false AS is_late, i.customer,
    i.version AS item_version, i.is_gone, i.photos,
    coalesce((i.fields::jsonb || o.fields)::text, i.fields) AS fields
FROM headrace.fetch_item i
JOIN headrace.fetch_held h ON h.customer = i.customer AND h.item = i.item AND h.version = i.version
LEFT JOIN headrace.fetch_overlay o ON o.customer = i.customer AND o.item = i.item
WHERE i.customer = :customer AND i.item = :item
FOR UPDATE OF i;

-- name: held_items
-- A page of held items.
SELECT h.customer, h.item, h.version, h.reason, h.held_at,
    coalesce((i.fields::jsonb || o.fields)::text, i.fields) AS fields
FROM headrace.fetch_held h JOIN headrace.fetch_item i USING (customer, item)
LEFT JOIN headrace.fetch_overlay o USING (customer, item)
WHERE (h.customer, h.item) > (:after_customer::text, :after_item::text)
    AND (:customer::text IS NULL OR h.customer = :customer)
ORDER BY h.customer, h.item LIMIT :rows_max;
