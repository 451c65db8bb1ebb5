-- What is wrong with the whole file of a run: its code, line and values, from which a sentence is made in any language.

ALTER TABLE headrace.fetch_run ADD COLUMN fault jsonb;
