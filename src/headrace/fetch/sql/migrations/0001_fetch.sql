-- Catalogues of customers, their items and photos, and the results that are published.

-- A customer and the limits of its requests. NULL in `hold_share`, `hold_items` and `refresh_s`:
-- the setting of the deployment applies. `seller_links`: how often its seller links were revoked.
CREATE TABLE headrace.fetch_customer (
    customer text PRIMARY KEY,
    starts_max integer NOT NULL,
    window_s double precision NOT NULL,
    connections integer NOT NULL,
    hold_share double precision,
    hold_items integer,
    refresh_s double precision,
    seller_links integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- The URL and schedule of a customer's catalogue. `etag`, `last_modified`, `sha256` and `rules`
-- describe the file that run `good_run` applied. They are used only while that run is the
-- customer's newest whole one.
CREATE TABLE headrace.fetch_source (
    customer text PRIMARY KEY REFERENCES headrace.fetch_customer,
    url text NOT NULL,
    cron text NOT NULL,
    tz text NOT NULL,
    format text,
    mapping text,
    etag text,
    last_modified text,
    sha256 text,
    rules bytea,
    good_run bigint,
    outcome text,
    problem text,
    run_id bigint,
    tried_at timestamptz,
    failures integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- The fields that rows of a category must have. `plain` is the category in the form in which
-- categories are compared. `json` and not `jsonb`: problems are listed in the order of the fields.
CREATE TABLE headrace.fetch_schema (
    plain text PRIMARY KEY,
    category text NOT NULL,
    schema json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- The meaning of the column names of a file in no known format.
CREATE TABLE headrace.fetch_mapping (
    name text PRIMARY KEY,
    mapping json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- One reading of a catalogue, or one call that uploads items.
--   is_whole        items that the run does not list are removed
--   has_line_break  the table ended with a line break; NULL: the file is no table
--   fault           JSON: code, line and values of an error of the whole file
--   round           number of whole runs of the customer, including this one if `is_round`
--   prior_at        start of the round before
--   asks_before     failed links checked before this time are due in any round
--   undone_by       the run that restored the items
--   review_until    end of the time in which an upload for review can be confirmed
--   items_late      items published at their deadline without all photos
CREATE TABLE headrace.fetch_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL REFERENCES headrace.fetch_customer,
    state text NOT NULL,
    file_name text NOT NULL,
    format text NOT NULL,
    is_whole boolean NOT NULL DEFAULT true,
    has_line_break boolean,
    reason text,
    fault jsonb,
    sample text,
    rows_read integer NOT NULL DEFAULT 0,
    invalid integer NOT NULL DEFAULT 0,
    new integer NOT NULL DEFAULT 0,
    changed integer NOT NULL DEFAULT 0,
    unchanged integer NOT NULL DEFAULT 0,
    gone integer NOT NULL DEFAULT 0,
    problems integer NOT NULL DEFAULT 0,
    items_pending integer NOT NULL DEFAULT 0,
    items_late integer NOT NULL DEFAULT 0,
    photos integer NOT NULL DEFAULT 0,
    round bigint,
    is_round boolean NOT NULL DEFAULT false,
    prior_at timestamptz,
    asks_before timestamptz,
    undone_by bigint,
    review_until timestamptz,
    started_at timestamptz NOT NULL DEFAULT now(),
    applied_at timestamptz,
    ended_at timestamptz
);
CREATE INDEX fetch_run_customer ON headrace.fetch_run (customer, id);
CREATE INDEX fetch_run_review ON headrace.fetch_run (review_until) WHERE state = 'held';

-- Problems of rows. `parameters` is a JSON object of the values that the message of `code` shows.
CREATE TABLE headrace.fetch_problem (
    run_id bigint NOT NULL REFERENCES headrace.fetch_run ON DELETE CASCADE,
    id bigint GENERATED ALWAYS AS IDENTITY,
    row_number integer NOT NULL,
    line integer NOT NULL,
    item text,
    field text NOT NULL,
    code text NOT NULL,
    parameters text NOT NULL DEFAULT '{}',
    PRIMARY KEY (run_id, id)
);

-- The next five tables have no foreign key to fetch_run: checking it costs more than the rows
-- themselves in a first load of a million. The code deletes their rows with the run.

-- Rows of a run between reading and applying; a held run keeps them until it is confirmed. A row
-- equal to the one that its item was made of has empty `fields` and `photos`.
CREATE TABLE headrace.fetch_staged (
    run_id bigint NOT NULL,
    item text NOT NULL,
    hash bytea,
    raw_hash bytea,
    fields text NOT NULL,
    photos text[] NOT NULL,
    refused jsonb NOT NULL,
    is_gone boolean NOT NULL DEFAULT false,
    PRIMARY KEY (run_id, item)
);

-- What a run does to an item: one row per version, published once. A `retry` requests photos of an
-- unchanged item again and becomes `changed` if they differ. `fields`: those that differ.
-- `late_at`: when the item was published without all photos; the change stays open until then.
CREATE TABLE headrace.fetch_change (
    run_id bigint NOT NULL,
    item text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('new', 'changed', 'gone', 'retry')),
    version bigint NOT NULL,
    has_other_photos boolean NOT NULL,
    fields text[] NOT NULL DEFAULT '{}',
    late_at timestamptz,
    published_at timestamptz,
    PRIMARY KEY (run_id, item)
);

-- Photos that a run requests. `outcome` is set once, so the counts add up. `is_late`: the photo was
-- missing at its item's deadline. The index holds a hash of the URL: an item id of 800 bytes beside
-- a URL of 2,048 bytes exceeds the 2,704 bytes of a B-tree entry.
CREATE TABLE headrace.fetch_need (
    run_id bigint NOT NULL,
    item text NOT NULL,
    url text NOT NULL,
    outcome text,
    is_late boolean NOT NULL DEFAULT false,
    id bigint GENERATED ALWAYS AS IDENTITY
);
CREATE UNIQUE INDEX fetch_need_photo
    ON headrace.fetch_need (run_id, item, hashtextextended(url, 0));
CREATE INDEX fetch_need_bad ON headrace.fetch_need (run_id, id)
    WHERE outcome LIKE 'failed:%' OR outcome LIKE 'refused:%' OR is_late;

-- Photos decided per minute; the rate of a run is computed from them.
CREATE TABLE headrace.fetch_pace (
    run_id bigint NOT NULL,
    minute timestamptz NOT NULL,
    photos bigint NOT NULL,
    PRIMARY KEY (run_id, minute)
);

-- The content of changed and removed items before a run; kept for the customer's newest runs.
CREATE TABLE headrace.fetch_before (
    run_id bigint NOT NULL,
    item text NOT NULL,
    hash bytea NOT NULL,
    raw_hash bytea,
    fields text NOT NULL,
    photos text[] NOT NULL,
    PRIMARY KEY (run_id, item)
);

-- Photos of a run by outcome.
CREATE TABLE headrace.fetch_count (
    run_id bigint NOT NULL REFERENCES headrace.fetch_run ON DELETE CASCADE,
    outcome text NOT NULL,
    photos bigint NOT NULL,
    PRIMARY KEY (run_id, outcome)
);

-- The current content of each item. `raw_hash`: of the row as read, where the row has no problem.
-- `sent_run`: the last run that uploaded the item; a catalogue read before that run does not
-- overwrite the item.
CREATE TABLE headrace.fetch_item (
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL,
    is_gone boolean NOT NULL,
    run_id bigint NOT NULL,
    sent_run bigint NOT NULL DEFAULT 0,
    hash bytea NOT NULL,
    raw_hash bytea,
    fields text NOT NULL,
    photos text[] NOT NULL,
    PRIMARY KEY (customer, item)
);

-- Fields that a customer's supplemental feed sets; they win over the fields of the item. A row
-- stays until the feed omits its id, also while no catalogue lists the item.
CREATE TABLE headrace.fetch_overlay (
    customer text NOT NULL,
    item text NOT NULL,
    fields jsonb NOT NULL,
    PRIMARY KEY (customer, item)
);

-- One row per photo content, written only after its bytes are stored.
CREATE TABLE headrace.fetch_photo (
    sha256 text PRIMARY KEY,
    key text NOT NULL,
    format text NOT NULL,
    size_bytes bigint NOT NULL,
    width integer NOT NULL,
    height integer NOT NULL,
    stored_at timestamptz NOT NULL DEFAULT now()
);

-- The perceptual hash of a content that was decoded, once per customer that has it, with the first
-- item and link. The bands are 16 bits each, for `fetch_near_v1`. `is_compared`: the photo's
-- near-duplicates are recorded.
CREATE TABLE headrace.fetch_photo_hash (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sha256 text NOT NULL,
    customer text NOT NULL,
    item text NOT NULL,
    url text NOT NULL,
    hash bigint NOT NULL,
    band_1 integer GENERATED ALWAYS AS ((hash >> 48 & 65535)::integer) STORED,
    band_2 integer GENERATED ALWAYS AS ((hash >> 32 & 65535)::integer) STORED,
    band_3 integer GENERATED ALWAYS AS ((hash >> 16 & 65535)::integer) STORED,
    band_4 integer GENERATED ALWAYS AS ((hash & 65535)::integer) STORED,
    is_compared boolean NOT NULL DEFAULT false,
    UNIQUE (sha256, customer)
);
CREATE INDEX fetch_photo_hash_band_1 ON headrace.fetch_photo_hash (band_1);
CREATE INDEX fetch_photo_hash_band_2 ON headrace.fetch_photo_hash (band_2);
CREATE INDEX fetch_photo_hash_band_3 ON headrace.fetch_photo_hash (band_3);
CREATE INDEX fetch_photo_hash_band_4 ON headrace.fetch_photo_hash (band_4);
CREATE INDEX fetch_photo_hash_new ON headrace.fetch_photo_hash (id) WHERE NOT is_compared;

-- Two photos that look alike, for moderators. `reviewed_at`: one of them has looked at the pair.
CREATE TABLE headrace.fetch_near_duplicate (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    first bigint NOT NULL REFERENCES headrace.fetch_photo_hash,
    second bigint NOT NULL REFERENCES headrace.fetch_photo_hash,
    customers text[] NOT NULL,
    distance integer NOT NULL,
    found_at timestamptz NOT NULL DEFAULT now(),
    reviewed_at timestamptz,
    UNIQUE (first, second)
);
CREATE INDEX fetch_near_duplicate_open ON headrace.fetch_near_duplicate (id)
    WHERE reviewed_at IS NULL;

-- The last result of each URL of a customer.
--   sha256      the last good copy, kept while later attempts fail; no foreign key, since its check
--               locks and logs the content's row once more per photo: `fetch_decide_v1`, the only
--               writer, inserts the content first, and contents are never deleted
--   due_round   the round in which a failed link is requested again
--   recheck_at  when a failed link is due in any round; NULL: it has a good copy, was refused
--               without a request, or belongs to no item
--   copied_at   when the link got a copy after it was decided without one or with another one
CREATE TABLE headrace.fetch_link (
    customer text NOT NULL,
    url text NOT NULL,
    outcome text NOT NULL,
    sha256 text,
    etag text,
    last_modified text,
    checked_at timestamptz NOT NULL DEFAULT now(),
    failures integer NOT NULL DEFAULT 0,
    run_id bigint NOT NULL,
    due_round bigint NOT NULL DEFAULT 0,
    recheck_at timestamptz,
    copied_at timestamptz,
    PRIMARY KEY (customer, url)
);
CREATE INDEX fetch_link_url ON headrace.fetch_link (url);
CREATE INDEX fetch_link_failed ON headrace.fetch_link (customer, url)
    WHERE outcome NOT IN ('stored', 'unchanged');
CREATE INDEX fetch_link_recheck ON headrace.fetch_link (recheck_at) WHERE recheck_at IS NOT NULL;
CREATE INDEX fetch_link_copied ON headrace.fetch_link (customer, copied_at)
    WHERE copied_at IS NOT NULL;

-- Statistics of a host per customer. `photos` and `seconds` decay like the weights of fetch_speed;
-- their quotient is the mean time of a photo. `left_share`: the share of the old weights that
-- remained at the last update.
CREATE TABLE headrace.fetch_host (
    customer text NOT NULL,
    host text NOT NULL,
    requests bigint NOT NULL DEFAULT 0,
    photos double precision NOT NULL DEFAULT 0,
    seconds double precision NOT NULL DEFAULT 0,
    left_share double precision NOT NULL DEFAULT 1,
    paused_until timestamptz,
    first_seen_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (customer, host)
) WITH (fillfactor = 70);
CREATE INDEX fetch_host_host ON headrace.fetch_host (host, customer);

-- Decaying weight of a host's downloads that needed a timeout class of this length.
CREATE TABLE headrace.fetch_speed (
    customer text NOT NULL,
    host text NOT NULL,
    class_s double precision NOT NULL,
    weight double precision NOT NULL,
    PRIMARY KEY (customer, host, class_s)
) WITH (fillfactor = 70);

-- Photos of a host by outcome.
CREATE TABLE headrace.fetch_host_outcome (
    customer text NOT NULL,
    host text NOT NULL,
    outcome text NOT NULL,
    photos bigint NOT NULL,
    last_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (customer, host, outcome)
) WITH (fillfactor = 70);

-- Attempts of all hosts by UTC day, length of the timeout class, outcome, and bucket of the
-- download time (0: no body); `study.py` has the bounds of the buckets.
CREATE TABLE headrace.fetch_attempt (
    day date NOT NULL,
    class_s double precision NOT NULL,
    outcome text NOT NULL,
    bucket smallint NOT NULL,
    attempts bigint NOT NULL,
    PRIMARY KEY (day, class_s, outcome, bucket)
) WITH (fillfactor = 70);

-- The Crawl-delay of a host's robots.txt, for all customers. `next_at`: the next request may leave.
CREATE TABLE headrace.fetch_robots (
    host text PRIMARY KEY,
    crawl_delay_s double precision,
    begun_at timestamptz NOT NULL,
    read_at timestamptz,
    next_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);

-- Published versions of items. `seq` grows in the order of commits: an advisory lock serializes the
-- writers.
CREATE TABLE headrace.fetch_result (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL,
    action text NOT NULL CHECK (action IN ('publish', 'edit', 'unpublish')),
    fields text NOT NULL,
    photos text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (customer, item, version)
);
CREATE INDEX fetch_result_customer ON headrace.fetch_result (customer, seq);
CREATE INDEX fetch_result_at ON headrace.fetch_result USING brin (at) WITH (pages_per_range = 16);

-- Items whose newest version a `before_publish` handler holds back, until a moderator releases it
-- or the item changes.
CREATE TABLE headrace.fetch_held (
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL,
    reason text NOT NULL,
    held_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (customer, item)
);

-- `on_item` handlers that receive results. `id` distinguishes a consumer from a removed one of the
-- same name. The row `before_publish` receives none: it records that such a handler exists.
CREATE TABLE headrace.fetch_consumer (
    name text PRIMARY KEY,
    id bigint GENERATED ALWAYS AS IDENTITY,
    added_at timestamptz NOT NULL DEFAULT now()
);

-- The version of an item that a consumer received, and the job that calls it now. Version 0 with
-- `is_shown`: the consumer shows the item and receives it again.
CREATE TABLE headrace.fetch_delivery (
    consumer text NOT NULL,
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL DEFAULT 0,
    is_shown boolean NOT NULL DEFAULT false,
    busy_job bigint,
    busy_until timestamptz,
    PRIMARY KEY (consumer, customer, item)
);

-- Deliveries for which no worker had the handler. A worker that has it enqueues them when it
-- starts.
CREATE TABLE headrace.fetch_absent (
    consumer text NOT NULL,
    seq bigint NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, seq)
);

-- Webhooks of customers. `taken_seq`: the last result that the receiver accepted. `turn` fences
-- jobs: a job of another turn does nothing. The row lock decides whether a result finds a running
-- job or creates the next one. The secrets sign messages and are stored readable: protect the
-- table.
CREATE TABLE headrace.fetch_webhook (
    customer text PRIMARY KEY REFERENCES headrace.fetch_customer,
    id bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    url text NOT NULL,
    secret text NOT NULL,
    old_secret text,
    old_until timestamptz,
    taken_seq bigint NOT NULL,
    turn bigint NOT NULL DEFAULT 0,
    failures integer NOT NULL DEFAULT 0,
    failing_since timestamptz,
    next_at timestamptz,
    last_at timestamptz,
    last_status integer,
    last_error text,
    disabled_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- The backoff of failed links. After `failures` failures in a row a link skips as many rounds
-- (whole catalogues of its customer). It is due after `fetch_recheck_wait_v1` in any case: less
-- than a day, so a repaired link is noticed within one.
CREATE FUNCTION headrace.fetch_due_round_v1(p_round bigint, p_failures integer) RETURNS bigint
LANGUAGE sql IMMUTABLE RETURN coalesce(p_round, 0) + p_failures + 1;

CREATE FUNCTION headrace.fetch_recheck_wait_v1() RETURNS interval
LANGUAGE sql IMMUTABLE RETURN interval '23 hours 30 minutes';

CREATE FUNCTION headrace.fetch_is_due_v1(
    p_due_round bigint, p_recheck_at timestamptz, p_round bigint
) RETURNS boolean
LANGUAGE sql STABLE RETURN p_due_round <= p_round OR coalesce(p_recheck_at <= now(), false);

-- Photos whose hash differs from `p_hash` in at most `p_bits` bits (up to 7), among the first
-- `p_candidates` of each band. Of hashes with 7 different bits one band has at most one of them.
CREATE FUNCTION headrace.fetch_near_bands_v1(p_band integer) RETURNS integer[]
LANGUAGE sql IMMUTABLE RETURN ARRAY(SELECT p_band # (1 << bit) FROM generate_series(0, 15) bit)
    || p_band;

CREATE FUNCTION headrace.fetch_near_v1(p_hash bigint, p_bits integer, p_candidates integer)
RETURNS TABLE (id bigint, distance integer) LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT DISTINCT f.id, bit_count((f.hash # p_hash)::bit(64))::integer FROM (
        (SELECT h.id, h.hash FROM headrace.fetch_photo_hash h WHERE h.band_1 = ANY(
            headrace.fetch_near_bands_v1((p_hash >> 48 & 65535)::integer)) LIMIT p_candidates)
        UNION ALL
        (SELECT h.id, h.hash FROM headrace.fetch_photo_hash h WHERE h.band_2 = ANY(
            headrace.fetch_near_bands_v1((p_hash >> 32 & 65535)::integer)) LIMIT p_candidates)
        UNION ALL
        (SELECT h.id, h.hash FROM headrace.fetch_photo_hash h WHERE h.band_3 = ANY(
            headrace.fetch_near_bands_v1((p_hash >> 16 & 65535)::integer)) LIMIT p_candidates)
        UNION ALL
        (SELECT h.id, h.hash FROM headrace.fetch_photo_hash h WHERE h.band_4 = ANY(
            headrace.fetch_near_bands_v1((p_hash & 65535)::integer)) LIMIT p_candidates)
    ) f WHERE bit_count((f.hash # p_hash)::bit(64)) <= p_bits
$$;

-- Record photo contents, set the outcomes of links and needs, and count the needs decided by this
-- call; one array entry per photo. A failure keeps the last good copy and its validators.
-- `failed:lost` is a fault of this system: it counts as no failure and is due at once. Rows are
-- locked in the order contents, links, counts, each by key. The settings enforce lookups by key,
-- whatever a plan cached on empty tables assumes.
CREATE FUNCTION headrace.fetch_decide_v1(
    p_runs bigint[], p_customers text[], p_items text[], p_urls text[], p_outcomes text[],
    p_etags text[], p_last_modifieds text[], p_touch_links boolean[], p_hashes text[],
    p_keys text[], p_formats text[], p_sizes_bytes bigint[], p_widths integer[],
    p_heights integer[], p_photo_hashes bigint[]
) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    INSERT INTO headrace.fetch_photo (sha256, key, format, size_bytes, width, height)
    SELECT DISTINCT ON (sha256) *
    FROM unnest(p_hashes, p_keys, p_formats, p_sizes_bytes, p_widths, p_heights)
        AS g (sha256, key, format, size_bytes, width, height)
    WHERE sha256 IS NOT NULL ORDER BY sha256
    ON CONFLICT (sha256) DO NOTHING;

    -- A content that is known already was not decoded again: it has the hash of its first customer.
    INSERT INTO headrace.fetch_photo_hash (sha256, customer, item, url, hash)
    SELECT DISTINCT ON (g.sha256, g.customer) g.sha256, g.customer, g.item, g.url, f.hash
    FROM unnest(p_hashes, p_customers, p_items, p_urls, p_photo_hashes)
        AS g (sha256, customer, item, url, hash)
    CROSS JOIN LATERAL (SELECT coalesce(g.hash, (
        SELECT h.hash FROM headrace.fetch_photo_hash h WHERE h.sha256 = g.sha256 LIMIT 1
    )) AS hash) f
    WHERE g.sha256 IS NOT NULL AND f.hash IS NOT NULL ORDER BY g.sha256, g.customer
    ON CONFLICT (sha256, customer) DO NOTHING;

    INSERT INTO headrace.fetch_link AS l (
        customer, url, outcome, sha256, etag, last_modified, failures, run_id, due_round, recheck_at
    )
    SELECT DISTINCT ON (customer, url) customer, url, outcome, sha256, etag, last_modified,
        f.failed::integer, run_id,
        CASE WHEN f.failed THEN headrace.fetch_due_round_v1(
            (SELECT r.round FROM headrace.fetch_run r WHERE r.id = g.run_id), 1) ELSE 0 END,
        CASE WHEN f.failed THEN now() + headrace.fetch_recheck_wait_v1()
            WHEN outcome = 'failed:lost' THEN now() END
    FROM unnest(
        p_customers, p_urls, p_outcomes, p_hashes, p_etags, p_last_modifieds, p_runs, p_touch_links
    ) AS g (customer, url, outcome, sha256, etag, last_modified, run_id, touches_link)
    CROSS JOIN LATERAL (
        SELECT outcome NOT IN ('stored', 'unchanged', 'failed:lost') AS failed
    ) f
    WHERE touches_link ORDER BY customer, url
    ON CONFLICT (customer, url) DO UPDATE SET
        outcome = excluded.outcome,
        sha256 = coalesce(excluded.sha256, l.sha256),
        etag = CASE excluded.outcome WHEN 'stored' THEN excluded.etag
            WHEN 'unchanged' THEN coalesce(excluded.etag, l.etag) ELSE l.etag END,
        last_modified = CASE excluded.outcome WHEN 'stored' THEN excluded.last_modified
            WHEN 'unchanged' THEN coalesce(excluded.last_modified, l.last_modified)
            ELSE l.last_modified END,
        failures = CASE WHEN excluded.outcome = 'failed:lost' THEN l.failures
            WHEN excluded.failures = 0 THEN 0 ELSE l.failures + 1 END,
        due_round = CASE WHEN excluded.failures = 0 THEN 0 ELSE headrace.fetch_due_round_v1(
            (SELECT r.round FROM headrace.fetch_run r WHERE r.id = excluded.run_id),
            l.failures + 1) END,
        recheck_at = excluded.recheck_at,
        copied_at = CASE WHEN excluded.sha256 <> coalesce(l.sha256, '') THEN now()
            ELSE l.copied_at END,
        checked_at = now(),
        run_id = excluded.run_id;

    WITH decided AS (
        UPDATE headrace.fetch_need n SET outcome = g.outcome
        FROM unnest(p_runs, p_items, p_urls, p_outcomes) AS g (run_id, item, url, outcome)
        WHERE n.run_id = g.run_id AND n.item = g.item AND n.url = g.url AND n.outcome IS NULL
        RETURNING n.run_id, n.outcome
    ), paced AS (
        INSERT INTO headrace.fetch_pace AS p (run_id, minute, photos)
        SELECT run_id, date_trunc('minute', now()), count(*)
        FROM decided GROUP BY run_id ORDER BY run_id
        ON CONFLICT (run_id, minute) DO UPDATE SET photos = p.photos + excluded.photos
    )
    INSERT INTO headrace.fetch_count AS c (run_id, outcome, photos)
    SELECT run_id, outcome, count(*)
    FROM decided GROUP BY run_id, outcome ORDER BY run_id, outcome
    ON CONFLICT (run_id, outcome) DO UPDATE SET photos = c.photos + excluded.photos;
END $$;

-- Add the measurements of a worker: one entry per host (p_), per host and class (s_), per host and
-- outcome (o_), and the counts of attempts (a_), last, since all workers lock their rows. Host rows
-- are written first and in order, so two workers cannot deadlock. Old weights decay by age and by
-- the number of new downloads, as `decayed` in host_stats.py does.
CREATE FUNCTION headrace.fetch_note_hosts_v1(
    p_customers text[], p_hosts text[], p_requests integer[], p_photos integer[],
    p_seconds double precision[], p_pauses_s double precision[],
    s_customers text[], s_hosts text[], s_classes_s double precision[], s_photos integer[],
    o_customers text[], o_hosts text[], o_outcomes text[], o_photos integer[],
    a_classes_s double precision[], a_outcomes text[], a_buckets smallint[], a_attempts integer[],
    p_half_life_s double precision, p_recent double precision
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.fetch_host AS h
        (customer, host, requests, photos, seconds, paused_until)
    SELECT g.customer, g.host, g.requests, g.photos, g.seconds,
           CASE WHEN g.pause_s > 0 THEN now() + g.pause_s * interval '1 s' END
    FROM unnest(p_customers, p_hosts, p_requests, p_photos, p_seconds, p_pauses_s)
        AS g(customer, host, requests, photos, seconds, pause_s)
    ORDER BY g.customer, g.host
    ON CONFLICT (customer, host) DO UPDATE SET
        requests = h.requests + excluded.requests,
        left_share = power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        photos = excluded.photos + h.photos
            * power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        seconds = excluded.seconds + h.seconds
            * power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        paused_until = greatest(h.paused_until, excluded.paused_until),
        last_seen_at = now();
    UPDATE headrace.fetch_speed s SET weight = s.weight * h.left_share
    FROM (
        SELECT t.ctid, r.left_share FROM unnest(p_customers, p_hosts) AS g(customer, host)
        CROSS JOIN LATERAL (SELECT r.left_share FROM headrace.fetch_host r
                            WHERE r.customer = g.customer AND r.host = g.host OFFSET 0) r
        CROSS JOIN LATERAL (SELECT t.ctid FROM headrace.fetch_speed t
                            WHERE t.customer = g.customer AND t.host = g.host OFFSET 0) t
    ) h WHERE s.ctid = h.ctid;
    INSERT INTO headrace.fetch_speed AS s (customer, host, class_s, weight)
    SELECT g.customer, g.host, g.class_s, g.photos
    FROM unnest(s_customers, s_hosts, s_classes_s, s_photos) AS g(customer, host, class_s, photos)
    ORDER BY 1, 2, 3
    ON CONFLICT (customer, host, class_s) DO UPDATE SET weight = s.weight + excluded.weight;
    INSERT INTO headrace.fetch_host_outcome AS o (customer, host, outcome, photos)
    SELECT g.customer, g.host, g.outcome, g.photos
    FROM unnest(o_customers, o_hosts, o_outcomes, o_photos) AS g(customer, host, outcome, photos)
    ORDER BY 1, 2, 3
    ON CONFLICT (customer, host, outcome) DO UPDATE SET
        photos = o.photos + excluded.photos, last_at = now();
    INSERT INTO headrace.fetch_attempt AS a (day, class_s, outcome, bucket, attempts)
    SELECT (now() AT TIME ZONE 'UTC')::date, g.class_s, g.outcome, g.bucket, g.attempts
    FROM unnest(a_classes_s, a_outcomes, a_buckets, a_attempts)
        AS g(class_s, outcome, bucket, attempts)
    ORDER BY 2, 3, 4
    ON CONFLICT (day, class_s, outcome, bucket) DO UPDATE SET
        attempts = a.attempts + excluded.attempts;
END $$;
