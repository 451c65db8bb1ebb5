-- name: photo_states
-- For each (run, item, url) of a batch: whether it is decided, and what is known of the link.
SELECT g.position, n.outcome AS decided, n.run_id IS NOT NULL AS is_needed,
    l.outcome, l.sha256, l.etag, l.last_modified, l.failures, l.run_id AS link_run_id
FROM unnest(:runs::bigint[], :customers::text[], :items::text[], :urls::text[])
    WITH ORDINALITY AS g (run_id, customer, item, url, position)
LEFT JOIN headrace.fetch_need n ON n.run_id = g.run_id AND n.item = g.item AND n.url = g.url
LEFT JOIN headrace.fetch_link l ON l.customer = g.customer AND l.url = g.url;

-- name: known_photos
-- Which of these contents are stored.
SELECT sha256 FROM headrace.fetch_photo WHERE sha256 = ANY(:hashes::text[]);

-- name: decide
-- Record contents, then outcomes of links and needs, each need once, and count those given now.
SELECT headrace.fetch_decide_v1(:runs::bigint[], :customers::text[], :items::text[], :urls::text[],
    :outcomes::text[], :etags::text[], :last_modifieds::text[], :touch_links::boolean[], :hashes::text[],
    :keys::text[], :formats::text[], :sizes_bytes::bigint[], :widths::integer[], :heights::integer[]);

-- name: links_of_url
-- Every customer's record of a URL, with the rounds that it still sits out.
SELECT l.customer, l.url, l.outcome, l.sha256, l.etag, l.last_modified, l.checked_at, l.failures, l.run_id,
    l.recheck_at,
    greatest(0, l.due_round - 1 - coalesce((
        SELECT max(r.round) FROM headrace.fetch_run r
        WHERE r.customer = l.customer AND r.state IN ('applied', 'done')
    ), 0)) AS rounds_left
FROM headrace.fetch_link l WHERE l.url = :url ORDER BY l.customer LIMIT 100;

-- name: waiting_needs
-- Runs that have a URL to ask and have not yet, some of them.
SELECT DISTINCT r.customer, r.id AS run_id
FROM headrace.fetch_run r
JOIN headrace.fetch_need n ON n.run_id = r.id AND n.url = :url AND n.outcome IS NULL
WHERE r.state = 'applied'
ORDER BY r.customer, r.id LIMIT 100;
