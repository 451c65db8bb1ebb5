-- Since when PostgreSQL takes the writes of hosts and of the leader. A host whose reports are
-- missing is silent only if others were written meanwhile.

-- Begin of the reports that followed each other without a gap.
ALTER TABLE headrace.host ADD COLUMN reports_from timestamptz;

-- Begin of the lead, by any scheduler, without a lapse.
ALTER TABLE headrace.fleet_plan ADD COLUMN led_from timestamptz;
