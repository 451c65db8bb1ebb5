-- name: photo_states
-- For each (run, item, url) of a batch: whether it is decided, and what is known of the link.
SELECT g.position, n.outcome AS decided, n.run_id IS NOT NULL AS is_needed,
    l.outcome, l.sha256, l.etag, l.last_modified, l.run_id AS link_run_id
FROM unnest(:runs::bigint[], :customers::text[], :items::text[], :urls::text[])
    WITH ORDINALITY AS g (run_id, customer, item, url, position)
LEFT JOIN penstock.fetch_need n ON n.run_id = g.run_id AND n.item = g.item AND n.url = g.url
LEFT JOIN penstock.fetch_link l ON l.customer = g.customer AND l.url = g.url;

-- name: known_photos
-- Which of these contents are stored.
SELECT sha256 FROM penstock.fetch_photo WHERE sha256 = ANY(:hashes::text[]);

-- name: insert_photos
-- Record contents whose bytes are stored.
INSERT INTO penstock.fetch_photo (sha256, key, format, size_bytes, width, height)
SELECT * FROM (
    SELECT DISTINCT ON (sha256) * FROM unnest(
        :hashes::text[], :keys::text[], :formats::text[], :sizes_bytes::bigint[],
        :widths::integer[], :heights::integer[]
    ) g (sha256, key, format, size_bytes, width, height)
    ORDER BY sha256
) photos
ON CONFLICT (sha256) DO NOTHING;

-- name: upsert_links
-- Keep the last outcome of links; a failure leaves the last good copy and its validators.
INSERT INTO penstock.fetch_link AS l
    (customer, url, outcome, sha256, etag, last_modified, failures, run_id)
SELECT * FROM (
    SELECT DISTINCT ON (customer, url) customer, url, outcome, sha256, etag, last_modified,
        CASE WHEN is_good THEN 0 ELSE 1 END, run_id
    FROM unnest(
        :customers::text[], :urls::text[], :outcomes::text[], :hashes::text[], :etags::text[],
        :last_modifieds::text[], :are_good::boolean[], :runs::bigint[]
    ) g (customer, url, outcome, sha256, etag, last_modified, is_good, run_id)
    ORDER BY customer, url
) links
ON CONFLICT (customer, url) DO UPDATE SET
    outcome = excluded.outcome,
    sha256 = coalesce(excluded.sha256, l.sha256),
    etag = CASE WHEN excluded.outcome = 'stored' THEN excluded.etag ELSE l.etag END,
    last_modified = CASE WHEN excluded.outcome = 'stored'
        THEN excluded.last_modified ELSE l.last_modified END,
    failures = CASE WHEN excluded.failures = 0 THEN 0 ELSE l.failures + 1 END,
    checked_at = now(),
    run_id = excluded.run_id;

-- name: decide_needs
-- Give needs their outcome, each once, and count those given now; returns (outcome, photos).
WITH decided AS (
    UPDATE penstock.fetch_need n SET outcome = g.outcome
    FROM unnest(:runs::bigint[], :items::text[], :urls::text[], :outcomes::text[])
        g (run_id, item, url, outcome)
    WHERE n.run_id = g.run_id AND n.item = g.item AND n.url = g.url AND n.outcome IS NULL
    RETURNING n.run_id, n.outcome
)
INSERT INTO penstock.fetch_count AS c (run_id, outcome, photos)
SELECT run_id, outcome, count(*) FROM decided GROUP BY run_id, outcome ORDER BY run_id, outcome
ON CONFLICT (run_id, outcome) DO UPDATE SET photos = c.photos + excluded.photos;

-- name: links_of_url
-- Every customer's record of a URL.
SELECT customer, url, outcome, sha256, etag, last_modified, checked_at, failures, run_id
FROM penstock.fetch_link WHERE url = :url ORDER BY customer LIMIT 100;
