-- Deadlines of items, and failed links that are asked again by the clock.

-- `late_at`: when a new or changed item was published without all of its photos; its change stays open until they are
-- decided. `is_late`: the photo was missing then.
ALTER TABLE headrace.fetch_change ADD late_at timestamptz;
ALTER TABLE headrace.fetch_need ADD is_late boolean NOT NULL DEFAULT false;
DROP INDEX headrace.fetch_need_bad;
CREATE INDEX fetch_need_bad ON headrace.fetch_need (run_id, id)
    WHERE outcome LIKE 'failed:%' OR outcome LIKE 'refused:%' OR is_late;

-- The back-off of failed links, in one place. A link that failed `failures` times in a row sits out as many rounds
-- (catalogues of its customer), and is due after `fetch_recheck_wait_v1` in any case: less than a day, so that a
-- repair is noticed within one.
CREATE FUNCTION headrace.fetch_due_round_v1(p_round bigint, p_failures integer) RETURNS bigint
LANGUAGE sql IMMUTABLE RETURN coalesce(p_round, 0) + p_failures + 1;

CREATE FUNCTION headrace.fetch_recheck_wait_v1() RETURNS interval
LANGUAGE sql IMMUTABLE RETURN interval '23 hours 30 minutes';

CREATE FUNCTION headrace.fetch_is_due_v1(p_due_round bigint, p_recheck_at timestamptz, p_round bigint) RETURNS boolean
LANGUAGE sql STABLE RETURN p_due_round <= p_round OR coalesce(p_recheck_at <= now(), false);

-- `recheck_at`: when a failed link is due whatever its round; null: it has a good copy, was refused without a
-- request, or is in no item.
ALTER TABLE headrace.fetch_link ADD recheck_at timestamptz;
UPDATE headrace.fetch_link SET recheck_at = checked_at + headrace.fetch_recheck_wait_v1()
WHERE outcome NOT IN ('stored', 'unchanged') AND due_round > 0;
CREATE INDEX fetch_link_recheck ON headrace.fetch_link (recheck_at) WHERE recheck_at IS NOT NULL;

-- Record contents, give links and needs their outcomes and count those given now; one entry a photo. A failure leaves
-- the last good copy and its validators. `failed:lost` is our own fault: it counts as no failure and waits for nothing.
-- Rows are locked in the order contents, links, counts, each by key. Found by key one at a time, whatever a plan that
-- was cached on empty tables believes.
CREATE OR REPLACE FUNCTION headrace.fetch_decide_v1(
    p_runs bigint[], p_customers text[], p_items text[], p_urls text[], p_outcomes text[],
    p_etags text[], p_last_modifieds text[], p_touch_links boolean[], p_hashes text[],
    p_keys text[], p_formats text[], p_sizes_bytes bigint[], p_widths integer[], p_heights integer[]
) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
BEGIN
    INSERT INTO headrace.fetch_photo (sha256, key, format, size_bytes, width, height)
    SELECT DISTINCT ON (sha256) * FROM unnest(p_hashes, p_keys, p_formats, p_sizes_bytes, p_widths, p_heights)
        AS g (sha256, key, format, size_bytes, width, height)
    WHERE sha256 IS NOT NULL ORDER BY sha256
    ON CONFLICT (sha256) DO NOTHING;

    INSERT INTO headrace.fetch_link AS l
        (customer, url, outcome, sha256, etag, last_modified, failures, run_id, due_round, recheck_at)
    SELECT DISTINCT ON (customer, url) customer, url, outcome, sha256, etag, last_modified,
        f.failed::integer, run_id,
        CASE WHEN f.failed THEN headrace.fetch_due_round_v1(
            (SELECT r.round FROM headrace.fetch_run r WHERE r.id = g.run_id), 1) ELSE 0 END,
        CASE WHEN f.failed THEN now() + headrace.fetch_recheck_wait_v1()
            WHEN outcome = 'failed:lost' THEN now() END
    FROM unnest(p_customers, p_urls, p_outcomes, p_hashes, p_etags, p_last_modifieds, p_runs, p_touch_links)
        AS g (customer, url, outcome, sha256, etag, last_modified, run_id, touches_link)
    CROSS JOIN LATERAL (SELECT outcome NOT IN ('stored', 'unchanged', 'failed:lost') AS failed) f
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
        due_round = CASE WHEN excluded.failures = 0 THEN 0 ELSE headrace.fetch_due_round_v1(
            (SELECT r.round FROM headrace.fetch_run r WHERE r.id = excluded.run_id), l.failures + 1) END,
        recheck_at = excluded.recheck_at,
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
