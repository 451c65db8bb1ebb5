"""Decode untrusted photos and spreadsheets in child processes without privileges.

Hostile files attack decoders, so no decoder runs in a process that has leases, connections or keys.
A child has limits on memory and CPU time, and cannot open files, sockets or processes. If it
crashes, only the file it decoded is refused.

- `client` starts the children and talks to them over a socket pair.
- `photo_child` decodes photos for one worker process, one at a time. Decoding takes 1 to 8 ms, a
  thousand times longer than checking a header, so only a random share of photos is decoded
  (`fetch.decode_share`), and every photo with a suspicious header.
- `sheet_child` decodes one spreadsheet and exits.
"""
