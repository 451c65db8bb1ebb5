-- Links that failed sit out some rounds; a copy that came or changed reaches every item that has its link.

-- `round`: how many rounds of the customer there were, this run included if it `is_round`; the one before began at
-- `prior_at`. A failed link last checked before `asks_before` is asked again in this run whatever its round.
ALTER TABLE headrace.fetch_run
    ADD round bigint,
    ADD is_round boolean NOT NULL DEFAULT false,
    ADD prior_at timestamptz,
    ADD asks_before timestamptz;

-- `due_round`: the round in which a link that failed is asked again. `copied_at`: when a copy came to a link
-- that had been decided without it or with another one.
ALTER TABLE headrace.fetch_link
    ADD due_round bigint NOT NULL DEFAULT 0,
    ADD copied_at timestamptz;
CREATE INDEX fetch_link_failed ON headrace.fetch_link (customer, url)
    WHERE outcome NOT IN ('stored', 'unchanged');
CREATE INDEX fetch_link_copied ON headrace.fetch_link (customer, copied_at) WHERE copied_at IS NOT NULL;
DROP INDEX headrace.fetch_link_bad;

-- Record contents, give links and needs their outcomes and count those given now; one entry a photo. A failure leaves
-- the last good copy and its validators. `failed:lost` is our own fault: it counts as no failure and waits for nothing.
-- Rows are locked in the order contents, links, counts, each by key. Found by key one at a time, whatever a plan that
-- was cached on empty tables believes.
CREATE FUNCTION headrace.fetch_decide_v1(
    p_runs bigint[], p_customers text[], p_items text[], p_urls text[], p_outcomes text[],
    p_etags text[], p_last_modifieds text[], p_touch_links boolean[], p_hashes text[],
    p_keys text[], p_formats text[], p_sizes_bytes bigint[], p_widths integer[], p_heights integer[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    INSERT INTO headrace.fetch_photo (sha256, key, format, size_bytes, width, height)
    SELECT DISTINCT ON (sha256) * FROM unnest(p_hashes, p_keys, p_formats, p_sizes_bytes, p_widths, p_heights)
        AS g (sha256, key, format, size_bytes, width, height)
    WHERE sha256 IS NOT NULL ORDER BY sha256
    ON CONFLICT (sha256) DO NOTHING;

    INSERT INTO headrace.fetch_link AS l
        (customer, url, outcome, sha256, etag, last_modified, failures, run_id, due_round)
    SELECT DISTINCT ON (customer, url) customer, url, outcome, sha256, etag, last_modified,
        CASE WHEN outcome IN ('stored', 'unchanged', 'failed:lost') THEN 0 ELSE 1 END, run_id,
        CASE WHEN outcome IN ('stored', 'unchanged', 'failed:lost') THEN 0 ELSE coalesce(
            (SELECT r.round FROM headrace.fetch_run r WHERE r.id = g.run_id), 0) + 2 END
    FROM unnest(p_customers, p_urls, p_outcomes, p_hashes, p_etags, p_last_modifieds, p_runs, p_touch_links)
        AS g (customer, url, outcome, sha256, etag, last_modified, run_id, touches_link)
    WHERE touches_link ORDER BY customer, url
    ON CONFLICT (customer, url) DO UPDATE SET
        outcome = excluded.outcome,
        sha256 = coalesce(excluded.sha256, l.sha256),
        etag = CASE excluded.outcome WHEN 'stored' THEN excluded.etag
            WHEN 'unchanged' THEN coalesce(excluded.etag, l.etag) ELSE l.etag END,
        last_modified = CASE excluded.outcome WHEN 'stored' THEN excluded.last_modified
            WHEN 'unchanged' THEN coalesce(excluded.last_modified, l.last_modified) ELSE l.last_modified END,
        failures = CASE WHEN excluded.outcome = 'failed:lost' THEN l.failures
            WHEN excluded.failures = 0 THEN 0 ELSE l.failures + 1 END,
        due_round = CASE WHEN excluded.failures = 0 THEN 0 ELSE excluded.due_round + l.failures END,
        copied_at = CASE WHEN excluded.sha256 <> coalesce(l.sha256, '') THEN now() ELSE l.copied_at END,
        checked_at = now(),
        run_id = excluded.run_id;

    -- How fast the run gets on is told from the photos of its last minutes.
    WITH decided AS (
        UPDATE headrace.fetch_need n SET outcome = g.outcome
        FROM unnest(p_runs, p_items, p_urls, p_outcomes) AS g (run_id, item, url, outcome)
        WHERE n.run_id = g.run_id AND n.item = g.item AND n.url = g.url AND n.outcome IS NULL
        RETURNING n.run_id, n.outcome
    ), paced AS (
        INSERT INTO headrace.fetch_pace AS p (run_id, minute, photos)
        SELECT run_id, date_trunc('minute', now()), count(*) FROM decided GROUP BY run_id ORDER BY run_id
        ON CONFLICT (run_id, minute) DO UPDATE SET photos = p.photos + excluded.photos
    )
    INSERT INTO headrace.fetch_count AS c (run_id, outcome, photos)
    SELECT run_id, outcome, count(*) FROM decided GROUP BY run_id, outcome ORDER BY run_id, outcome
    ON CONFLICT (run_id, outcome) DO UPDATE SET photos = c.photos + excluded.photos;
END $$;
