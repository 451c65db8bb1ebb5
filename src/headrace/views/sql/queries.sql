-- name: ensure_shards
-- Create the shards if there are none. Return how many exist.
SELECT headrace.ensure_view_shards_v1(:shards::integer);

-- name: shards
-- Offset, corrections and current flusher of every shard.
SELECT s.shard, s.through, s.setups, s.corrections,
    CASE WHEN now() BETWEEN l.renewed_at AND l.expires_at THEN l.flusher END AS flusher
FROM headrace.views_shard s JOIN headrace.views_lease l USING (shard) ORDER BY s.shard;

-- name: shard
-- Offset and corrections of one shard.
SELECT shard, through, setups, corrections FROM headrace.views_shard WHERE shard = :shard;

-- name: begin_set_up
-- Make all flushes of entries that were read before do nothing. Return the shard.
UPDATE headrace.views_shard SET setups = setups + 1 WHERE shard = :shard
RETURNING shard, through, setups, corrections;

-- name: lease_shards
-- Renew a flusher. Return its shards with their offsets.
SELECT shard, through, setups, corrections
FROM headrace.lease_view_shards_v1(:name::text, :lease_s);

-- name: leave_shards
-- Release a flusher's shards.
SELECT headrace.leave_view_shards_v1(:name::text);

-- name: flush
-- Count a part of a stream and move the offset. NULL: another flusher moved the offset first, or
-- the stream was set up since it was read.
SELECT headrace.flush_views_v1(
    :shard::integer, :setups::bigint, :from_id::text, :to_id::text,
    :ids::text[], :classes::smallint[], :hours::timestamptz[], :views::bigint[]);

-- name: write_uniques
-- Store viewer counts. They only grow, so an emptied Valkey lowers none.
INSERT INTO headrace.views_unique AS u (id, day, viewers, sketch)
SELECT DISTINCT ON (g.id, g.day) g.id, g.day, g.viewers, g.sketch
FROM unnest(:ids::text[], :days::date[], :viewers::bigint[], :sketches::bytea[])
    g (id, day, viewers, sketch)
WHERE NOT EXISTS (
    SELECT FROM headrace.views_tombstone t WHERE t.id = g.id AND t.until_at > now())
ORDER BY g.id, g.day, g.viewers DESC
ON CONFLICT (id, day) DO UPDATE SET viewers = excluded.viewers, sketch = excluded.sketch
WHERE excluded.viewers >= u.viewers;

-- name: drop_tombstones
-- Delete expired tombstones.
DELETE FROM headrace.views_tombstone WHERE until_at < now();

-- name: drop_uniques
-- Delete some viewer counts of days before a date.
DELETE FROM headrace.views_unique WHERE (id, day) IN (
    SELECT id, day FROM headrace.views_unique WHERE day < :before::date
    ORDER BY day LIMIT :rows_max);

-- name: totals_to_fill
-- Human totals and the offset of their shard, in one snapshot.
SELECT g.id, s.shard, s.through, s.corrections, coalesce(t.total, 0) AS total,
    d.id IS NOT NULL AS is_deleted
FROM unnest(:ids::text[], :shards::integer[]) g (id, shard)
JOIN headrace.views_shard s ON s.shard = g.shard
LEFT JOIN headrace.views_total t ON t.id = g.id AND t.class = 0
LEFT JOIN headrace.views_tombstone d ON d.id = g.id AND d.until_at > now();

-- name: totals
-- Human totals of the entities that have any.
SELECT id, total FROM headrace.views_total WHERE id = ANY (:ids::text[]) AND class = 0;

-- name: ids_like
-- Entities with a total, from one id to another.
SELECT id FROM headrace.views_total WHERE id BETWEEN :part AND :last AND class = 0
ORDER BY id LIMIT :rows_max;

-- name: class_totals
-- Totals of entities in every class.
SELECT id, class, total FROM headrace.views_total WHERE id = ANY (:ids::text[]) AND class < 4;

-- name: counter_totals
-- Totals of the counters of entities, of humans.
SELECT t.id, c.name, t.total FROM headrace.views_total t
JOIN headrace.views_counter c ON t.class = 4 * c.number WHERE t.id = ANY (:ids::text[]);

-- name: counter_numbers
-- Numbers of counters, assigned to new names.
SELECT name, number FROM headrace.ensure_view_counters_v1(:names::text[]);

-- name: counters
-- Every counter.
SELECT name, number FROM headrace.views_counter;

-- name: day_totals
-- Human views since a moment.
SELECT id, sum(views)::bigint AS views FROM headrace.views_hour
WHERE id = ANY (:ids::text[]) AND class = 0 AND hour >= :since_at GROUP BY id;

-- name: day_uniques
-- Stored viewers of one day.
SELECT id, viewers FROM headrace.views_unique WHERE id = ANY (:ids::text[]) AND day = :day;

-- name: sketches
-- Stored sketches of entities by day.
SELECT day, sketch FROM headrace.views_unique
WHERE id = ANY (:ids::text[]) AND day >= :since::date AND day < :until::date;

-- name: series
-- Views of entities by class and hour of UTC, or day or month of a time zone; old hours exist as
-- days only.
SELECT g.id, g.start_at, g.class, sum(g.views)::bigint AS views, c.name FROM (
    SELECT h.id, date_trunc(:unit::text, h.hour, :time_zone::text) AS start_at, h.class, h.views
    FROM headrace.views_hour h, headrace.views_history s
    WHERE h.id = ANY (:ids::text[]) AND h.hour >= :from_at AND h.hour < :to_at
        AND (h.hour >= s.hours_from OR :unit <> 'hour' AND h.id > s.rolled_id)
    UNION ALL
    SELECT d.id, date_trunc(:unit::text, d.day::timestamp) AT TIME ZONE :time_zone::text,
        d.class, d.views
    FROM headrace.views_day d
    WHERE d.id = ANY (:ids::text[]) AND :unit <> 'hour'
        AND d.day >= (:from_at AT TIME ZONE :time_zone::text)::timestamp
        AND d.day < (:to_at AT TIME ZONE :time_zone::text)::timestamp
) g LEFT JOIN headrace.views_counter c ON c.number = g.class / 4
GROUP BY g.id, g.start_at, g.class, c.name ORDER BY 1, 2, 3;

-- name: next_ids
-- The next entities with views after an id.
SELECT DISTINCT id FROM headrace.views_total WHERE id > :after ORDER BY id LIMIT :ids_max;

-- name: hours_from
-- The first hour that is not replaced by its day.
SELECT nullif(hours_from, '-infinity') FROM headrace.views_history;

-- name: ensure_months
-- Create the partitions from last month to the month after next.
SELECT headrace.ensure_view_months_v1(ARRAY(
    SELECT now() + months * interval '1 month' FROM generate_series(-1, 2) months));

-- name: roll_up
-- Take one step to replace hours before a moment by days. Return whether there may be another.
SELECT headrace.roll_up_views_v1(:before::timestamptz, :time_zone::text, :ids_max::integer);

-- name: top
-- Entities with the most views of a class in a window of whole hours.
SELECT id, sum(views)::bigint AS views FROM headrace.views_hour
WHERE hour >= date_trunc('hour', now() - :window_s * interval '1 second') AND class = :class
GROUP BY id ORDER BY 2 DESC, 1 LIMIT :rows_max;

-- name: differences
-- Totals that differ from the sum of their hours.
SELECT id, class, coalesce(t.total, 0) AS total, coalesce(h.views, 0) AS hours
FROM headrace.views_total t
FULL JOIN (
    SELECT id, class, sum(views)::bigint AS views FROM (
        SELECT h.id, h.class, h.views FROM headrace.views_hour h, headrace.views_history s
        WHERE h.hour >= s.hours_from OR h.id > s.rolled_id
        UNION ALL SELECT id, class, views FROM headrace.views_day
    ) g GROUP BY 1, 2
) h USING (id, class)
WHERE coalesce(t.total, 0) <> coalesce(h.views, 0) ORDER BY 1, 2 LIMIT :rows_max;

-- name: counted
-- Number of entities and sum of all their views.
SELECT count(DISTINCT id) AS entities, coalesce(sum(total), 0)::bigint AS views
FROM headrace.views_total WHERE class < 4;

-- name: delete
-- Delete an entity and leave a tombstone.
SELECT total, until_at, corrections FROM headrace.delete_views_v1(
    :id::text, :shard::integer, :shards::integer, :kept_s);

-- name: reclassify
-- Move views of an entity between classes.
SELECT views, corrections FROM headrace.reclassify_views_v1(
    :id::text, :shard::integer, :shards::integer, :from_at, :to_at,
    :source::smallint, :target::smallint);

-- name: corrections
-- Deletions and moves of a shard from a number on, in order.
SELECT c.number, c.id, t.id IS NOT NULL AS is_deleted
FROM headrace.views_correction c
LEFT JOIN headrace.views_tombstone t ON t.id = c.id AND t.until_at > now()
WHERE c.shard = :shard AND c.number >= :since ORDER BY c.number LIMIT :rows_max;

-- name: drop_corrections
-- Delete some old numbers of deletions and moves. The last one of each shard stays.
DELETE FROM headrace.views_correction WHERE (shard, number) IN (
    SELECT c.shard, c.number
    FROM headrace.views_correction c JOIN headrace.views_shard s USING (shard)
    WHERE c.at < now() - :kept_s * interval '1 second' AND c.number <> s.corrections
    ORDER BY c.shard, c.number LIMIT :rows_max);

-- name: keep_changes
-- Turn the changes on or off, and drop old ones.
SELECT headrace.keep_view_changes_v1(:kept_s, :rows_max::integer);

-- name: changes
-- Changes of shards at and after numbers, about `rows_max` rows, in the order of each shard.
SELECT g.* FROM (
    SELECT c.shard, c.number, c.at, c.number = p.number AS is_known,
        CASE WHEN c.number > p.number THEN c.ids END AS ids,
        CASE WHEN c.number > p.number THEN c.classes END AS classes,
        CASE WHEN c.number > p.number THEN c.hours END AS hours,
        CASE WHEN c.number > p.number THEN c.views END AS views,
        sum(CASE WHEN c.number > p.number THEN c.size ELSE 0 END)
            OVER (ORDER BY c.number - p.number, p.shard) - c.size AS rows_before
    FROM unnest(:shards::integer[], :numbers::bigint[]) p (shard, number)
    CROSS JOIN LATERAL (
        SELECT * FROM headrace.views_change k WHERE k.shard = p.shard AND k.number >= p.number
        ORDER BY k.number LIMIT 64
    ) c
) g WHERE g.is_known OR g.rows_before < :rows_max ORDER BY g.shard, g.number;

-- name: newest_changes
-- The newest change of each shard.
SELECT c.shard, c.number, c.at, true AS is_known,
    NULL AS ids, NULL AS classes, NULL AS hours, NULL AS views
FROM headrace.views_shard s JOIN headrace.views_change c
    ON c.shard = s.shard AND c.number = s.changes ORDER BY 1;

-- name: mark
-- Store a mark, or change its end.
INSERT INTO headrace.views_mark (id, name, from_at, to_at)
VALUES (:id, :name, :from_at, :to_at)
ON CONFLICT (id, name, from_at) DO UPDATE SET to_at = excluded.to_at;

-- name: unmark
-- Delete the marks of a name, or the one that begins at a moment.
DELETE FROM headrace.views_mark WHERE id = :id AND name = :name
    AND (:from_at::timestamptz IS NULL OR from_at = :from_at);

-- name: marks
-- The newest marks of an entity that overlap a span, oldest first.
SELECT * FROM (
    SELECT name, from_at, to_at FROM headrace.views_mark
    WHERE id = :id AND from_at < :to_at AND (to_at IS NULL OR to_at > :from_at)
    ORDER BY from_at DESC, name LIMIT :rows_max
) g ORDER BY from_at, name;
