-- name: set_customer
-- Make a customer or change its limits.
INSERT INTO penstock.fetch_customer (customer, starts_max, window_s, connections)
VALUES (:customer, :starts_max, :window_s, :connections)
ON CONFLICT (customer) DO UPDATE SET
    starts_max = excluded.starts_max,
    window_s = excluded.window_s,
    connections = excluded.connections,
    updated_at = now();

-- name: customers
-- Every customer, or the one named.
SELECT customer, starts_max, window_s, connections FROM penstock.fetch_customer
WHERE :customer::text IS NULL OR customer = :customer
ORDER BY customer;

-- name: try_lock_customer
-- Keep other readers of this customer's catalogues away for as long as the session lives.
SELECT pg_try_advisory_lock(hashtextextended('penstock.fetch:' || :customer::text, 0));

-- name: unlock_customer
-- Let the next run of this customer in.
SELECT pg_advisory_unlock(hashtextextended('penstock.fetch:' || :customer::text, 0));

-- name: abandon_runs
-- Runs still `reading` while nobody holds the customer's lock: their process died, nothing was applied.
UPDATE penstock.fetch_run SET state = 'abandoned', ended_at = now(), reason = 'its process ended'
WHERE customer = :customer AND state = 'reading';

-- name: insert_run
-- Begin a run.
INSERT INTO penstock.fetch_run (customer, state, file_name, format)
VALUES (:customer, 'reading', :file_name, :format)
RETURNING id;

-- name: stage_rows
-- Stage rows in order; the first of an id wins, and the positions (from 1) of those taken come back.
WITH given AS (
    SELECT * FROM unnest(
        :items::text[], :hashes::bytea[], :fields::text[], :photos::text[], :refused::text[]
    ) WITH ORDINALITY AS g (item, hash, fields, photos, refused, position)
), firsts AS (
    SELECT DISTINCT ON (item) * FROM given ORDER BY item, position
), staged AS (
    INSERT INTO penstock.fetch_staged (run_id, item, hash, fields, photos, refused)
    SELECT :run_id::bigint, item, hash, fields,
        ARRAY(SELECT jsonb_array_elements_text(photos::jsonb)), refused::jsonb
    FROM firsts
    ON CONFLICT (run_id, item) DO NOTHING
    RETURNING item
)
SELECT firsts.position FROM staged JOIN firsts USING (item);

-- name: insert_problems
-- Keep the problems of some rows.
INSERT INTO penstock.fetch_problem (run_id, row_number, line, item, field, code, problem)
SELECT :run_id::bigint, * FROM unnest(
    :numbers::integer[], :lines::integer[], :items::text[], :fields::text[], :codes::text[], :texts::text[]
);

-- name: problems
-- A page of a run's problems in the order of its rows.
SELECT id, row_number, line, item, field, code, problem FROM penstock.fetch_problem
WHERE run_id = :run_id AND id > :after
ORDER BY id LIMIT :rows_max;

-- name: photo_problems
-- A page of the photos of a run that failed or were refused when asked, in the order of their needs.
SELECT id, item, url, outcome FROM penstock.fetch_need
WHERE run_id = :run_id AND id > :after AND (outcome LIKE 'failed:%' OR outcome LIKE 'refused:%')
ORDER BY id LIMIT :rows_max;

-- name: analyze_staged
-- Let the planner know what was just staged; its guess from an empty table is a nested loop.
ANALYZE penstock.fetch_staged;

-- name: analyze_changes
-- The same for the changes.
ANALYZE penstock.fetch_change;

-- name: published_count
-- How many items the customer has that are not gone.
SELECT count(*) FROM penstock.fetch_item WHERE customer = :customer AND NOT is_gone;

-- name: staged_count
-- How many items of a run are valid.
SELECT count(*) FROM penstock.fetch_staged WHERE run_id = :run_id AND hash IS NOT NULL;

-- name: diff
-- Compare what was staged with what is stored; an item whose row is invalid stays as it is.
WITH changes AS (
    INSERT INTO penstock.fetch_change (run_id, item, kind, version, has_other_photos)
    SELECT :run_id::bigint, s.item,
        CASE WHEN i.item IS NULL OR i.is_gone THEN 'new' ELSE 'changed' END,
        coalesce(i.version, 0) + 1,
        i.item IS NULL OR i.is_gone OR i.photos IS DISTINCT FROM s.photos
    FROM penstock.fetch_staged s
    LEFT JOIN penstock.fetch_item i ON i.customer = :customer AND i.item = s.item
    WHERE s.run_id = :run_id AND s.hash IS NOT NULL
        AND (i.item IS NULL OR i.is_gone OR i.hash <> s.hash)
    UNION ALL
    SELECT :run_id::bigint, i.item, 'gone', i.version + 1, false
    FROM penstock.fetch_item i
    WHERE i.customer = :customer AND NOT i.is_gone AND NOT EXISTS (
        SELECT FROM penstock.fetch_staged s WHERE s.run_id = :run_id AND s.item = i.item
    )
    RETURNING kind
)
SELECT count(*) FILTER (WHERE kind = 'new') AS new,
    count(*) FILTER (WHERE kind = 'changed') AS changed,
    count(*) FILTER (WHERE kind = 'gone') AS gone
FROM changes;

-- name: store_items
-- Make the new and changed items what their rows say.
INSERT INTO penstock.fetch_item (customer, item, version, is_gone, run_id, hash, fields, photos)
SELECT :customer, s.item, c.version, false, c.run_id, s.hash, s.fields, s.photos
FROM penstock.fetch_change c JOIN penstock.fetch_staged s USING (run_id, item)
WHERE c.run_id = :run_id AND c.kind <> 'gone'
ON CONFLICT (customer, item) DO UPDATE SET
    version = excluded.version, is_gone = false, run_id = excluded.run_id,
    hash = excluded.hash, fields = excluded.fields, photos = excluded.photos;

-- name: mark_gone
-- Make the items that the catalogue no longer names gone.
UPDATE penstock.fetch_item i SET version = c.version, is_gone = true, run_id = c.run_id
FROM penstock.fetch_change c
WHERE c.run_id = :run_id AND c.kind = 'gone' AND i.customer = :customer AND i.item = c.item;

-- name: refuse_links
-- Links refused at the door get their outcome at once.
INSERT INTO penstock.fetch_link (customer, url, outcome, failures, run_id)
SELECT DISTINCT ON (d.key) :customer, d.key, 'refused:' || d.value, 1, :run_id::bigint
FROM penstock.fetch_change c
JOIN penstock.fetch_staged s USING (run_id, item)
CROSS JOIN LATERAL jsonb_each_text(s.refused) d
WHERE c.run_id = :run_id AND c.kind <> 'gone'
ORDER BY d.key
ON CONFLICT (customer, url) DO UPDATE SET outcome = excluded.outcome, run_id = excluded.run_id,
    failures = penstock.fetch_link.failures + 1, checked_at = now();

-- name: count_refused
-- Photos refused at the door, by outcome.
INSERT INTO penstock.fetch_count (run_id, outcome, photos)
SELECT :run_id::bigint, 'refused:' || d.value, count(*)
FROM penstock.fetch_change c
JOIN penstock.fetch_staged s USING (run_id, item)
CROSS JOIN LATERAL jsonb_each_text(s.refused) d
WHERE c.run_id = :run_id AND c.kind <> 'gone'
GROUP BY d.value;

-- name: note_needs
-- The photos to ask for: every link of a list that changed, else those without a good result.
INSERT INTO penstock.fetch_need (run_id, item, url)
SELECT DISTINCT c.run_id, c.item, p.url
FROM penstock.fetch_change c
JOIN penstock.fetch_staged s USING (run_id, item)
CROSS JOIN LATERAL unnest(s.photos) p (url)
LEFT JOIN penstock.fetch_link l ON l.customer = :customer AND l.url = p.url
WHERE c.run_id = :run_id AND c.kind <> 'gone' AND NOT s.refused ? p.url AND (
    l.url IS NULL OR l.outcome NOT IN ('stored', 'unchanged') OR c.has_other_photos AND (
        coalesce(l.etag, l.last_modified) IS NOT NULL
        OR l.checked_at < now() - make_interval(secs => :recheck_s::double precision)
    )
);

-- name: count_known
-- Photos of new and changed items that need no request.
INSERT INTO penstock.fetch_count (run_id, outcome, photos)
SELECT :run_id::bigint, 'known', photos - needs - refused FROM (
    SELECT (
        SELECT coalesce(sum(cardinality(s.photos)), 0)
        FROM penstock.fetch_change c JOIN penstock.fetch_staged s USING (run_id, item)
        WHERE c.run_id = :run_id AND c.kind <> 'gone'
    ) AS photos,
    (SELECT count(*) FROM penstock.fetch_need WHERE run_id = :run_id) AS needs,
    (SELECT coalesce(sum(photos), 0) FROM penstock.fetch_count WHERE run_id = :run_id) AS refused
) sums
WHERE photos - needs - refused > 0;

-- name: avoid_nested_loops
-- Links that failed minutes ago are in no statistics yet: a nested loop over them takes hours.
SET LOCAL enable_nestloop = off;

-- name: allow_nested_loops
-- Back to what is usual, for the rest of the transaction.
SET LOCAL enable_nestloop = on;

-- name: note_retries
-- Photos of unchanged items without a good copy are asked again, unless an earlier run still asks them.
WITH asked AS (
    SELECT DISTINCT s.item, p.url
    FROM penstock.fetch_staged s
    CROSS JOIN LATERAL unnest(s.photos) p (url)
    JOIN penstock.fetch_link l ON l.customer = :customer AND l.url = p.url AND l.sha256 IS NULL
    WHERE s.run_id = :run_id AND s.hash IS NOT NULL AND NOT s.refused ? p.url AND NOT EXISTS (
        SELECT FROM penstock.fetch_run r
        JOIN penstock.fetch_change c ON c.run_id = r.id AND c.item = s.item
        WHERE r.customer = :customer
            AND (r.id = :run_id OR r.state = 'applied' AND c.published_at IS NULL)
    )
), needs AS (
    INSERT INTO penstock.fetch_need (run_id, item, url) SELECT :run_id::bigint, item, url FROM asked
)
INSERT INTO penstock.fetch_change (run_id, item, kind, version, has_other_photos)
SELECT DISTINCT :run_id::bigint, i.item, 'retry', i.version, false
FROM asked JOIN penstock.fetch_item i ON i.customer = :customer AND i.item = asked.item;

-- name: note_photos
-- Keep how many photos the run is about.
UPDATE penstock.fetch_run r SET
    photos = (SELECT count(*) FROM penstock.fetch_need WHERE run_id = r.id)
        + (SELECT coalesce(sum(c.photos), 0) FROM penstock.fetch_count c WHERE c.run_id = r.id)
WHERE id = :run_id;

-- name: drop_needs
-- A dry run asks nothing; what it would ask was counted.
DELETE FROM penstock.fetch_need WHERE run_id = :run_id;

-- name: changes_page
-- Changes after an item, in order, each with the links to ask for.
SELECT c.item, c.version, ARRAY(
    SELECT n.url FROM penstock.fetch_need n WHERE n.run_id = c.run_id AND n.item = c.item
) AS urls
FROM penstock.fetch_change c
WHERE c.run_id = :run_id AND c.item > :after
ORDER BY c.item LIMIT :rows_max;

-- name: note_counts
-- Keep what the diff found; `rows_valid` counts rows of valid items.
UPDATE penstock.fetch_run SET new = :new, changed = :changed, gone = :gone,
    unchanged = rows_read - invalid - :new - :changed
WHERE id = :run_id;

-- name: note_applied
-- The run's jobs are enqueued; without changes it is done at once.
UPDATE penstock.fetch_run r SET
    items_pending = sums.changes,
    state = CASE WHEN sums.changes = 0 THEN 'done' ELSE 'applied' END,
    ended_at = CASE WHEN sums.changes = 0 THEN now() END
FROM (SELECT count(*) AS changes FROM penstock.fetch_change WHERE run_id = :run_id) sums
WHERE r.id = :run_id;

-- name: note_reading
-- Keep how far reading is.
UPDATE penstock.fetch_run SET rows_read = :rows_read, invalid = :invalid, problems = :problems
WHERE id = :run_id;

-- name: end_run
-- Move a run to a state in which nothing more happens by itself.
UPDATE penstock.fetch_run SET state = :state, reason = :reason, ended_at = now() WHERE id = :run_id;

-- name: lock_run
-- A run, kept as it is until the transaction ends.
SELECT id, customer, state FROM penstock.fetch_run WHERE id = :run_id FOR UPDATE;

-- name: newer_run
-- A later run of the customer that was applied.
SELECT id FROM penstock.fetch_run
WHERE customer = :customer AND id > :run_id AND state IN ('applied', 'done')
ORDER BY id DESC LIMIT 1;

-- name: supersede_held
-- Held runs older than one that was applied can no longer be confirmed.
UPDATE penstock.fetch_run SET state = 'superseded', ended_at = now()
WHERE customer = :customer AND id < :run_id AND state = 'held';

-- name: clear_staged
-- Drop staged rows of the customer's runs that cannot need them any more.
DELETE FROM penstock.fetch_staged s USING penstock.fetch_run r
WHERE s.run_id = r.id AND r.customer = :customer AND r.state NOT IN ('reading', 'held');

-- name: forget_runs
-- Drop the customer's oldest ended runs, with all that hangs on them.
DELETE FROM penstock.fetch_run WHERE customer = :customer
    AND state NOT IN ('reading', 'held', 'applied')
    AND id <= (
        SELECT id FROM penstock.fetch_run WHERE customer = :customer
        ORDER BY id DESC OFFSET :runs_kept LIMIT 1
    );

-- name: runs
-- Runs, newest first: one by id, or those of a customer, or all.
SELECT r.*, counts.by_outcome, coalesce(counts.decided, 0) AS photos_decided
FROM penstock.fetch_run r
LEFT JOIN LATERAL (
    SELECT jsonb_object_agg(outcome, c.photos)::text AS by_outcome, sum(c.photos) AS decided
    FROM penstock.fetch_count c WHERE c.run_id = r.id
) counts ON true
WHERE (:run_id::bigint IS NULL OR r.id = :run_id) AND (:customer::text IS NULL OR r.customer = :customer)
ORDER BY r.id DESC LIMIT :rows_max;
