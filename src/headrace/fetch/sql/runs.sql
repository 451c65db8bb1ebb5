-- name: try_lock_customer
-- Keep other readers of this customer's catalogues out until the session ends.
SELECT pg_try_advisory_lock(hashtextextended('headrace.fetch:' || :customer::text, 0));

-- name: unlock_customer
-- Admit the next run of this customer.
SELECT pg_advisory_unlock(hashtextextended('headrace.fetch:' || :customer::text, 0));

-- name: abandon_runs
-- Close runs in state `reading` whose customer lock is free: their process died before applying.
UPDATE headrace.fetch_run SET state = 'abandoned', ended_at = now(), reason = 'its process ended'
WHERE customer = :customer AND id IS DISTINCT FROM :but::bigint AND (
    state = 'reading' OR state = 'bringing' AND started_at < now() - interval '1 day'
);

-- name: insert_run
-- Start a run.
INSERT INTO headrace.fetch_run (customer, state, file_name, format, is_whole)
VALUES (:customer, 'reading', :file_name, :format, :is_whole)
RETURNING id;

-- name: begin_ordered
-- Start reading the file that a run waited for.
UPDATE headrace.fetch_run SET state = 'reading', format = :format, reason = NULL,
    is_whole = :format <> 'supplemental'
WHERE id = :run_id AND customer = :customer AND state IN ('bringing', 'reading') RETURNING id;

-- name: clear_problems
-- Delete the problems of a run that is read again.
DELETE FROM headrace.fetch_problem WHERE run_id = :run_id;

-- name: commit_lazily
-- Commit staged rows asynchronously: the transaction that applies the run is durable.
SELECT set_config('synchronous_commit', 'off', true);

-- name: lock_items
-- Serialize changes to a customer's items until the transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended('headrace.fetch.items:' || :customer::text, 0));

-- name: stage_same
-- Stage rows equal to those of the stored items, without content; return positions (from 1) of the
-- rest. OFFSET 0 enforces lookups by key: a plan may otherwise read all items for every few
-- thousand rows.
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
-- Stage rows in order; the first row per id wins. Return the positions (from 1) of the staged rows.
WITH given AS (
    SELECT * FROM unnest(
        :items::text[], :hashes::bytea[], :raw_hashes::bytea[], :fields::text[], :photos::text[],
        :refused::text[]
    ) WITH ORDINALITY AS g (item, hash, raw_hash, fields, photos, refused, position)
), firsts AS (
    SELECT DISTINCT ON (item) * FROM given ORDER BY item, position
), staged AS (
    INSERT INTO headrace.fetch_staged (run_id, item, hash, raw_hash, fields, photos, refused)
    SELECT :run_id::bigint, item, hash, raw_hash, fields, string_to_array(photos, E'\n'),
        refused::jsonb
    FROM firsts
    ON CONFLICT (run_id, item) DO NOTHING
    RETURNING item
)
SELECT firsts.position FROM staged JOIN firsts USING (item);

-- name: stage_gone
-- Stage items to be unpublished.
INSERT INTO headrace.fetch_staged (run_id, item, fields, photos, refused, is_gone)
SELECT :run_id::bigint, item, '', '{}', '{}', true FROM unnest(:items::text[]) g (item);

-- name: stage_broken
-- Stage items with a link that failed or got another copy, as rows equal to the stored items.
INSERT INTO headrace.fetch_staged (run_id, item, hash, fields, photos, refused)
SELECT DISTINCT ON (i.item) :run_id::bigint, i.item, i.hash, '', '{}'::text[], '{}'::jsonb
FROM headrace.fetch_item i
CROSS JOIN LATERAL unnest(i.photos) p (url)
JOIN headrace.fetch_link l ON l.customer = :customer AND l.url = p.url
    AND (l.outcome NOT IN ('stored', 'unchanged') OR l.copied_at IS NOT NULL)
WHERE i.customer = :customer AND NOT i.is_gone
ORDER BY i.item;

-- name: analyze_staged
-- Update statistics of staged rows; with those of an empty table the plan is a nested loop.
ANALYZE headrace.fetch_staged;

-- name: analyze_changes
-- Update statistics of changes; with those of an empty table the plan is a nested loop.
ANALYZE headrace.fetch_change;

-- name: published_count
-- Number of a customer's published items.
SELECT count(*) FROM headrace.fetch_item WHERE customer = :customer AND NOT is_gone;

-- name: staged_count
-- Number of valid items of a run.
SELECT count(*) FROM headrace.fetch_staged WHERE run_id = :run_id AND hash IS NOT NULL;

-- name: unreadable_before
-- Rows without a readable id in the catalogue applied last, as far as its problems are kept.
SELECT count(DISTINCT row_number) FROM headrace.fetch_problem
WHERE item IS NULL AND run_id = (
    SELECT id FROM headrace.fetch_run
    WHERE customer = :customer AND id < :run_id AND is_whole AND format <> 'same'
        AND state IN ('applied', 'done')
    ORDER BY id DESC LIMIT 1
);

-- name: note_line_break
-- Store whether a run's table ended with a line break; return the value of the table applied last.
WITH noted AS (
    UPDATE headrace.fetch_run SET has_line_break = :has_line_break WHERE id = :run_id
)
SELECT has_line_break FROM headrace.fetch_run
WHERE customer = :customer AND id < :run_id AND is_whole AND undone_by IS NULL
    AND state IN ('applied', 'done') AND has_line_break IS NOT NULL
ORDER BY id DESC LIMIT 1;

-- name: missing_count
-- Number of items that a run would unpublish.
SELECT count(*) FROM headrace.fetch_item i
WHERE i.customer = :customer AND NOT i.is_gone AND i.sent_run < :run_id AND NOT EXISTS (
    SELECT FROM headrace.fetch_staged s WHERE s.run_id = :run_id AND s.item = i.item
);

-- name: diff
-- Compare staged rows with stored items. An item is unchanged where its row is invalid or equal, or
-- where it was uploaded after the run started. A whole run unpublishes items without a row.
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
-- Write new and changed items, in the order in which publishing locks them. Versions that
-- publishing assigned meanwhile are skipped.
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
-- Save the content of the items that a run changes or removes.
INSERT INTO headrace.fetch_before (run_id, item, hash, raw_hash, fields, photos)
SELECT c.run_id, c.item, i.hash, i.raw_hash, i.fields, i.photos
FROM headrace.fetch_change c JOIN headrace.fetch_item i
    ON i.customer = :customer AND i.item = c.item
WHERE c.run_id = :run_id AND c.kind IN ('changed', 'gone');

-- name: runs_to_undo
-- What an undo of each run needs: whether it changed items, the number of later applied catalogues
-- up to :runs_kept, and those that are to be undone first, newest first.
SELECT r.id, r.state, r.is_whole, r.format, r.undone_by,
    r.new + r.changed + r.gone > 0 AS is_change, later.newer, later.runs AS later
FROM headrace.fetch_run r
CROSS JOIN LATERAL (
    SELECT count(*) AS newer, array_agg(l.id ORDER BY l.id DESC)
        FILTER (WHERE l.undone_by IS NULL AND l.new + l.changed + l.gone > 0) AS runs
    FROM (
        SELECT n.id, n.undone_by, n.new, n.changed, n.gone FROM headrace.fetch_run n
        WHERE n.customer = r.customer AND n.id > r.id AND n.is_whole AND n.format <> 'same'
            AND n.state IN ('applied', 'done')
        ORDER BY n.id DESC LIMIT :runs_kept
    ) l
) later
WHERE r.id = ANY(:run_ids::bigint[]);

-- name: before_page
-- Saved content of items that a run changed or removed, except those uploaded since.
SELECT b.item, b.hash, b.raw_hash, b.fields, b.photos
FROM headrace.fetch_before b
JOIN headrace.fetch_run r ON r.id = b.run_id
JOIN headrace.fetch_item i ON i.customer = r.customer AND i.item = b.item AND i.sent_run < r.id
WHERE b.run_id = :run_id AND b.item > :after
ORDER BY b.item LIMIT 1000;

-- name: stage_new_as_gone
-- Stage the items that a run added as removed, except those uploaded since; return the number.
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
-- Request no photos for an undo: the links were in the items before.
UPDATE headrace.fetch_change SET has_other_photos = false
WHERE run_id = :run_id AND has_other_photos;

-- name: note_undone
-- Record the run that undid a run.
UPDATE headrace.fetch_run SET undone_by = :undo_id WHERE id = :run_id;

-- name: forget_before
-- Delete the saved item content of deleted runs.
DELETE FROM headrace.fetch_before WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_older_before
-- Delete the saved item content of the customer's runs that cannot be undone any more.
DELETE FROM headrace.fetch_before b USING headrace.fetch_run r
WHERE b.run_id = r.id AND r.customer = :customer AND r.id <= (
    SELECT id FROM headrace.fetch_run
    WHERE customer = :customer AND is_whole AND format <> 'same' AND state IN ('applied', 'done')
    ORDER BY id DESC OFFSET :runs_kept LIMIT 1
);

-- name: mark_gone
-- Mark the items that the catalogue no longer lists as gone.
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
-- Store the hashes of the rows of unchanged items, so the next run skips their validation.
UPDATE headrace.fetch_item i SET raw_hash = s.raw_hash
FROM headrace.fetch_staged s
WHERE s.run_id = :run_id AND s.fields <> '' AND i.customer = :customer AND i.item = s.item
    AND i.hash = s.hash AND i.sent_run < :run_id AND i.raw_hash IS DISTINCT FROM s.raw_hash;

-- name: note_sent
-- Mark uploaded items: a catalogue read before this run does not overwrite them.
UPDATE headrace.fetch_item i SET sent_run = s.run_id
FROM headrace.fetch_staged s
WHERE s.run_id = :run_id AND i.customer = :customer AND i.item = s.item;

-- name: note_photos
-- Store the number of photos of the run.
UPDATE headrace.fetch_run r SET
    photos = (SELECT count(*) FROM headrace.fetch_need WHERE run_id = r.id)
        + (SELECT coalesce(sum(c.photos), 0) FROM headrace.fetch_count c WHERE c.run_id = r.id)
WHERE id = :run_id;

-- name: changes_page
-- Changes after an item, in order, each with the URLs to request.
SELECT c.item, c.version, ARRAY(
    SELECT n.url FROM headrace.fetch_need n WHERE n.run_id = c.run_id AND n.item = c.item
) AS urls
FROM headrace.fetch_change c
WHERE c.run_id = :run_id AND c.item > :after
ORDER BY c.item LIMIT :rows_max;

-- name: note_counts
-- Store the counts of the diff; removed items of an upload have a row each.
UPDATE headrace.fetch_run SET new = :new, changed = :changed, gone = :gone,
    unchanged = rows_read - invalid - :new - :changed
        - CASE WHEN is_whole OR format = 'supplemental' THEN 0 ELSE :gone END
WHERE id = :run_id;

-- name: note_applied
-- Mark the run applied after its jobs are enqueued; a run without changes is done. An upload for
-- review waits no more.
UPDATE headrace.fetch_run r SET
    reason = CASE WHEN r.review_until IS NULL THEN r.reason END,
    items_pending = sums.changes,
    applied_at = now(),
    state = CASE WHEN sums.changes = 0 THEN 'done' ELSE 'applied' END,
    ended_at = CASE WHEN sums.changes = 0 THEN now() END
FROM (SELECT count(*) AS changes FROM headrace.fetch_change WHERE run_id = :run_id) sums
WHERE r.id = :run_id;

-- name: note_reading
-- Store the reading progress.
UPDATE headrace.fetch_run SET rows_read = :rows_read, invalid = :invalid, problems = :problems
WHERE id = :run_id;

-- name: end_run
-- Move a run to a final state.
UPDATE headrace.fetch_run SET state = :state, reason = :reason, ended_at = now() WHERE id = :run_id;

-- name: note_fault
-- Store the error of the whole file of a run.
UPDATE headrace.fetch_run SET fault = :fault WHERE id = :run_id;

-- name: lock_run
-- Lock a run until the transaction ends.
SELECT id, customer, state, format, review_until FROM headrace.fetch_run
WHERE id = :run_id FOR UPDATE;

-- name: await_review
-- Let a held run wait for the confirmation of its upload.
UPDATE headrace.fetch_run
SET review_until = now() + make_interval(secs => :review_s::double precision) WHERE id = :run_id;

-- name: note_outdated
-- Store that the changes of an upload for review are no longer those shown.
UPDATE headrace.fetch_run SET reason = :reason WHERE id = :run_id AND state = 'held';

-- name: discard_unreviewed
-- Discard the uploads that were not confirmed in time.
UPDATE headrace.fetch_run SET state = 'superseded', ended_at = now(),
    reason = 'expired: it was not confirmed in time'
WHERE state = 'held' AND review_until < now() RETURNING id;

-- name: changes_digest
-- A digest of the changes that a run makes, to detect that they differ from those shown.
SELECT count(*) || ':' || coalesce(sum(hashtextextended(
    ROW(item, kind, has_other_photos, fields)::text, 0)), 0)
FROM headrace.fetch_change WHERE run_id = :run_id AND kind <> 'retry';

-- name: newer_run
-- A later applied catalogue of the customer, or a later supplemental feed.
SELECT id FROM headrace.fetch_run
WHERE customer = :customer AND id > :run_id AND state IN ('applied', 'done')
    AND CASE WHEN :is_supplemental::boolean THEN format = 'supplemental' ELSE is_whole END
ORDER BY id DESC LIMIT 1;

-- name: supersede_held
-- Close held runs once a later run of the same kind is applied or held. Rows equal to their items
-- are staged without content, and those items may have changed since.
UPDATE headrace.fetch_run SET state = 'superseded', ended_at = now()
WHERE customer = :customer AND id <> :run_id AND state = 'held' AND (format = 'supplemental') = (
    SELECT r.format = 'supplemental' FROM headrace.fetch_run r WHERE r.id = :run_id
);

-- name: discard_held
-- Discard a held run; return its id, or no row if it is not held.
UPDATE headrace.fetch_run SET state = 'superseded', reason = 'discarded: ' || reason,
    ended_at = now()
WHERE id = :run_id AND state = 'held' RETURNING id;

-- name: clear_staged
-- Delete staged rows of the customer's runs that do not need them any more.
DELETE FROM headrace.fetch_staged s USING headrace.fetch_run r
WHERE s.run_id = r.id AND r.customer = :customer AND r.state NOT IN ('reading', 'held');

-- name: forget_runs
-- Delete the customer's oldest ended runs, whole or not; the caller deletes their rows next.
DELETE FROM headrace.fetch_run WHERE customer = :customer AND is_whole = :is_whole
    AND state NOT IN ('bringing', 'reading', 'held', 'applied')
    AND id <= (
        SELECT id FROM headrace.fetch_run WHERE customer = :customer AND is_whole = :is_whole
        ORDER BY id DESC OFFSET :runs_kept LIMIT 1
    )
RETURNING id;

-- name: forget_dry_runs
-- Delete the customer's oldest dry runs; each may hold a change per item.
DELETE FROM headrace.fetch_run WHERE customer = :customer AND state = 'dry' AND id <= (
    SELECT id FROM headrace.fetch_run WHERE customer = :customer AND state = 'dry'
    ORDER BY id DESC OFFSET :runs_kept LIMIT 1
)
RETURNING id;

-- name: forget_idle_runs
-- Delete the runs of an unchanged file that requested no photo, except the last one.
DELETE FROM headrace.fetch_run
WHERE customer = :customer AND id < :run_id AND format = 'same' AND state = 'done' AND photos = 0
RETURNING id;

-- name: forget_changes
-- Delete the changes of deleted runs.
DELETE FROM headrace.fetch_change WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_needs
-- Delete the photo requests of runs that were deleted, or only counted them.
DELETE FROM headrace.fetch_need WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_counts
-- Delete the photo counts of runs that are compared again.
DELETE FROM headrace.fetch_count WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_staged
-- Delete the staged rows of some runs.
DELETE FROM headrace.fetch_staged WHERE run_id = ANY(:runs::bigint[]);

-- name: forget_pace
-- Delete the per-minute counts of deleted runs.
DELETE FROM headrace.fetch_pace WHERE run_id = ANY(:runs::bigint[]);

-- name: changes
-- A page of a run's changes, by item, each with the old and new values that are still stored: those
-- of a held run, and of the last applied ones.
SELECT c.item, c.kind, c.version, c.has_other_photos, c.fields, (
    SELECT json_object_agg(f.name, ARRAY[left(old.fields ->> f.name, :characters_max),
        left(new.fields ->> f.name, :characters_max)])::text
    FROM unnest(CASE WHEN c.kind <> 'changed' THEN '{name,price}'::text[]
        WHEN c.has_other_photos THEN c.fields || 'photos'::text ELSE c.fields END) AS f (name)
    WHERE coalesce(old.fields, '{}') ? f.name OR coalesce(new.fields, '{}') ? f.name
) AS values
FROM headrace.fetch_change c
JOIN headrace.fetch_run r ON r.id = c.run_id
LEFT JOIN headrace.fetch_staged s ON s.run_id = c.run_id AND s.item = c.item AND s.fields <> ''
LEFT JOIN headrace.fetch_before b ON b.run_id = c.run_id AND b.item = c.item
LEFT JOIN headrace.fetch_item i ON i.customer = r.customer AND i.item = c.item
CROSS JOIN LATERAL (SELECT CASE WHEN r.state = 'held' AND c.kind <> 'new'
    THEN i.fields::jsonb || jsonb_build_object('photos', i.photos)
    ELSE b.fields::jsonb || jsonb_build_object('photos', b.photos) END AS fields) old
CROSS JOIN LATERAL (SELECT CASE WHEN r.state = 'held'
    THEN s.fields::jsonb || jsonb_build_object('photos', s.photos)
    WHEN i.run_id = c.run_id AND NOT i.is_gone
    THEN i.fields::jsonb || jsonb_build_object('photos', i.photos) END AS fields) new
WHERE c.run_id = :run_id AND c.item > :after AND c.kind <> 'retry'
ORDER BY c.item LIMIT :rows_max;

-- name: sampled_links
-- Random URLs that a run would request.
SELECT url FROM headrace.fetch_need WHERE run_id = :run_id ORDER BY random() LIMIT :links_max;

-- name: needs_count
-- Number of photos that a run requests.
SELECT count(*) FROM headrace.fetch_need WHERE run_id = :run_id;

-- name: keep_sample
-- Store the photos that a dry run downloaded.
UPDATE headrace.fetch_run SET sample = :sample WHERE id = :run_id;

-- name: stored_fields
-- Current fields of items.
SELECT item, fields FROM headrace.fetch_item
WHERE customer = :customer AND item = ANY(:items::text[]) AND NOT is_gone;

-- name: overlay_counts
-- Number of a customer's overlays, of those without a row in a run, and of the run's valid rows.
SELECT count(o.item) AS overlays, count(o.item) FILTER (WHERE s.item IS NULL) AS missing,
    count(s.hash) AS valid
FROM (SELECT item FROM headrace.fetch_overlay WHERE customer = :customer) o
FULL JOIN (SELECT item, hash FROM headrace.fetch_staged WHERE run_id = :run_id) s USING (item);

-- name: overlay_diff
-- Compare published items under the stored overlays with those under the staged rows. An invalid
-- row keeps the overlay; an item without a row loses it, and counts as gone.
WITH overlays AS (
    SELECT item, s.item IS NOT NULL AS is_listed, coalesce(o.fields, '{}') AS before,
        CASE WHEN s.hash IS NOT NULL THEN s.fields::jsonb WHEN s.item IS NULL THEN '{}'
            ELSE coalesce(o.fields, '{}') END AS after
    FROM (SELECT item, fields FROM headrace.fetch_overlay WHERE customer = :customer) o
    FULL JOIN (
        SELECT item, hash, fields FROM headrace.fetch_staged WHERE run_id = :run_id
    ) s USING (item)
), items AS (
    SELECT i.item, i.version, v.is_listed, i.fields::jsonb || v.before AS before,
        i.fields::jsonb || v.after AS after
    FROM overlays v
    JOIN headrace.fetch_item i ON i.customer = :customer AND i.item = v.item AND NOT i.is_gone
    WHERE v.before <> v.after
), changes AS (
    INSERT INTO headrace.fetch_change (run_id, item, kind, version, has_other_photos, fields)
    SELECT :run_id::bigint, item, 'changed', version + 1, false, ARRAY(
        SELECT key FROM jsonb_each(before) a FULL JOIN jsonb_each(after) b USING (key)
        WHERE a.value IS DISTINCT FROM b.value ORDER BY key
    )
    FROM items WHERE before <> after
    RETURNING item
)
SELECT 0 AS new, count(*) FILTER (WHERE is_listed) AS changed,
    count(*) FILTER (WHERE NOT is_listed) AS gone
FROM changes JOIN items USING (item);

-- name: store_overlays
-- Replace the overlays of a customer by the valid staged rows.
WITH dropped AS (
    DELETE FROM headrace.fetch_overlay o WHERE customer = :customer AND NOT EXISTS (
        SELECT FROM headrace.fetch_staged s WHERE s.run_id = :run_id AND s.item = o.item
    )
)
INSERT INTO headrace.fetch_overlay AS o (customer, item, fields)
SELECT :customer, item, fields::jsonb FROM headrace.fetch_staged
WHERE run_id = :run_id AND hash IS NOT NULL
ON CONFLICT (customer, item) DO UPDATE SET fields = excluded.fields
WHERE o.fields <> excluded.fields;

-- name: changed_page
-- Stored content of the items that a run changes.
SELECT i.item, i.hash, i.raw_hash, i.fields, i.photos
FROM headrace.fetch_change c
JOIN headrace.fetch_item i ON i.customer = :customer AND i.item = c.item
WHERE c.run_id = :run_id AND c.item > :after
ORDER BY c.item LIMIT 1000;

-- name: analyze_items
-- Update statistics after a large number of new items.
ANALYZE headrace.fetch_item;

-- name: runs
-- Runs, newest first: by ids, those of a customer, in some states, below an id, or all.
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
        extract(epoch FROM now() - greatest(min(p.minute), r.applied_at))::double precision
            AS seconds
    FROM headrace.fetch_pace p
    WHERE p.run_id = r.id AND p.minute >= date_trunc('minute', now()) - interval '2 min'
) pace ON r.state = 'applied'
WHERE (:run_ids::bigint[] IS NULL OR r.id = ANY(:run_ids::bigint[]))
    AND (:customer::text IS NULL OR r.customer = :customer)
    AND (:states::text[] IS NULL OR r.state = ANY(:states::text[]))
    AND (:before::bigint IS NULL OR r.id < :before)
ORDER BY r.id DESC LIMIT :rows_max;
