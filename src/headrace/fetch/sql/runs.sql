-- name: set_customer
-- Make a customer or change its limits.
INSERT INTO headrace.fetch_customer
    (customer, starts_max, window_s, connections, hold_share, hold_items, refresh_s)
VALUES (:customer, :starts_max, :window_s, :connections, :hold_share, :hold_items, :refresh_s)
ON CONFLICT (customer) DO UPDATE SET
    starts_max = excluded.starts_max,
    window_s = excluded.window_s,
    connections = excluded.connections,
    hold_share = excluded.hold_share,
    hold_items = excluded.hold_items,
    refresh_s = excluded.refresh_s,
    updated_at = now();

-- name: customers
-- Every customer, or the one named.
SELECT customer, starts_max, window_s, connections, hold_share, hold_items, refresh_s
FROM headrace.fetch_customer
WHERE :customer::text IS NULL OR customer = :customer
ORDER BY customer;

-- name: try_lock_customer
-- Keep other readers of this customer's catalogues away for as long as the session lives.
SELECT pg_try_advisory_lock(hashtextextended('headrace.fetch:' || :customer::text, 0));

-- name: unlock_customer
-- Let the next run of this customer in.
SELECT pg_advisory_unlock(hashtextextended('headrace.fetch:' || :customer::text, 0));

-- name: abandon_runs
-- Runs still `reading` while nobody holds the customer's lock: their process died, nothing was applied.
UPDATE headrace.fetch_run SET state = 'abandoned', ended_at = now(), reason = 'its process ended'
WHERE customer = :customer AND id IS DISTINCT FROM :but::bigint AND (
    state = 'reading' OR state = 'bringing' AND started_at < now() - interval '1 day'
);

-- name: insert_run
-- Begin a run.
INSERT INTO headrace.fetch_run (customer, state, file_name, format, is_whole)
VALUES (:customer, 'reading', :file_name, :format, :is_whole)
RETURNING id;

-- name: begin_ordered
-- Begin to read the file that a run was waiting for.
UPDATE headrace.fetch_run SET state = 'reading', format = :format, reason = NULL
WHERE id = :run_id AND customer = :customer AND state IN ('bringing', 'reading') RETURNING id;

-- name: clear_problems
-- Drop the problems of a run that is read anew.
DELETE FROM headrace.fetch_problem WHERE run_id = :run_id;

-- name: commit_lazily
-- What this transaction stages need not outlive a crash by itself: the run that applies it is waited for.
SELECT set_config('synchronous_commit', 'off', true);

-- name: lock_items
-- Apply changes to a customer's items one after the other, until the transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended('headrace.fetch.items:' || :customer::text, 0));

-- name: stage_same
-- Stage rows equal to those that their items were made of, without their content; the positions (from 1) of all others.
-- OFFSET 0 keeps each looked up by key: a plan may prefer to read all items for every few thousand rows.
WITH given AS (
    SELECT * FROM unnest(:items::text[], :raw_hashes::bytea[])
        WITH ORDINALITY AS g (item, raw_hash, position)
), same AS (
    INSERT INTO headrace.fetch_staged (run_id, item, hash, raw_hash, fields, photos, refused)
    SELECT :run_id::bigint, g.item, i.hash, i.raw_hash, '', '{}', '{}'
    FROM given g
    CROSS JOIN LATERAL (
        SELECT hash, raw_hash FROM headrace.fetch_item
        WHERE customer = :customer AND item = g.item AND raw_hash = g.raw_hash AND NOT is_gone
        OFFSET 0
    ) i
    ON CONFLICT (run_id, item) DO NOTHING
    RETURNING item
)
SELECT position FROM given WHERE item NOT IN (SELECT item FROM same) ORDER BY position;

-- name: stage_rows
-- Stage rows in order; the first of an id wins, and the positions (from 1) of those taken come back.
WITH given AS (
    SELECT * FROM unnest(
        :items::text[], :hashes::bytea[], :raw_hashes::bytea[], :fields::text[], :photos::text[],
        :refused::text[]
    ) WITH ORDINALITY AS g (item, hash, raw_hash, fields, photos, refused, position)
), firsts AS (
    SELECT DISTINCT ON (item) * FROM given ORDER BY item, position
), staged AS (
    INSERT INTO headrace.fetch_staged (run_id, item, hash, raw_hash, fields, photos, refused)
    SELECT :run_id::bigint, item, hash, raw_hash, fields, string_to_array(photos, E'\n'), refused::jsonb
    FROM firsts
    ON CONFLICT (run_id, item) DO NOTHING
    RETURNING item
)
SELECT firsts.position FROM staged JOIN firsts USING (item);

-- name: stage_gone
-- Stage items that are said to be gone.
INSERT INTO headrace.fetch_staged (run_id, item, fields, photos, refused, is_gone)
SELECT :run_id::bigint, item, '', '{}', '{}', true FROM unnest(:items::text[]) g (item);

-- name: stage_broken
-- Stage the items that have a link without a good answer or with another copy, as rows equal to what is stored.
INSERT INTO headrace.fetch_staged (run_id, item, hash, fields, photos, refused)
SELECT DISTINCT ON (i.item) :run_id::bigint, i.item, i.hash, '', '{}'::text[], '{}'::jsonb
FROM headrace.fetch_item i
CROSS JOIN LATERAL unnest(i.photos) p (url)
JOIN headrace.fetch_link l ON l.customer = :customer AND l.url = p.url
    AND (l.outcome NOT IN ('stored', 'unchanged') OR l.copied_at IS NOT NULL)
WHERE i.customer = :customer AND NOT i.is_gone
ORDER BY i.item;

-- name: analyze_staged
-- Let the planner know what was just staged; its guess from an empty table is a nested loop.
ANALYZE headrace.fetch_staged;

-- name: analyze_changes
-- The same for the changes.
ANALYZE headrace.fetch_change;

-- name: published_count
-- How many items the customer has that are not gone.
SELECT count(*) FROM headrace.fetch_item WHERE customer = :customer AND NOT is_gone;

-- name: staged_count
-- How many items of a run are valid.
SELECT count(*) FROM headrace.fetch_staged WHERE run_id = :run_id AND hash IS NOT NULL;

-- name: unreadable_before
-- How many rows without a readable id the catalogue had that was applied last, of the problems that are kept.
SELECT count(DISTINCT row_number) FROM headrace.fetch_problem
WHERE item IS NULL AND run_id = (
    SELECT id FROM headrace.fetch_run
    WHERE customer = :customer AND id < :run_id AND is_whole AND format <> 'same'
        AND state IN ('applied', 'done')
    ORDER BY id DESC LIMIT 1
);

-- name: note_line_break
-- Note whether a run's table ended with a line break; return whether the table applied last did.
WITH noted AS (
    UPDATE headrace.fetch_run SET has_line_break = :has_line_break WHERE id = :run_id
)
SELECT has_line_break FROM headrace.fetch_run
WHERE customer = :customer AND id < :run_id AND is_whole AND undone_by IS NULL
    AND state IN ('applied', 'done') AND has_line_break IS NOT NULL
ORDER BY id DESC LIMIT 1;

-- name: missing_count
-- How many items a run would take for gone.
SELECT count(*) FROM headrace.fetch_item i
WHERE i.customer = :customer AND NOT i.is_gone AND i.sent_run < :run_id AND NOT EXISTS (
    SELECT FROM headrace.fetch_staged s WHERE s.run_id = :run_id AND s.item = i.item
);

-- name: diff
-- Compare what was staged with what is stored. An item stays as it is where its row is invalid or equal, or
-- where it was sent by itself after the run began; in a whole run those that no row names are gone.
WITH changes AS (
    INSERT INTO headrace.fetch_change (run_id, item, kind, version, has_other_photos, fields)
    SELECT :run_id::bigint, s.item,
        CASE WHEN i.item IS NULL OR i.is_gone THEN 'new' ELSE 'changed' END,
        coalesce(i.version, 0) + 1,
        i.item IS NULL OR i.is_gone OR i.photos IS DISTINCT FROM s.photos,
        CASE WHEN i.item IS NULL OR i.is_gone THEN '{}' ELSE ARRAY(
            SELECT coalesce(a.key, b.key)
            FROM jsonb_each(s.fields::jsonb) a
            FULL JOIN jsonb_each(i.fields::jsonb) b ON b.key = a.key
            WHERE a.value IS DISTINCT FROM b.value
            ORDER BY 1 LIMIT 100
        ) END
    FROM headrace.fetch_staged s
    LEFT JOIN headrace.fetch_item i ON i.customer = :customer AND i.item = s.item
    WHERE s.run_id = :run_id AND s.hash IS NOT NULL AND s.fields <> ''
        AND (i.item IS NULL OR (i.is_gone OR i.hash <> s.hash) AND i.sent_run < :run_id)
    UNION ALL
    SELECT :run_id::bigint, i.item, 'gone', i.version + 1, false, '{}'
    FROM headrace.fetch_item i
    WHERE :is_whole::boolean AND i.customer = :customer AND NOT i.is_gone AND i.sent_run < :run_id
        AND NOT EXISTS (
            SELECT FROM headrace.fetch_staged s WHERE s.run_id = :run_id AND s.item = i.item
        )
    UNION ALL
    SELECT :run_id::bigint, i.item, 'gone', i.version + 1, false, '{}'
    FROM headrace.fetch_staged s
    JOIN headrace.fetch_item i ON i.customer = :customer AND i.item = s.item AND NOT i.is_gone
    WHERE s.run_id = :run_id AND s.is_gone
    RETURNING kind
)
SELECT count(*) FILTER (WHERE kind = 'new') AS new,
    count(*) FILTER (WHERE kind = 'changed') AS changed,
    count(*) FILTER (WHERE kind = 'gone') AS gone
FROM changes;

-- name: store_items
-- Make the new and changed items what their rows say, in the order in which publishing locks them. A version
-- that publishing took meanwhile is passed over.
WITH stored AS (
    INSERT INTO headrace.fetch_item AS i
        (customer, item, version, is_gone, run_id, hash, raw_hash, fields, photos)
    SELECT :customer, s.item, c.version, false, c.run_id, s.hash, s.raw_hash, s.fields, s.photos
    FROM headrace.fetch_change c JOIN headrace.fetch_staged s USING (run_id, item)
    WHERE c.run_id = :run_id AND c.kind <> 'gone'
    ORDER BY s.item
    ON CONFLICT (customer, item) DO UPDATE SET
        version = greatest(excluded.version, i.version + 1), is_gone = false,
        run_id = excluded.run_id, hash = excluded.hash, raw_hash = excluded.raw_hash,
        fields = excluded.fields, photos = excluded.photos
    RETURNING item, version
)
UPDATE headrace.fetch_change c SET version = stored.version
FROM stored WHERE c.run_id = :run_id AND c.item = stored.item AND c.version <> stored.version;

-- name: keep_before
-- Keep the content of the items that a run is about to change or remove.
INSERT INTO headrace.fetch_before (run_id, item, hash, raw_hash, fields, photos)
SELECT c.run_id, c.item, i.hash, i.raw_hash, i.fields, i.photos
FROM headrace.fetch_change c JOIN headrace.fetch_item i ON i.customer = :customer AND i.item = c.item
WHERE c.run_id = :run_id AND c.kind IN ('changed', 'gone');

-- name: run_to_undo
-- A run with the later catalogues that were applied and not undone, newest first, and how many are newer in all.
SELECT r.id, r.state, r.is_whole, r.format, r.undone_by, later.runs AS later, later.newer
FROM headrace.fetch_run r
CROSS JOIN LATERAL (
    SELECT count(*) AS newer,
        array_agg(l.id ORDER BY l.id DESC) FILTER (WHERE l.undone_by IS NULL) AS runs
    FROM headrace.fetch_run l
    WHERE l.customer = r.customer AND l.id > r.id AND l.is_whole AND l.format <> 'same'
        AND l.state IN ('applied', 'done')
) later
WHERE r.id = :run_id FOR UPDATE OF r;

-- name: before_page
-- Items that a run changed or removed, with their content before it; those sent by themselves since are left out.
SELECT b.item, b.hash, b.raw_hash, b.fields, b.photos
FROM headrace.fetch_before b
JOIN headrace.fetch_run r ON r.id = b.run_id
JOIN headrace.fetch_item i ON i.customer = r.customer AND i.item = b.item AND i.sent_run < r.id
WHERE b.run_id = :run_id AND b.item > :after
ORDER BY b.item LIMIT 1000;

-- name: stage_new_as_gone
-- Stage the items that a run added as gone; how many. Those sent by themselves since are left out.
WITH staged AS (
    INSERT INTO headrace.fetch_staged (run_id, item, fields, photos, refused, is_gone)
    SELECT :undo_id::bigint, c.item, '', '{}', '{}', true
    FROM headrace.fetch_change c
    JOIN headrace.fetch_run r ON r.id = c.run_id
    JOIN headrace.fetch_item i ON i.customer = r.customer AND i.item = c.item AND i.sent_run < r.id
    WHERE c.run_id = :run_id AND c.kind = 'new'
    RETURNING item
)
SELECT count(*) FROM staged;

-- name: keep_photos
-- An undo asks for no photo again: the links were in the items before.
UPDATE headrace.fetch_change SET has_other_photos = false WHERE run_id = :run_id AND has_other_photos;

-- name: note_undone
-- Keep which run undid a run.
UPDATE headrace.fetch_run SET undone_by = :undo_id WHERE id = :run_id;

-- name: forget_before
-- Drop the earlier content of items of runs that are gone.
DELETE FROM headrace.fetch_before WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_older_before
-- Drop the earlier content of items of the customer's runs that can no longer be undone.
DELETE FROM headrace.fetch_before b USING headrace.fetch_run r
WHERE b.run_id = r.id AND r.customer = :customer AND r.id <= (
    SELECT id FROM headrace.fetch_run
    WHERE customer = :customer AND is_whole AND format <> 'same' AND state IN ('applied', 'done')
    ORDER BY id DESC OFFSET :runs_kept LIMIT 1
);

-- name: mark_gone
-- Make the items that are no longer named gone.
WITH gone AS (
    UPDATE headrace.fetch_item i
    SET version = greatest(c.version, i.version + 1), is_gone = true, run_id = c.run_id
    FROM headrace.fetch_change c
    WHERE c.run_id = :run_id AND c.kind = 'gone' AND i.customer = :customer AND i.item = c.item
    RETURNING i.item, i.version
)
UPDATE headrace.fetch_change c SET version = gone.version
FROM gone WHERE c.run_id = :run_id AND c.item = gone.item AND c.version <> gone.version;

-- name: remember_rows
-- Keep how the rows of unchanged items read now, so that they need not be judged again.
UPDATE headrace.fetch_item i SET raw_hash = s.raw_hash
FROM headrace.fetch_staged s
WHERE s.run_id = :run_id AND s.fields <> '' AND i.customer = :customer AND i.item = s.item
    AND i.hash = s.hash AND i.sent_run < :run_id AND i.raw_hash IS DISTINCT FROM s.raw_hash;

-- name: note_sent
-- Items that were named by themselves: what a catalogue read before says of them is older.
UPDATE headrace.fetch_item i SET sent_run = s.run_id
FROM headrace.fetch_staged s
WHERE s.run_id = :run_id AND i.customer = :customer AND i.item = s.item;

-- name: note_photos
-- Keep how many photos the run is about.
UPDATE headrace.fetch_run r SET
    photos = (SELECT count(*) FROM headrace.fetch_need WHERE run_id = r.id)
        + (SELECT coalesce(sum(c.photos), 0) FROM headrace.fetch_count c WHERE c.run_id = r.id)
WHERE id = :run_id;

-- name: drop_needs
-- A dry run asks nothing; what it would ask was counted.
DELETE FROM headrace.fetch_need WHERE run_id = :run_id;

-- name: changes_page
-- Changes after an item, in order, each with the links to ask for.
SELECT c.item, c.version, ARRAY(
    SELECT n.url FROM headrace.fetch_need n WHERE n.run_id = c.run_id AND n.item = c.item
) AS urls
FROM headrace.fetch_change c
WHERE c.run_id = :run_id AND c.item > :after
ORDER BY c.item LIMIT :rows_max;

-- name: note_counts
-- Keep what the diff found; items sent by themselves as gone have a row each.
UPDATE headrace.fetch_run SET new = :new, changed = :changed, gone = :gone,
    unchanged = rows_read - invalid - :new - :changed - CASE WHEN is_whole THEN 0 ELSE :gone END
WHERE id = :run_id;

-- name: note_applied
-- The run's jobs are enqueued; without changes it is done at once.
UPDATE headrace.fetch_run r SET
    items_pending = sums.changes,
    applied_at = now(),
    state = CASE WHEN sums.changes = 0 THEN 'done' ELSE 'applied' END,
    ended_at = CASE WHEN sums.changes = 0 THEN now() END
FROM (SELECT count(*) AS changes FROM headrace.fetch_change WHERE run_id = :run_id) sums
WHERE r.id = :run_id;

-- name: note_reading
-- Keep how far reading is.
UPDATE headrace.fetch_run SET rows_read = :rows_read, invalid = :invalid, problems = :problems
WHERE id = :run_id;

-- name: end_run
-- Move a run to a state in which nothing more happens by itself.
UPDATE headrace.fetch_run SET state = :state, reason = :reason, ended_at = now() WHERE id = :run_id;

-- name: note_fault
-- Note what is wrong with the whole file of a run.
UPDATE headrace.fetch_run SET fault = :fault WHERE id = :run_id;

-- name: lock_run
-- A run, kept as it is until the transaction ends.
SELECT id, customer, state FROM headrace.fetch_run WHERE id = :run_id FOR UPDATE;

-- name: newer_run
-- A later catalogue of the customer that was applied.
SELECT id FROM headrace.fetch_run
WHERE customer = :customer AND id > :run_id AND is_whole AND state IN ('applied', 'done')
ORDER BY id DESC LIMIT 1;

-- name: supersede_held
-- Held runs can no longer be confirmed once another was applied (rows that were equal to their items are staged
-- without content, and those items may be others now), nor once a later one is held.
UPDATE headrace.fetch_run SET state = 'superseded', ended_at = now()
WHERE customer = :customer AND id <> :run_id AND state = 'held';

-- name: discard_held
-- A held run is not to be applied by anybody; its number, or nothing where it is not held.
UPDATE headrace.fetch_run SET state = 'superseded', reason = 'discarded: ' || reason, ended_at = now()
WHERE id = :run_id AND state = 'held' RETURNING id;

-- name: clear_staged
-- Drop staged rows of the customer's runs that cannot need them any more.
DELETE FROM headrace.fetch_staged s USING headrace.fetch_run r
WHERE s.run_id = r.id AND r.customer = :customer AND r.state NOT IN ('reading', 'held');

-- name: clear_run
-- Drop the staged rows of one run.
DELETE FROM headrace.fetch_staged WHERE run_id = :run_id;

-- name: forget_runs
-- Drop the customer's oldest ended runs, whole ones or the others; what hangs on them is dropped next.
DELETE FROM headrace.fetch_run WHERE customer = :customer AND is_whole = :is_whole
    AND state NOT IN ('bringing', 'reading', 'held', 'applied')
    AND id <= (
        SELECT id FROM headrace.fetch_run WHERE customer = :customer AND is_whole = :is_whole
        ORDER BY id DESC OFFSET :runs_kept LIMIT 1
    )
RETURNING id;

-- name: forget_dry_runs
-- Drop the customer's oldest dry runs, each of which may hold a change for every item.
DELETE FROM headrace.fetch_run WHERE customer = :customer AND state = 'dry' AND id <= (
    SELECT id FROM headrace.fetch_run WHERE customer = :customer AND state = 'dry'
    ORDER BY id DESC OFFSET :runs_kept LIMIT 1
)
RETURNING id;

-- name: forget_idle_runs
-- Drop the runs of an unchanged file that had nothing to ask, but the last one.
DELETE FROM headrace.fetch_run
WHERE customer = :customer AND id < :run_id AND format = 'same' AND state = 'done' AND photos = 0
RETURNING id;

-- name: forget_changes
-- Drop the changes of runs that are gone.
DELETE FROM headrace.fetch_change WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_needs
-- Drop the needs of runs that are gone.
DELETE FROM headrace.fetch_need WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_counts
-- Drop the counts of photos of runs that are compared anew.
DELETE FROM headrace.fetch_count WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_staged
-- Drop the staged rows of runs that are gone.
DELETE FROM headrace.fetch_staged WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_pace
-- Drop the pace of runs that are gone.
DELETE FROM headrace.fetch_pace WHERE run_id = ANY(:runs::bigint[]);

-- name: changes
-- A page of what a run changes, or would, by item.
SELECT item, kind, version, has_other_photos, fields FROM headrace.fetch_change
WHERE run_id = :run_id AND item > :after AND kind <> 'retry'
ORDER BY item LIMIT :rows_max;

-- name: sampled_links
-- Some of the links that a run would ask, at random.
SELECT url FROM headrace.fetch_need WHERE run_id = :run_id ORDER BY random() LIMIT :links_max;

-- name: needs_count
-- How many photos a run asks.
SELECT count(*) FROM headrace.fetch_need WHERE run_id = :run_id;

-- name: keep_sample
-- Keep what a dry run saw of the photos it would ask.
UPDATE headrace.fetch_run SET sample = :sample WHERE id = :run_id;

-- name: stored_fields
-- The fields of some items as they stand.
SELECT item, fields FROM headrace.fetch_item
WHERE customer = :customer AND item = ANY(:items::text[]) AND NOT is_gone;

-- name: analyze_items
-- Let the planner know of many new items.
ANALYZE headrace.fetch_item;

-- name: runs
-- Runs, newest first: one by id, or those of a customer, or all.
SELECT r.*, counts.by_outcome, coalesce(counts.decided, 0) AS photos_decided,
    pace.photos AS paced, pace.seconds AS paced_s, c.starts_max / c.window_s AS rate_per_s
FROM headrace.fetch_run r
JOIN headrace.fetch_customer c USING (customer)
LEFT JOIN LATERAL (
    SELECT jsonb_object_agg(outcome, c.photos)::text AS by_outcome, sum(c.photos) AS decided
    FROM headrace.fetch_count c WHERE c.run_id = r.id
) counts ON true
LEFT JOIN LATERAL (
    SELECT sum(p.photos)::double precision AS photos,
        extract(epoch FROM now() - greatest(min(p.minute), r.applied_at))::double precision AS seconds
    FROM headrace.fetch_pace p
    WHERE p.run_id = r.id AND p.minute >= date_trunc('minute', now()) - interval '2 min'
) pace ON r.state = 'applied'
WHERE (:run_id::bigint IS NULL OR r.id = :run_id) AND (:customer::text IS NULL OR r.customer = :customer)
ORDER BY r.id DESC LIMIT :rows_max;
