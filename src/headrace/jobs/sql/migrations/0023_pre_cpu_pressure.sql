-- Share of the last minute in which tasks of a host's slots waited for a core, 0 to 1; 0 where the slots themselves use
-- less than half of the cores. The load average counted the whole machine, also processes that only wait for a disk.
ALTER TABLE headrace.host ADD COLUMN cpu_pressure real NOT NULL DEFAULT 0;
