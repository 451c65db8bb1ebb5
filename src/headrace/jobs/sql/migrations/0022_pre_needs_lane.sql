-- A queue whose jobs must have a lane: without one they would pass its limiter unlimited.
ALTER TABLE headrace.queue ADD COLUMN needs_lane boolean NOT NULL DEFAULT false;
