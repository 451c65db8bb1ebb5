-- name: add_consumers
-- Record consumers; returns the names of those that are new.
INSERT INTO headrace.fetch_consumer (name)
SELECT name FROM unnest(:names::text[]) g (name) ORDER BY name
ON CONFLICT (name) DO NOTHING
RETURNING name;

-- name: has_results
-- Whether anything was published yet.
SELECT EXISTS (SELECT FROM headrace.fetch_result);

-- name: consumer_ids
-- Every consumer with the id that its deliveries carry.
SELECT name, id FROM headrace.fetch_consumer ORDER BY name;

-- name: consumers
-- Every consumer, and how many items it was told of; those that it shows and is to be told of again are of them.
SELECT c.name, c.added_at, (
    SELECT count(*) FROM headrace.fetch_delivery d WHERE d.consumer = c.name AND (d.version > 0 OR d.is_shown)
) AS items
FROM headrace.fetch_consumer c
ORDER BY c.name;

-- name: remove_consumer
-- Forget a consumer and how far it was; its deliveries are dropped when their turn comes.
WITH deliveries AS (
    DELETE FROM headrace.fetch_delivery WHERE consumer = :name
), absent AS (
    DELETE FROM headrace.fetch_absent WHERE consumer = :name
)
DELETE FROM headrace.fetch_consumer WHERE name = :name;

-- name: lock_consumer
-- The id of a consumer, which then stays until the transaction ends.
SELECT id FROM headrace.fetch_consumer WHERE name = :name FOR SHARE;

-- name: replay_page
-- The newest results after an item, in order: of what is published, and of what the consumer still shows.
SELECT i.customer, i.item, r.seq
FROM headrace.fetch_item i
CROSS JOIN LATERAL (
    SELECT seq, action FROM headrace.fetch_result r
    WHERE r.customer = i.customer AND r.item = i.item
    ORDER BY r.version DESC LIMIT 1
) r
LEFT JOIN headrace.fetch_delivery d ON d.consumer = :name AND d.customer = i.customer AND d.item = i.item
WHERE (i.customer, i.item) > (:after_customer::text, :after_item::text)
    AND (:customer::text IS NULL OR i.customer = :customer)
    AND (r.action <> 'unpublish' OR d.is_shown)
ORDER BY i.customer, i.item LIMIT :rows_max;

-- name: rewind_deliveries
-- Let a consumer be told again of items; that it shows them is not forgotten.
UPDATE headrace.fetch_delivery d SET version = 0
FROM unnest(:customers::text[], :items::text[]) g (customer, item)
WHERE d.consumer = :name AND d.customer = g.customer AND d.item = g.item;

-- name: note_absent
-- A delivery found no process with its consumer; for how many seconds it has not.
INSERT INTO headrace.fetch_absent (consumer, seq) VALUES (:consumer, :seq)
ON CONFLICT (consumer, seq) DO UPDATE SET seq = excluded.seq
RETURNING extract(epoch FROM now() - since)::double precision;

-- name: forget_absent
-- A delivery that waited for its consumer is not needed any more.
DELETE FROM headrace.fetch_absent WHERE consumer = :consumer AND seq = :seq;

-- name: take_absent
-- Deliveries that waited for these consumers, some of them.
DELETE FROM headrace.fetch_absent a USING (
    SELECT consumer, seq FROM headrace.fetch_absent WHERE consumer = ANY(:names::text[])
    ORDER BY consumer, seq LIMIT :rows_max FOR UPDATE SKIP LOCKED
) few
WHERE a.consumer = few.consumer AND a.seq = few.seq
RETURNING a.consumer, a.seq, (SELECT r.customer FROM headrace.fetch_result r WHERE r.seq = a.seq) AS customer;
