-- Item ids of up to 200 characters of any script.

-- An id of 800 bytes beside a URL of 2,048 bytes exceeds the 2,704 bytes that a B-tree entry may have, so the URL is
-- indexed by its hash. An item has at most 30 photos: lookups by run and item compare the URLs themselves.
ALTER TABLE headrace.fetch_need DROP CONSTRAINT fetch_need_pkey;
CREATE UNIQUE INDEX fetch_need_photo ON headrace.fetch_need (run_id, item, hashtextextended(url, 0));
