-- name: hours
-- Views of an entity by hour, of every class.
SELECT hour AS start_at, class, views FROM headrace.views_hour
WHERE id = :id AND hour >= :from_at AND hour < :to_at ORDER BY 1, 2;

-- name: days
-- Views of an entity by day of a time zone, of every class.
SELECT date_trunc('day', hour, :time_zone::text) AS start_at, class, sum(views)::bigint AS views
FROM headrace.views_hour
WHERE id = :id AND hour >= :from_at AND hour < :to_at GROUP BY 1, 2 ORDER BY 1, 2;

-- name: top
-- The entities with most views of a class since so many seconds ago, whole hours.
SELECT id, sum(views)::bigint AS views FROM headrace.views_hour
WHERE hour >= date_trunc('hour', now() - :window_s * interval '1 second') AND class = :class
GROUP BY id ORDER BY 2 DESC, 1 LIMIT :rows_max;

-- name: differences
-- Totals that are not the sum of their hours.
SELECT id, class, coalesce(t.total, 0) AS total, coalesce(h.views, 0) AS hours
FROM headrace.views_total t
FULL JOIN (
    SELECT id, class, sum(views)::bigint AS views FROM headrace.views_hour GROUP BY 1, 2
) h USING (id, class)
WHERE coalesce(t.total, 0) <> coalesce(h.views, 0) ORDER BY 1, 2 LIMIT :rows_max;

-- name: counted
-- How many entities there are, and all their views.
SELECT count(DISTINCT id) AS entities, coalesce(sum(total), 0)::bigint AS views FROM headrace.views_total;

-- name: delete
-- Remove an entity, leave a tombstone.
SELECT total, until_at FROM headrace.delete_views_v1(:id::text, :shard::integer, :kept_s);

-- name: reclassify
-- Move views of an entity from one class to another.
SELECT views, corrections FROM headrace.reclassify_views_v1(
    :id::text, :shard::integer, :from_at, :to_at, :source::smallint, :target::smallint);
