-- name: expected_store
-- The id in the mark of the object store's folder, as all hosts expect it.
SELECT mark FROM headrace.object_store;

-- name: expect_first_store
-- Expect the mark of a folder at its first use; without effect where another is expected.
INSERT INTO headrace.object_store (mark) VALUES (:mark) ON CONFLICT DO NOTHING;

-- name: expect_store
-- Expect another mark from now on.
INSERT INTO headrace.object_store (mark) VALUES (:mark)
ON CONFLICT (one) DO UPDATE SET mark = excluded.mark, since = now();
