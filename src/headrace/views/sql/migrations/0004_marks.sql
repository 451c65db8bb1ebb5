-- Marks: named spans of an entity's time, which an owner's page shows beside the series.
CREATE TABLE headrace.views_mark (
    id text COLLATE "C",
    name text COLLATE "C",
    from_at timestamptz,
    to_at timestamptz,
    PRIMARY KEY (id, name, from_at)
);
