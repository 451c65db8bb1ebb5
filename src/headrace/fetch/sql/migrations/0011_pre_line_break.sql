-- Whether the table of a run ended with a line break: a later one without it may be cut in its last cell. NULL: no table.

ALTER TABLE headrace.fetch_run ADD COLUMN has_line_break boolean;
