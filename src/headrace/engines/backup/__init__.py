"""Backups of the embedded PostgreSQL: an archive in a folder or bucket, restore, and a standby.

Promises: a restore has every commit that was in the archive; the archiver writes all flushed log
every `backup.every`. Log is released by PostgreSQL only when it is archived, up to a limit, so an
archive that is down causes no gap and does not fill the disk. Damage is found by checksums and
named. One data folder at a time writes: a former primary stops.

Not included: objects (`blobs`), and Valkey, whose keys are rebuilt from PostgreSQL except for the
stated loss.

wal        positions, segments and parts of the log     archive   the layout and its holder
archiver   writes the log, keeps base backups           restore   a new folder, to a time
standby    follows, and is promoted                     state     what can be restored; rehearsal
base_backup  one base backup                            service   both for the HTTP API and console
"""
