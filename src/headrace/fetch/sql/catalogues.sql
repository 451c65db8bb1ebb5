-- name: set_customer
-- Create a customer or change its limits.
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

-- name: seller_link
-- Data of a new seller link: the number of revocations, and when the link expires.
SELECT seller_links, extract(epoch FROM now())::bigint + :lasts_s::bigint AS expires_s
FROM headrace.fetch_customer WHERE customer = :customer;

-- name: is_seller_link
-- Whether a seller link has neither expired nor been revoked.
SELECT EXISTS (SELECT FROM headrace.fetch_customer
    WHERE customer = :customer AND seller_links = :seller_links
        AND now() < to_timestamp(:expires_s::bigint));

-- name: revoke_seller_links
-- Revoke all seller links of a customer.
UPDATE headrace.fetch_customer SET seller_links = seller_links + 1 WHERE customer = :customer
RETURNING customer;

-- name: sample_item
-- The content of one published item of a customer.
SELECT fields FROM headrace.fetch_item WHERE customer = :customer AND NOT is_gone LIMIT 1;

-- name: set_source
-- Create or replace a customer's source; discard the validators of an earlier file.
INSERT INTO headrace.fetch_source (customer, url, cron, tz, format, mapping)
VALUES (:customer, :url, :cron, :tz, :format, :mapping)
ON CONFLICT (customer) DO UPDATE SET
    url = excluded.url, cron = excluded.cron, tz = excluded.tz, format = excluded.format,
    mapping = excluded.mapping, etag = NULL, last_modified = NULL, sha256 = NULL, rules = NULL,
    good_run = NULL, failures = 0;

-- name: sources
-- Every source by customer, or one.
SELECT customer, url, cron, tz, format, mapping, outcome, problem, run_id, tried_at, failures
FROM headrace.fetch_source
WHERE :customer::text IS NULL OR customer = :customer
ORDER BY customer;

-- name: drop_source
-- Delete a customer's source.
DELETE FROM headrace.fetch_source WHERE customer = :customer RETURNING customer;

-- name: source_to_bring
-- A source with its validators, which are NULL once another catalogue was applied.
SELECT s.url, s.format, s.mapping, known.etag, known.last_modified, known.sha256, known.rules
FROM headrace.fetch_source s
LEFT JOIN headrace.fetch_source known ON known.customer = s.customer
    AND known.good_run = (
        SELECT max(r.id) FROM headrace.fetch_run r
        WHERE r.customer = s.customer AND r.state IN ('applied', 'done') AND r.is_whole
    )
WHERE s.customer = :customer;

-- name: note_brought
-- Store the result of a fetched file; :good_run is the run that applied it.
UPDATE headrace.fetch_source SET outcome = :outcome, problem = :problem, run_id = :run_id::bigint,
    tried_at = now(), failures = 0, etag = :etag, last_modified = :last_modified, sha256 = :sha256,
    rules = :rules, good_run = :good_run
WHERE customer = :customer AND url = :url;

-- name: note_unchanged
-- Record that the file is the applied one; the run of its links becomes the applied run.
UPDATE headrace.fetch_source SET outcome = 'unchanged', problem = NULL, tried_at = now(),
    failures = 0, run_id = :run_id::bigint, good_run = :run_id
WHERE customer = :customer AND url = :url;

-- name: note_not_brought
-- Store why the file was not fetched or not readable.
UPDATE headrace.fetch_source SET outcome = :outcome, problem = :problem, tried_at = now(),
    failures = failures + 1
WHERE customer = :customer AND url = :url;

-- name: try_lock_source
-- Keep other fetches of this customer's file out until the session ends.
SELECT pg_try_advisory_lock(hashtextextended(
    'headrace.fetch.source:' || :customer::text, :is_supplemental::boolean::integer));

-- name: order_run
-- Start a run whose file is fetched later.
INSERT INTO headrace.fetch_run (customer, state, file_name, format)
VALUES (:customer, 'bringing', :file_name, '')
RETURNING id;

-- name: refuse_ordered
-- Close a run whose file could not be fetched or read.
UPDATE headrace.fetch_run SET state = 'refused', reason = :reason, ended_at = now()
WHERE id = :run_id AND state = 'bringing';

-- name: note_trouble
-- Store why the file of a run is not fetched yet.
UPDATE headrace.fetch_run SET reason = :reason WHERE id = :run_id AND state = 'bringing';

-- name: set_schema
-- Create or replace the schema of a category.
INSERT INTO headrace.fetch_schema (plain, category, schema)
VALUES (:plain, :category, :schema::text::json)
ON CONFLICT (plain) DO UPDATE SET category = excluded.category, schema = excluded.schema,
    updated_at = now()
RETURNING category, schema::text AS schema, updated_at;

-- name: schemas
-- Every schema by category, or the one of :plain.
SELECT category, schema::text AS schema, updated_at FROM headrace.fetch_schema
WHERE :plain::text IS NULL OR plain = :plain ORDER BY plain;

-- name: drop_schema
-- Delete the schema of a category.
DELETE FROM headrace.fetch_schema WHERE plain = :plain;

-- name: set_mapping
-- Create or replace a mapping.
INSERT INTO headrace.fetch_mapping (name, mapping) VALUES (:name, :mapping::text::json)
ON CONFLICT (name) DO UPDATE SET mapping = excluded.mapping, updated_at = now()
RETURNING name, mapping::text AS mapping, updated_at;

-- name: mappings
-- Every mapping by name, or the one of :name.
SELECT name, mapping::text AS mapping, updated_at FROM headrace.fetch_mapping
WHERE :name::text IS NULL OR name = :name ORDER BY name;

-- name: drop_mapping
-- Delete a mapping.
DELETE FROM headrace.fetch_mapping WHERE name = :name;

-- name: insert_problems
-- Store the problems of some rows.
INSERT INTO headrace.fetch_problem (run_id, row_number, line, item, field, code, parameters)
SELECT :run_id::bigint, * FROM unnest(
    :numbers::integer[], :lines::integer[], :items::text[], :fields::text[], :codes::text[],
    :parameters::text[]
);

-- name: problems
-- A page of a run's problems in row order.
SELECT id, row_number, line, item, field, code, parameters FROM headrace.fetch_problem
WHERE run_id = :run_id AND id > :after
ORDER BY id LIMIT :rows_max;

-- name: photo_problems
-- A page of a run's photos that failed, were refused, or were late and are still missing.
SELECT id, item, url, coalesce(outcome, 'failed:late') AS outcome FROM headrace.fetch_need
WHERE run_id = :run_id AND id > :after
    AND (outcome LIKE 'failed:%' OR outcome LIKE 'refused:%' OR is_late)
    AND (outcome IS NULL OR outcome LIKE 'failed:%' OR outcome LIKE 'refused:%')
ORDER BY id LIMIT :rows_max;
