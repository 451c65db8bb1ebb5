-- name: set_source
-- Keep where a customer's catalogue comes from; what was known of an earlier file is forgotten.
INSERT INTO headrace.fetch_source (customer, url, cron, tz, format, mapping)
VALUES (:customer, :url, :cron, :tz, :format, :mapping)
ON CONFLICT (customer) DO UPDATE SET
    url = excluded.url, cron = excluded.cron, tz = excluded.tz, format = excluded.format,
    mapping = excluded.mapping, etag = NULL, last_modified = NULL, sha256 = NULL, rules = NULL,
    good_run = NULL, failures = 0;

-- name: sources
-- Every source by customer, or the one of :customer.
SELECT customer, url, cron, tz, format, mapping, outcome, problem, run_id, tried_at, failures
FROM headrace.fetch_source WHERE :customer::text IS NULL OR customer = :customer ORDER BY customer;

-- name: drop_source
-- Forget where a customer's catalogue comes from.
DELETE FROM headrace.fetch_source WHERE customer = :customer RETURNING customer;

-- name: source_to_bring
-- A source with its validators, which say nothing once another catalogue was applied.
SELECT s.url, s.format, s.mapping, known.etag, known.last_modified, known.sha256, known.rules
FROM headrace.fetch_source s
LEFT JOIN headrace.fetch_source known ON known.customer = s.customer AND known.good_run = (
    SELECT max(r.id) FROM headrace.fetch_run r
    WHERE r.customer = s.customer AND r.is_whole AND r.state IN ('applied', 'done')
)
WHERE s.customer = :customer;

-- name: note_brought
-- Keep what came of bringing a file; :good_run is the run that applied it.
UPDATE headrace.fetch_source SET outcome = :outcome, problem = :problem, run_id = :run_id::bigint,
    tried_at = now(), failures = 0, etag = :etag, last_modified = :last_modified, sha256 = :sha256,
    rules = :rules, good_run = :good_run
WHERE customer = :customer AND url = :url;

-- name: note_unchanged
-- Keep that the file is the one that was applied; the run of its links takes the place of the run before.
UPDATE headrace.fetch_source SET outcome = 'unchanged', problem = NULL, run_id = :run_id::bigint,
    tried_at = now(), failures = 0, good_run = :run_id
WHERE customer = :customer AND url = :url;

-- name: note_not_brought
-- Keep why no file came, or why it could not be read.
UPDATE headrace.fetch_source SET outcome = :outcome, problem = :problem, tried_at = now(),
    failures = failures + 1
WHERE customer = :customer AND url = :url;

-- name: try_lock_source
-- Keep others from bringing this customer's file for as long as the session lives.
SELECT pg_try_advisory_lock(hashtextextended('headrace.fetch.source:' || :customer::text, 0));

-- name: order_run
-- Begin a run whose file is still to be brought.
INSERT INTO headrace.fetch_run (customer, state, file_name, format)
VALUES (:customer, 'bringing', :file_name, '')
RETURNING id;

-- name: refuse_ordered
-- End a run whose file did not come or could not be read.
UPDATE headrace.fetch_run SET state = 'refused', reason = :reason, ended_at = now()
WHERE id = :run_id AND state = 'bringing';

-- name: note_trouble
-- Tell why the file of a run has not come yet.
UPDATE headrace.fetch_run SET reason = :reason WHERE id = :run_id AND state = 'bringing';
