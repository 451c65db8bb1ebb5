-- name: troubles
-- What failed or waits for a person, by kind: a count, the earliest moment and the commonest cause.
-- Each kind is counted up to :rows_max.
SELECT 'held_item' AS kind, count(*) AS things, min(held_at) AS since_at,
    mode() WITHIN GROUP (ORDER BY left(reason, 200)) AS cause, min(customer) AS customer,
    NULL::bigint AS run
FROM (SELECT * FROM headrace.fetch_held LIMIT :rows_max) h HAVING count(*) > 0
UNION ALL
SELECT 'held_run', count(*), min(started_at), mode() WITHIN GROUP (ORDER BY left(reason, 200)),
    min(customer), max(id)
FROM (SELECT * FROM headrace.fetch_run WHERE state = 'held' LIMIT :rows_max) r HAVING count(*) > 0
UNION ALL
SELECT 'source', count(*), min(tried_at), mode() WITHIN GROUP (ORDER BY left(problem, 200)),
    min(customer), max(run_id)
FROM (SELECT * FROM headrace.fetch_source WHERE failures > 0 LIMIT :rows_max) s
HAVING count(*) > 0
UNION ALL
SELECT 'webhook', count(*), min(coalesce(failing_since, disabled_at)),
    mode() WITHIN GROUP (ORDER BY left(last_error, 200)), min(customer), NULL
FROM (SELECT * FROM headrace.fetch_webhook WHERE failures > 0 OR disabled_at IS NOT NULL
    LIMIT :rows_max) w HAVING count(*) > 0;

-- name: faulty_newest_runs
-- Newest run of each customer, if it was refused or abandoned, or lacks photos: up to :rows_max.
SELECT n.id FROM headrace.fetch_customer c
CROSS JOIN LATERAL (
    SELECT r.id, r.state FROM headrace.fetch_run r
    WHERE r.customer = c.customer ORDER BY r.id DESC LIMIT 1
) n
WHERE n.state IN ('refused', 'abandoned') OR EXISTS (
    SELECT FROM headrace.fetch_count f
    WHERE f.run_id = n.id AND f.photos > 0
        AND (starts_with(f.outcome, 'failed:') OR starts_with(f.outcome, 'refused:'))
)
ORDER BY n.id DESC LIMIT :rows_max;

-- name: customers_like
-- Customers whose name contains a text; those that begin with it first.
SELECT customer FROM headrace.fetch_customer WHERE strpos(lower(customer), lower(:part)) > 0
ORDER BY strpos(lower(customer), lower(:part)) > 1, customer LIMIT :rows_max;

-- name: items_like
-- Items whose id begins with a text, of the first :customers_max customers.
SELECT c.customer, i.item
FROM (SELECT customer FROM headrace.fetch_customer ORDER BY customer LIMIT :customers_max) c
CROSS JOIN LATERAL (
    SELECT f.item FROM headrace.fetch_item f
    WHERE f.customer = c.customer AND f.item >= :part::text AND f.item <= :last::text
        AND starts_with(f.item, :part)
    ORDER BY f.item LIMIT 2
) i ORDER BY i.item, c.customer LIMIT :rows_max;
