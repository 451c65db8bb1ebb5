-- Viewers of past days: kept for views.viewers_kept, removed by day.

-- The flusher removes whole days; without it a removal reads the whole table.
CREATE INDEX views_unique_day ON headrace.views_unique (day);
