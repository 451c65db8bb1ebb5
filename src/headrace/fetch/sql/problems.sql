-- name: insert_problems
-- Keep the problems of some rows.
INSERT INTO headrace.fetch_problem (run_id, row_number, line, item, field, code, problem, parameters)
SELECT :run_id::bigint, * FROM unnest(
    :numbers::integer[], :lines::integer[], :items::text[], :fields::text[], :codes::text[], :texts::text[],
    :parameters::text[]
);

-- name: problems
-- A page of a run's problems in the order of its rows.
SELECT id, row_number, line, item, field, code, problem, parameters FROM headrace.fetch_problem
WHERE run_id = :run_id AND id > :after
ORDER BY id LIMIT :rows_max;

-- name: photo_problems
-- A page of the photos of a run that failed, were refused or were missing at their item's deadline and still are, in the
-- order of their needs.
SELECT id, item, url, coalesce(outcome, 'failed:late') AS outcome FROM headrace.fetch_need
WHERE run_id = :run_id AND id > :after AND (outcome LIKE 'failed:%' OR outcome LIKE 'refused:%' OR is_late)
    AND (outcome IS NULL OR outcome LIKE 'failed:%' OR outcome LIKE 'refused:%')
ORDER BY id LIMIT :rows_max;
