-- name: note_round
-- Assign a run its number among the customer's whole runs. Failed links checked before
-- `asks_before` are due in any run: runs of uploaded items have no number of their own.
UPDATE headrace.fetch_run r SET
    round = coalesce(p.round, 0) + :is_round::boolean::integer,
    is_round = :is_round,
    prior_at = p.started_at,
    asks_before = CASE WHEN :wait_s::double precision IS NULL THEN '-infinity'
        ELSE now() - make_interval(secs => :wait_s::double precision) END
FROM (
    SELECT max(round) AS round, max(started_at) FILTER (WHERE is_round) AS started_at
    FROM headrace.fetch_run
    WHERE customer = :customer AND id <> :run_id AND state IN ('applied', 'done')
) p
WHERE r.id = :run_id;

-- name: refuse_links
-- Set the outcome of links refused before any request; they have no backoff.
INSERT INTO headrace.fetch_link (customer, url, outcome, failures, run_id)
SELECT DISTINCT ON (d.key) :customer, d.key, 'refused:' || d.value, 1, :run_id::bigint
FROM headrace.fetch_change c
JOIN headrace.fetch_staged s USING (run_id, item)
CROSS JOIN LATERAL jsonb_each_text(s.refused) d
WHERE c.run_id = :run_id AND c.kind <> 'gone'
ORDER BY d.key
ON CONFLICT (customer, url) DO UPDATE SET outcome = excluded.outcome, run_id = excluded.run_id,
    failures = headrace.fetch_link.failures + 1, due_round = 0, recheck_at = NULL,
    checked_at = now();

-- name: count_refused
-- Count photos refused before any request, by outcome.
INSERT INTO headrace.fetch_count (run_id, outcome, photos)
SELECT :run_id::bigint, 'refused:' || d.value, count(*)
FROM headrace.fetch_change c
JOIN headrace.fetch_staged s USING (run_id, item)
CROSS JOIN LATERAL jsonb_each_text(s.refused) d
WHERE c.run_id = :run_id AND c.kind <> 'gone'
GROUP BY d.value;

-- name: note_needs
-- Store the photos to request: every link of a changed list, and failed links that are due. Count
-- the links in backoff.
WITH photos AS (
    SELECT c.item, p.url, l.url IS NULL OR c.has_other_photos AND (
        l.outcome NOT IN ('stored', 'unchanged')
        OR coalesce(l.etag, l.last_modified) IS NOT NULL
        OR l.checked_at < now() - make_interval(secs => :recheck_s::double precision)
    ) AS is_asked,
    l.outcome NOT IN ('stored', 'unchanged') AS has_failed,
    headrace.fetch_is_due_v1(l.due_round, l.recheck_at, r.round)
        OR l.checked_at < r.asks_before AS is_due
    FROM headrace.fetch_run r
    JOIN headrace.fetch_change c ON c.run_id = r.id AND c.kind <> 'gone'
    JOIN headrace.fetch_staged s ON s.run_id = r.id AND s.item = c.item
    CROSS JOIN LATERAL unnest(s.photos) p (url)
    LEFT JOIN headrace.fetch_link l ON l.customer = :customer AND l.url = p.url
    WHERE r.id = :run_id AND NOT s.refused ? p.url
), needs AS (
    INSERT INTO headrace.fetch_need (run_id, item, url)
    SELECT :run_id::bigint, item, url FROM photos WHERE is_asked OR has_failed AND is_due
    ON CONFLICT DO NOTHING
)
INSERT INTO headrace.fetch_count (run_id, outcome, photos)
SELECT :run_id::bigint, 'waiting', count(*) FROM photos
WHERE NOT is_asked AND has_failed AND NOT is_due HAVING count(*) > 0;

-- name: count_known
-- Count photos of new and changed items that need no request.
INSERT INTO headrace.fetch_count (run_id, outcome, photos)
SELECT :run_id::bigint, 'known', photos - needs - counted FROM (
    SELECT (
        SELECT coalesce(sum(cardinality(s.photos)), 0)
        FROM headrace.fetch_change c JOIN headrace.fetch_staged s USING (run_id, item)
        WHERE c.run_id = :run_id AND c.kind <> 'gone'
    ) AS photos,
    (SELECT count(*) FROM headrace.fetch_need WHERE run_id = :run_id) AS needs,
    (SELECT coalesce(sum(photos), 0) FROM headrace.fetch_count WHERE run_id = :run_id) AS counted
) sums
WHERE photos - needs - counted > 0;

-- name: avoid_nested_loops
-- Disable nested loops: recently failed links are not in the statistics, and a loop takes hours.
-- Before PostgreSQL 18 an unavoidable loop then costs so much that JIT would compile each
-- statement.
SELECT set_config('enable_nestloop', 'off', true), set_config('jit', 'off', true);

-- name: allow_nested_loops
-- Restore the planner settings for the rest of the transaction; JIT stays off.
SELECT set_config('enable_nestloop', 'on', true);

-- name: note_retries
-- For unchanged items, request failed links that are due and good photos older than `refresh_s` (0:
-- none); count the other failed links as waiting. Include items whose link got another copy since
-- the last whole run. Skip items that this or an earlier run still works on.
WITH links AS MATERIALIZED (
    SELECT l.url, l.run_id, false AS has_copy,
        headrace.fetch_is_due_v1(l.due_round, l.recheck_at, r.round)
            OR l.checked_at < r.asks_before AS is_due
    FROM headrace.fetch_run r JOIN headrace.fetch_link l ON l.customer = r.customer
        AND l.outcome NOT IN ('stored', 'unchanged')
    WHERE r.id = :run_id
    UNION ALL
    SELECT l.url, l.run_id, false, true
    FROM headrace.fetch_link l
    WHERE :refresh_s::double precision > 0 AND l.customer = :customer
        AND l.outcome IN ('stored', 'unchanged')
        AND l.checked_at < now() - make_interval(secs => :refresh_s::double precision)
    UNION ALL
    SELECT l.url, l.run_id, true, false
    FROM headrace.fetch_run r JOIN headrace.fetch_link l ON l.customer = r.customer
        AND l.outcome IN ('stored', 'unchanged') AND l.copied_at > r.prior_at - interval '5 minutes'
    WHERE r.id = :run_id
), photos AS MATERIALIZED (
    SELECT i.item, i.version, l.url, l.has_copy, l.is_due
    FROM headrace.fetch_staged s
    JOIN headrace.fetch_item i ON i.customer = :customer AND i.item = s.item AND NOT i.is_gone
    CROSS JOIN LATERAL unnest(i.photos) p (url)
    JOIN links l ON l.url = p.url AND (NOT l.has_copy OR i.run_id < l.run_id)
    WHERE EXISTS (SELECT FROM links) AND s.run_id = :run_id AND s.hash IS NOT NULL
        AND NOT s.refused ? p.url AND NOT EXISTS (
        SELECT FROM headrace.fetch_run r
        JOIN headrace.fetch_change c ON c.run_id = r.id AND c.item = s.item
        WHERE r.customer = :customer
            AND (r.id = :run_id OR r.state = 'applied' AND c.published_at IS NULL)
    )
), needs AS (
    INSERT INTO headrace.fetch_need (run_id, item, url)
    SELECT :run_id::bigint, item, url FROM photos WHERE is_due
    ON CONFLICT DO NOTHING
), waiting AS (
    INSERT INTO headrace.fetch_count AS c (run_id, outcome, photos)
    SELECT :run_id::bigint, 'waiting', count(*)
    FROM photos WHERE NOT is_due AND NOT has_copy HAVING count(*) > 0
    ON CONFLICT (run_id, outcome) DO UPDATE SET photos = c.photos + excluded.photos
)
INSERT INTO headrace.fetch_change (run_id, item, kind, version, has_other_photos)
SELECT DISTINCT :run_id::bigint, item, 'retry', version, false FROM photos WHERE is_due OR has_copy;

-- name: customers_to_recheck
-- Customers with failed links that are due, or with photos to refresh.
SELECT customer FROM headrace.fetch_link WHERE recheck_at <= now()
UNION
SELECT customer FROM headrace.fetch_customer
WHERE coalesce(refresh_s, :refresh_s::double precision) > 0
ORDER BY customer;

-- name: stage_due
-- Stage items with a failed link that is due or a photo older than `refresh_s` (0: none), as rows
-- equal to the stored items; return the number. Failed links first, up to `links_max` links. Skip
-- items that a run still works on. Clear the due time of links that no item has.
WITH links AS MATERIALIZED (
    SELECT url, outcome NOT IN ('stored', 'unchanged') AS has_failed FROM headrace.fetch_link
    WHERE customer = :customer AND (
        recheck_at <= now() OR :refresh_s::double precision > 0
            AND outcome IN ('stored', 'unchanged')
        AND checked_at < now() - make_interval(secs => :refresh_s::double precision)
    )
), uses AS MATERIALIZED (
    SELECT i.item, i.hash, l.url, l.has_failed
    FROM headrace.fetch_item i
    CROSS JOIN LATERAL unnest(i.photos) p (url)
    JOIN links l ON l.url = p.url
    WHERE i.customer = :customer AND NOT i.is_gone
), unused AS (
    UPDATE headrace.fetch_link SET recheck_at = NULL
    WHERE customer = :customer AND recheck_at <= now() AND url NOT IN (SELECT url FROM uses)
), open AS (
    SELECT c.item FROM headrace.fetch_run r
    JOIN headrace.fetch_change c ON c.run_id = r.id AND c.published_at IS NULL
    WHERE r.customer = :customer AND r.state = 'applied'
), taken AS (
    SELECT item, hash FROM uses WHERE item NOT IN (SELECT item FROM open)
    ORDER BY has_failed DESC, item LIMIT :links_max
), staged AS (
    INSERT INTO headrace.fetch_staged (run_id, item, hash, fields, photos, refused)
    SELECT DISTINCT ON (item) :run_id::bigint, item, hash, '', '{}'::text[], '{}'::jsonb
    FROM taken ORDER BY item
    RETURNING item
)
SELECT count(*) FROM staged;

-- name: drop_run
-- Delete a run that requests nothing.
DELETE FROM headrace.fetch_run WHERE id = :run_id;

-- name: photo_states
-- State per (run, item, url) of a batch: whether it is decided, and the last result of the link.
SELECT g.position, n.outcome AS decided, n.run_id IS NOT NULL AS is_needed,
    l.outcome, l.sha256, l.etag, l.last_modified, l.failures, l.run_id AS link_run_id
FROM unnest(:runs::bigint[], :customers::text[], :items::text[], :urls::text[])
    WITH ORDINALITY AS g (run_id, customer, item, url, position)
LEFT JOIN headrace.fetch_need n ON n.run_id = g.run_id AND n.item = g.item AND n.url = g.url
LEFT JOIN headrace.fetch_link l ON l.customer = g.customer AND l.url = g.url;

-- name: known_photos
-- Hashes of this list that are stored. OFFSET 0 enforces lookups by key, also in a plan that was
-- cached while the table was small.
SELECT g.sha256 FROM unnest(:hashes::text[]) AS g (sha256)
CROSS JOIN LATERAL (
    SELECT FROM headrace.fetch_photo p WHERE p.sha256 = g.sha256 OFFSET 0
) p;

-- name: decide
-- Record contents and the outcomes of links and needs; count the needs decided by this call.
SELECT headrace.fetch_decide_v1(:runs::bigint[], :customers::text[], :items::text[], :urls::text[],
    :outcomes::text[], :etags::text[], :last_modifieds::text[], :touch_links::boolean[],
    :hashes::text[], :keys::text[], :formats::text[], :sizes_bytes::bigint[], :widths::integer[],
    :heights::integer[], :photo_hashes::bigint[]);

-- name: links_of_url
-- Every customer's record of a URL, with the whole runs left until its next request.
SELECT l.customer, l.url, l.outcome, l.sha256, l.etag, l.last_modified, l.checked_at, l.failures,
    l.run_id, l.recheck_at,
    greatest(0, l.due_round - 1 - coalesce((
        SELECT max(r.round) FROM headrace.fetch_run r
        WHERE r.customer = l.customer AND r.state IN ('applied', 'done')
    ), 0)) AS rounds_left
FROM headrace.fetch_link l WHERE l.url = :url ORDER BY l.customer LIMIT 100;

-- name: waiting_needs
-- Runs with an undecided request for a URL, some of them.
SELECT DISTINCT r.customer, r.id AS run_id
FROM headrace.fetch_run r
JOIN headrace.fetch_need n ON n.run_id = r.id AND n.url = :url AND n.outcome IS NULL
WHERE r.state = 'applied'
ORDER BY r.customer, r.id LIMIT 100;
