-- name: near_photos
-- Photos that look like a content, nearest first, without the content itself.
SELECT h.customer, h.item, h.url, h.sha256, p.key, p.width, p.height, p.size_bytes, n.distance
FROM (SELECT hash FROM headrace.fetch_photo_hash WHERE sha256 = :sha256 LIMIT 1) g
CROSS JOIN LATERAL headrace.fetch_near_v1(g.hash, :bits::integer, :candidates_max::integer) n
JOIN headrace.fetch_photo_hash h ON h.id = n.id AND h.sha256 <> :sha256
JOIN headrace.fetch_photo p ON p.sha256 = h.sha256
ORDER BY n.distance, h.id LIMIT 100;

-- name: compare_photos
-- Record the pairs of some new photos, and mark these photos as compared. A photo that commits
-- later is new then, and finds these.
WITH new AS MATERIALIZED (
    SELECT id, hash, customer, item FROM headrace.fetch_photo_hash WHERE NOT is_compared
    ORDER BY id LIMIT :rows_max FOR UPDATE SKIP LOCKED
), pairs AS (
    INSERT INTO headrace.fetch_near_duplicate (first, second, customers, distance)
    SELECT least(n.id, o.id), greatest(n.id, o.id), ARRAY[n.customer, o.customer], o.distance
    FROM new n CROSS JOIN LATERAL (
        SELECT h.id, h.customer, d.distance
        FROM headrace.fetch_near_v1(n.hash, :bits::integer, :candidates_max::integer) d
        JOIN headrace.fetch_photo_hash h ON h.id = d.id
        WHERE h.id <> n.id AND (h.customer, h.item) <> (n.customer, n.item)
        ORDER BY d.distance, h.id LIMIT :pairs_max
    ) o
    ON CONFLICT (first, second) DO NOTHING
)
UPDATE headrace.fetch_photo_hash h SET is_compared = true FROM new n WHERE h.id = n.id;

-- name: near_duplicates
-- A page of pairs, newest first.
SELECT d.id, d.distance, d.found_at, d.reviewed_at, (
    SELECT json_agg(json_build_object(
        'customer', h.customer, 'item', h.item, 'url', h.url, 'sha256', p.sha256, 'key', p.key,
        'width', p.width, 'height', p.height, 'size_bytes', p.size_bytes
    ) ORDER BY h.id)::text
    FROM headrace.fetch_photo_hash h JOIN headrace.fetch_photo p USING (sha256)
    WHERE h.id IN (d.first, d.second)
) AS photos
FROM headrace.fetch_near_duplicate d
WHERE d.id < :before AND (d.reviewed_at IS NOT NULL) = :reviewed::boolean
    AND (:customer::text IS NULL OR :customer = ANY(d.customers))
    AND (:across::boolean IS NULL OR (d.customers[1] <> d.customers[2]) = :across)
ORDER BY d.id DESC LIMIT :rows_max;

-- name: review_duplicate
-- Mark a pair as reviewed; a repetition keeps the first time.
UPDATE headrace.fetch_near_duplicate SET reviewed_at = coalesce(reviewed_at, now())
WHERE id = :id;
