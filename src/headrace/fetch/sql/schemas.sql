-- name: set_schema
-- Keep what rows of a category must hold.
INSERT INTO headrace.fetch_schema (plain, category, schema) VALUES (:plain, :category, :schema::text::json)
ON CONFLICT (plain) DO UPDATE SET category = excluded.category, schema = excluded.schema, updated_at = now()
RETURNING category, schema::text AS schema, updated_at;

-- name: schemas
-- Every schema by category, or the one of :plain.
SELECT category, schema::text AS schema, updated_at FROM headrace.fetch_schema
WHERE :plain::text IS NULL OR plain = :plain ORDER BY plain;

-- name: drop_schema
-- Forget what rows of a category must hold.
DELETE FROM headrace.fetch_schema WHERE plain = :plain RETURNING plain;

-- name: set_mapping
-- Keep what the names of a foreign file mean.
INSERT INTO headrace.fetch_mapping (name, mapping) VALUES (:name, :mapping::text::json)
ON CONFLICT (name) DO UPDATE SET mapping = excluded.mapping, updated_at = now()
RETURNING name, mapping::text AS mapping, updated_at;

-- name: mappings
-- Every mapping by name, or the one of :name.
SELECT name, mapping::text AS mapping, updated_at FROM headrace.fetch_mapping
WHERE :name::text IS NULL OR name = :name ORDER BY name;

-- name: drop_mapping
-- Forget a mapping.
DELETE FROM headrace.fetch_mapping WHERE name = :name RETURNING name;
