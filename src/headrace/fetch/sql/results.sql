-- name: lock_changes
-- The changes of a batch that are not published yet, with their items locked in order.
SELECT c.run_id, c.item, c.kind, c.version, c.late_at IS NOT NULL AS is_late, i.customer,
    i.version AS item_version, i.is_gone, i.fields, i.photos
FROM unnest(:runs::bigint[], :items::text[]) g (run_id, item)
JOIN headrace.fetch_run r ON r.id = g.run_id
JOIN headrace.fetch_change c ON c.run_id = g.run_id AND c.item = g.item AND c.published_at IS NULL
JOIN headrace.fetch_item i ON i.customer = r.customer AND i.item = c.item
ORDER BY i.customer, i.item
FOR UPDATE OF i, c;

-- name: late_runs
-- Runs that have open changes and were applied longer ago than the deadline of their items.
SELECT id FROM headrace.fetch_run
WHERE state = 'applied' AND applied_at < now() - make_interval(secs => :deadline_s::double precision) ORDER BY id;

-- name: lock_late
-- New and changed items of a run that still have photos to ask for, with their items locked in order.
SELECT c.run_id, c.item, c.kind, c.version, false AS is_late, i.customer,
    i.version AS item_version, i.is_gone, i.fields, i.photos
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
-- Keep that items were published without all of their photos, and which were missing; their changes stay open.
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

-- name: take_turn
-- One writer of results at a time, until its transaction ends: then `seq` grows in the order of commits.
SELECT pg_advisory_xact_lock(hashtextextended('headrace.fetch_result', 0));

-- name: last_results
-- What was published last of each item.
SELECT DISTINCT ON (r.customer, r.item) r.customer, r.item, r.action, r.photos
FROM unnest(:customers::text[], :items::text[]) g (customer, item)
JOIN headrace.fetch_result r ON r.customer = g.customer AND r.item = g.item
ORDER BY r.customer, r.item, r.version DESC;

-- name: photos_of_items
-- Every link of some items, in order, with its outcome and its last good copy.
SELECT i.customer, i.item, p.url, coalesce(l.outcome, 'failed:not_asked') AS outcome,
    f.key, f.sha256, f.width, f.height, f.size_bytes
FROM unnest(:customers::text[], :items::text[]) g (customer, item)
JOIN headrace.fetch_item i ON i.customer = g.customer AND i.item = g.item
CROSS JOIN LATERAL unnest(i.photos) WITH ORDINALITY AS p (url, position)
LEFT JOIN headrace.fetch_link l ON l.customer = i.customer AND l.url = p.url
LEFT JOIN headrace.fetch_photo f ON f.sha256 = l.sha256
ORDER BY i.customer, i.item, p.position;

-- name: insert_results
-- Publish: one row for each version of an item, in the order given.
INSERT INTO headrace.fetch_result (customer, item, version, action, fields, photos)
SELECT customer, item, version, action, fields, photos FROM unnest(
    :customers::text[], :items::text[], :versions::bigint[], :actions::text[], :fields::text[], :photos::text[]
) WITH ORDINALITY AS g (customer, item, version, action, fields, photos, position)
ORDER BY position
ON CONFLICT (customer, item, version) DO NOTHING
RETURNING seq, customer;

-- name: note_photo_edits
-- Items whose photos changed after they were published get a version; those that were unchanged count as changed.
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
-- Photos of these items whose jobs ended without an outcome, which is ours to settle.
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
-- The newest results, those before a number, newest first.
SELECT seq, customer, item, version, action, fields, photos, at FROM headrace.fetch_result
WHERE seq < :before AND (:customer::text IS NULL OR customer = :customer)
ORDER BY seq DESC LIMIT :rows_max;

-- name: newest_result
-- The newest result of the item that result `seq` is of.
SELECT r.seq, r.customer, r.item, r.version, r.action, r.fields, r.photos, r.at
FROM headrace.fetch_result g
JOIN headrace.fetch_result r ON r.customer = g.customer AND r.item = g.item
WHERE g.seq = :seq ORDER BY r.version DESC LIMIT 1;

-- name: item
-- An item as it stands.
SELECT customer, item, version, is_gone, run_id, fields FROM headrace.fetch_item
WHERE customer = :customer AND item = :item;

-- name: begin_delivery
-- Take an item for a consumer, unless a newer version was delivered or another job is at it.
INSERT INTO headrace.fetch_delivery AS d (consumer, customer, item, busy_job, busy_until)
VALUES (:consumer, :customer, :item, :job_id, now() + make_interval(secs => :busy_s::double precision))
ON CONFLICT (consumer, customer, item) DO UPDATE
SET busy_job = excluded.busy_job, busy_until = excluded.busy_until
WHERE d.version < :version
    AND (d.busy_job IS NULL OR d.busy_job = excluded.busy_job OR d.busy_until < now())
RETURNING is_shown, version;

-- name: delivered_version
-- The newest version that a consumer got of an item.
SELECT version FROM headrace.fetch_delivery
WHERE consumer = :consumer AND customer = :customer AND item = :item;

-- name: end_delivery
-- Note a version as delivered; `is_shown` says whether the consumer now shows the item.
WITH absent AS (
    DELETE FROM headrace.fetch_absent WHERE consumer = :consumer AND seq = :seq
)
UPDATE headrace.fetch_delivery SET version = :version, is_shown = :is_shown, busy_job = NULL, busy_until = NULL
WHERE consumer = :consumer AND customer = :customer AND item = :item AND busy_job = :job_id;

-- name: drop_delivery
-- Let go of an item whose handler failed.
UPDATE headrace.fetch_delivery SET busy_job = NULL, busy_until = NULL
WHERE consumer = :consumer AND customer = :customer AND item = :item AND busy_job = :job_id;
