-- What rows of a category must hold, and what the names of foreign files mean; both written by people.

-- `plain` is the category as categories are compared. Of type json, which keeps the order of the fields: faults are
-- told in it.
CREATE TABLE headrace.fetch_schema (
    plain text PRIMARY KEY,
    category text NOT NULL,
    schema json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE headrace.fetch_mapping (
    name text PRIMARY KEY,
    mapping json NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
