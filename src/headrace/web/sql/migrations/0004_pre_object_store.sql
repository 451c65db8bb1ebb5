-- Which object store this installation keeps its objects in, where that is a folder that several hosts mount: the id in the
-- mark of that folder. One row, so that of two hosts that begin at once one is first.
CREATE TABLE headrace.object_store (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    mark text NOT NULL,
    since timestamptz NOT NULL DEFAULT now()
);
