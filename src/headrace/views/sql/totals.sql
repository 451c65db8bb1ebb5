-- name: totals_to_fill
-- People's totals with the offset of their shard, in one snapshot.
SELECT g.id, s.shard, s.through, s.corrections, coalesce(t.total, 0) AS total, d.id IS NOT NULL AS is_deleted
FROM unnest(:ids::text[], :shards::integer[]) g (id, shard)
JOIN headrace.views_shard s ON s.shard = g.shard
LEFT JOIN headrace.views_total t ON t.id = g.id AND t.class = 0
LEFT JOIN headrace.views_tombstone d ON d.id = g.id AND d.until_at > now();

-- name: totals
-- People's totals of those entities that have any.
SELECT id, total FROM headrace.views_total WHERE id = ANY (:ids::text[]) AND class = 0;

-- name: class_totals
-- Totals of entities in every class.
SELECT id, class, total FROM headrace.views_total WHERE id = ANY (:ids::text[]);

-- name: day_totals
-- People's views since a moment.
SELECT id, sum(views)::bigint AS views FROM headrace.views_hour
WHERE id = ANY (:ids::text[]) AND class = 0 AND hour >= :since_at GROUP BY id;

-- name: day_uniques
-- Viewers of a day as last written down.
SELECT id, viewers FROM headrace.views_unique WHERE id = ANY (:ids::text[]) AND day = :day;

-- name: uniques_by_day
-- Viewers of an entity by day, as last written down.
SELECT day, viewers FROM headrace.views_unique
WHERE id = :id AND day >= :since::date AND day < :until::date;
