-- name: expected_store
-- The object store id that all hosts expect.
SELECT mark FROM headrace.object_store;

-- name: expect_first_store
-- Record the object store id at the first use; no effect if one is recorded.
INSERT INTO headrace.object_store (mark) VALUES (:mark) ON CONFLICT DO NOTHING;

-- name: expect_store
-- Replace the recorded object store id.
INSERT INTO headrace.object_store (mark) VALUES (:mark)
ON CONFLICT (one) DO UPDATE SET mark = excluded.mark, since = now();
