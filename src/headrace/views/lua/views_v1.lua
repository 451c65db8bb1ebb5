#!lua name=headrace_views_v1

-- Views of one shard. KEYS[1] of every function is the shard's stream, `<prefix>:{v:<shard>}:q`.
-- All keys of a shard share this prefix and therefore one hash slot:
--   q          stream; one entry per call, with the hits in field `v`, separated by commas
--   m          hash: `through` (recorded flush offset), `corrections` (highest known number of a
--              correction: a deletion or a move between classes), `applied` (all corrections up to
--              this number are applied here), `shards` (number of shards), `broken` (the stream
--              lost its end, and the cached totals are not dropped yet), `noted_from` and
--              `older_to` (see below)
--   c:<id>     total of an entity plus one, so that a key created by INCRBY differs from a total of
--              0; the text `x`: the entity is deleted
--   p, po      hashes: notes of the pending views of entities without a cached total
--   e:<id>!<e> an event id counted within the last 24 hours
--   u:<day>:<id>  viewers of a day, a HyperLogLog
--   t, tw      sets of `<day>:<id>` with changed viewers; `tw` is being stored in PostgreSQL
-- PostgreSQL can rebuild all of it except unflushed hits, event ids and viewers of the last three
-- days.
-- A hit is `id`, optionally followed by `*5` (five views), `/b` (class: b bot, o owner, s staff;
-- otherwise human), `+name` for each counter, `!event` and `=viewer`, in this order:
-- `ad:1*5/b+phone!e7=u9`. `*0` counts only counters.
-- The entry at the flush offset is never trimmed. It is the anchor: if it is missing, the stream
-- lost its end.
--
-- To cache a total, the human views that PostgreSQL has not counted are added to its total. Notes
-- count them, because a search of the stream stops all counting meanwhile. A note is the first
-- entry with views of the entity, and their number since then. The rule: of an entity without a
-- number in `c:<id>`, all human views in entries after `noted_from` are noted, and a note contains
-- all views since its first entry. So with an offset between `noted_from` and the first entry of
-- the note, the note is the answer; no note: 0. Other offsets need a search.
-- Whatever deletes a number must either leave the note UNKNOWN, or raise `noted_from` to the last
-- entry. Once all entries up to `older_to` are flushed, the notes of `po` are useless: they are
-- deleted together, `noted_from` rises to `older_to`, and `p` becomes `po`.

local EVENT_S, UNIQUE_S = 86400, 259200
local START, UNKNOWN = '0-1', '0-1 0'
local HIT = '^([^*/!=+]+)%*?(%d*)/?(%a?)([^!=]*)!?([^=]*)=?(.*)$'
local SCAN_ENTRIES, SCAN_BYTES, SCAN_STEP = 8192, 524288, 256
local PENDING_BYTES, PENDING_STEP = 524288, 64

-- Streams that were set up at PostgreSQL's offset since this server started or was promoted, with
-- that promotion. The server may have lost the end of the others. If its clock is behind, too, new
-- ids are below the offset, and a flush skips them. So only these streams are counted to.
-- The table is empty after a start, and on a replica that received a full copy. A primary that was
-- demoted and lacked nothing keeps it, also if it loses writes before it is promoted again.
local set_up_in = {}

local CLASSES = {[''] = true, h = true, b = true, o = true, s = true}
local NAME_MAX, VIEWS_MAX, HITS_MAX = 128, 1000000, 1000

-- Whether `text` is a valid id, event or viewer.
local function is_name(text)
  return #text <= NAME_MAX and string.find(text, '^[%w._:@~-]+$')
end

-- Whether `text` is empty or names of counters, each after a plus sign.
local function is_counters(text)
  return text == '' or #text <= 1056 and string.gsub(text, '%+%l[%l%d_]*', '') == ''
end

-- Parsed hits, or nil and the first invalid one.
local function read_hits(line)
  local hits = {}
  for text in string.gmatch(line, '[^,]+') do
    local id, n, class, counters, event, viewer = string.match(text, HIT)
    local views = n == '' and 1 or tonumber(n)
    if not id or not is_name(id) or views < 1 and counters == '' or views > VIEWS_MAX
        or not CLASSES[class] or not is_counters(counters)
        or event ~= '' and not is_name(event) or viewer ~= '' and not is_name(viewer) then
      return nil, text
    end
    hits[#hits + 1] = {
      id = id, n = views, mark = n ~= '' and '*' .. n or '',
      class = class, counters = counters, event = event, viewer = viewer,
    }
  end
  return hits
end

local function refused(text)
  local shown = string.gsub(string.sub(text, 1, 80), '%c', '?')
  return redis.error_reply('ERR views: nothing was counted, "' .. shown .. '" is not a hit:'
    .. ' expected id*views/class+counter!event=viewer,'
    .. ' names of 1 to 128 of A-Z a-z 0-9 . _ : @ ~ -')
end

local function too_many()
  return redis.error_reply('ERR views: nothing was counted, a call has at most ' .. HITS_MAX
    .. ' hits')
end

local function base_of(stream)
  return string.sub(stream, 1, -2)
end

local CRC = {}

-- Fill the table on first use: `bit` does not exist while a library is loading.
local function fill_crc()
  for i = 0, 255 do
    local c = i
    for _ = 1, 8 do
      c = c % 2 == 1 and bit.bxor(bit.rshift(c, 1), 0xEDB88320) or bit.rshift(c, 1)
      c = c % 4294967296
    end
    CRC[i] = c
  end
end

-- The CRC-32 of an id, as in zlib.
local function crc_of(id)
  if not CRC[0] then
    fill_crc()
  end
  local c = bit.bnot(0)
  for i = 1, #id do
    c = bit.bxor(bit.rshift(c, 8), CRC[bit.band(bit.bxor(c, string.byte(id, i)), 255)])
  end
  return bit.bnot(c) % 4294967296
end

-- Whether an id belongs to another shard. Only ids without a cached total need the check, because a
-- total is cached only in its own shard.
local function is_elsewhere(stream, id)
  local shards = redis.call('HGET', base_of(stream) .. 'm', 'shards')
  return shards and crc_of(id) % tonumber(shards) ~= tonumber(string.match(stream, '{v:(%d+)}'))
end

local function sent_elsewhere(id)
  return redis.error_reply('ERR views: nothing was counted, "' .. id
    .. '" is of another shard: use CRC-32 of the id modulo views.shards')
end

-- The total of a cached value; x: deleted, -: not cached.
local function total_of(kept)
  if not kept then
    return '-'
  end
  return kept == 'x' and 'x' or string.format('%.0f', tonumber(kept) - 1)
end

-- Raise a cached total. Return the new total, x or -.
local function raise(key, n)
  local kept = redis.pcall('INCRBY', key, n)
  if type(kept) == 'table' then
    return 'x'
  end
  if kept == n then
    redis.call('DEL', key)
    return '-'
  end
  return string.format('%.0f', kept - 1)
end

-- Whether entry id `one` is higher than `other`.
local function is_after(one, other)
  local ms, number = string.match(one, '(%d+)-(%d+)')
  local other_ms, other_number = string.match(other, '(%d+)-(%d+)')
  if ms == other_ms then
    return tonumber(number) > tonumber(other_number)
  end
  return tonumber(ms) > tonumber(other_ms)
end

-- The last entry of a stream; 0-1: none.
local function last_of(stream)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return last and last[1] or '0-1'
end

-- First entry and views of a note.
local function read_note(note)
  local first, views = string.match(note, '(%S+) (%d+)')
  return first, tonumber(views)
end

-- Note the human views that an entry adds to entities without a cached total.
local function note_views(base, entry, views)
  local ids, fields = {}, {}
  for id in pairs(views) do
    ids[#ids + 1] = id
  end
  if not ids[1] then
    return
  end
  local notes = redis.call('HMGET', base .. 'p', unpack(ids))
  for i, id in ipairs(ids) do
    local first, before = entry, 0
    if notes[i] then
      first, before = read_note(notes[i])
    end
    fields[2 * i - 1] = id
    fields[2 * i] = first .. string.format(' %.0f', before + views[id])
  end
  redis.call('HSET', base .. 'p', unpack(fields))
end

-- Whether the total of an entity is cached, and it is not deleted.
local function is_cached(base, id)
  local kept = redis.call('GET', base .. 'c:' .. id)
  return kept and kept ~= 'x'
end

-- Delete a cached total, whose pending views were not noted. Return 1 if there was one.
local function drop_total(base, id)
  redis.call('HSET', base .. 'p', id, UNKNOWN)
  return redis.call('DEL', base .. 'c:' .. id)
end

-- Delete the older notes if PostgreSQL has counted all their entries. Then the others become older.
local function drop_flushed_notes(stream, mark, through)
  local base, older_to = base_of(stream), redis.call('HGET', mark, 'older_to')
  if older_to and is_after(older_to, through) then
    return
  end
  if older_to then
    redis.call('UNLINK', base .. 'po')
    redis.call('HDEL', mark, 'older_to')
    local from = redis.call('HGET', mark, 'noted_from')
    if from and is_after(older_to, from) then
      redis.call('HSET', mark, 'noted_from', older_to)
    end
  end
  if redis.call('EXISTS', base .. 'p') == 1 then
    redis.call('RENAME', base .. 'p', base .. 'po')
    redis.call('HSET', mark, 'older_to', last_of(stream))
  end
end

-- What INFO reports of the append-only file and of replication.
local function read_info()
  return redis.call('INFO', 'persistence', 'replication')
end

-- The promotion since which this server is a primary: the replication id before it. It also changes
-- an hour after the last replica left; then streams are set up once more.
local function promotion_in(info)
  return string.match(info, 'master_replid2:(%x+)')
end

local function run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

-- The run id of this server if it may answer before it writes to its append-only file, else ''.
-- With appendfsync everysec Valkey does so while a background sync runs.
local function unwritten_on(info)
  return string.find(info, 'aof_pending_bio_fsync:[1-9]') and run_id() or ''
end

local function note_viewer(base, day, id, viewer)
  local key = base .. 'u:' .. day .. ':' .. id
  if redis.call('PFADD', key, viewer) == 1 then
    redis.call('EXPIRE', key, UNIQUE_S)
    redis.call('SADD', base .. 't', day .. ':' .. id)
    redis.call('EXPIRE', base .. 't', UNIQUE_S)
  end
end

-- Add an entry with an id above `floor`. Return its id; nil: there is no stream.
local function add_entry(stream, floor, line)
  local id = redis.call('XADD', stream, 'NOMKSTREAM', '*', 'v', line)
  if id and id < floor then
    redis.call('XDEL', stream, id)
    id = redis.call('XADD', stream, string.format('%.0f', tonumber(floor) + 1) .. '-*', 'v', line)
  end
  return id
end

-- Count hits with events, viewers, weights or classes.
local function hit_marked(stream, info, floor, offset_s, line)
  local base, kept = base_of(stream), {}
  local hits, bad = read_hits(line)
  if bad then
    return refused(bad)
  end
  if #hits > HITS_MAX then
    return too_many()
  end
  if redis.call('EXISTS', stream) == 0 then
    return {false, '', ''}
  end
  for _, hit in ipairs(hits) do
    if redis.call('EXISTS', base .. 'c:' .. hit.id) == 0 and is_elsewhere(stream, hit.id) then
      return sent_elsewhere(hit.id)
    end
  end
  for _, hit in ipairs(hits) do
    local event_key = base .. 'e:' .. hit.id .. '!' .. hit.event
    hit.counts = hit.event == ''
      or redis.call('SET', event_key, '', 'NX', 'EX', EVENT_S) and true
    if hit.counts then
      local class = hit.class ~= '' and '/' .. hit.class or ''
      kept[#kept + 1] = hit.id .. hit.mark .. class .. hit.counters
    end
  end
  local entry = ''
  if #kept > 0 then
    entry = add_entry(stream, floor, table.concat(kept, ','))
  end
  local totals, uncached = {}, {}
  for i, hit in ipairs(hits) do
    local key = base .. 'c:' .. hit.id
    if hit.counts and (hit.class == '' or hit.class == 'h') then
      totals[i] = raise(key, hit.n)
      if totals[i] == '-' or totals[i] == 'x' then
        uncached[hit.id] = (uncached[hit.id] or 0) + hit.n
      end
      if hit.viewer ~= '' and totals[i] ~= 'x' then
        local ms = tonumber(string.match(entry, '^%d+'))
        note_viewer(base, math.floor((ms / 1000 + offset_s) / 86400), hit.id, hit.viewer)
      end
    else
      totals[i] = total_of(redis.call('GET', key))
    end
  end
  note_views(base, entry, uncached)
  return {entry, table.concat(totals, ','), unwritten_on(info)}
end

-- Plain hits with their cached totals: distinct ids, their keys and values, and for each hit the
-- position of its id. With `error`: a hit is invalid or of another shard.
local function plain_hits(stream, line)
  if not string.find(line, '^[%w._:@~,-]+$') then
    return {error = refused(string.match(line, '[^,]*[^%w._:@~,-][^,]*') or line)}
  end
  local prefix, ids, keys = base_of(stream) .. 'c:', {}, {}
  local places, place_of, count = {}, {}, 0
  for id in string.gmatch(line, '[^,]+') do
    count = count + 1
    local place = place_of[id]
    if not place then
      if #id > NAME_MAX then
        return {error = refused(id)}
      end
      place = #keys + 1
      place_of[id], ids[place], keys[place] = place, id, prefix .. id
    end
    places[count] = place
  end
  if count == 0 or count > HITS_MAX then
    return {error = count == 0 and refused(line) or too_many()}
  end
  local kept = redis.call('MGET', unpack(keys))
  for id, place in pairs(place_of) do
    if not kept[place] and is_elsewhere(stream, id) then
      return {error = sent_elsewhere(id)}
    end
  end
  return {ids = ids, keys = keys, kept = kept, places = places}
end

-- Add one to the cached total of each hit of an entry. Return the totals, separated by commas.
local function raise_all(base, entry, plain)
  local kept, totals, changed, uncached = plain.kept, {}, {}, {}
  for i, place in ipairs(plain.places) do
    local total = kept[place]
    if not total or total == 'x' then
      local id = plain.ids[place]
      totals[i] = total or '-'
      uncached[id] = (uncached[id] or 0) + 1
    else
      -- The cached value is the total plus one, so it is the total after this hit.
      totals[i] = type(total) == 'string' and total or string.format('%.0f', total)
      kept[place] = total + 1
    end
  end
  for place, key in ipairs(plain.keys) do
    if type(kept[place]) == 'number' then
      changed[#changed + 1] = key
      changed[#changed + 1] = kept[place]
    end
  end
  if changed[1] then
    redis.call('MSET', unpack(changed))
  end
  note_views(base, entry, uncached)
  return table.concat(totals, ',')
end

-- headrace_views_hit_v1: count hits.
-- ARGV: hits; lowest milliseconds of the new entry's id (0: any); seconds by which the time zone of
-- days is ahead of UTC.
-- Reply: id of the new entry (nil: shard not set up since the server started, nothing counted;
-- empty: only known events);
-- the total of each hit, - (not cached) or x (deleted), separated by commas; empty, or the run id
-- of this server while the hits are not in its append-only file yet.
-- Error: a hit is invalid or belongs to another shard, or there are over 1,000 hits; nothing was
-- counted.
-- Cost of plain hits: one MGET, XADD, MSET and INFO; one INCRBY per hit takes more of this thread.
-- Cost of other hits: one XADD, one INFO, and one INCRBY per hit. Entities without a cached total:
-- one HMGET and HSET more.
local function hit(keys, args)
  local stream, line = keys[1], args[1]
  local floor, offset_s, info = args[2] or '0', tonumber(args[3] or '0'), read_info()
  if set_up_in[stream] ~= promotion_in(info) then
    return {false, '', ''}
  end
  if string.find(line, '[*/!=+]') then
    return hit_marked(stream, info, floor, offset_s, line)
  end
  local plain = plain_hits(stream, line)
  if plain.error then
    return plain.error
  end
  local entry = add_entry(stream, floor, line)
  if not entry then
    return {false, '', ''}
  end
  return {entry, raise_all(base_of(stream), entry, plain), unwritten_on(info)}
end

-- Add the human views of one entry to the entities in `found`.
local function add_views(found, line)
  for text in string.gmatch(line, '[^,]+') do
    local id, n, class = string.match(text, HIT)
    if found[id] and (class == '' or class == 'h') then
      found[id] = found[id] + (tonumber(n) or 1)
    end
  end
end

-- Add the human views in entries after `through` to the entities in `found`. Return whether all
-- were read; there may be too many.
local function search(stream, through, found)
  local from, entries_left, bytes_left, rows = through, SCAN_ENTRIES, SCAN_BYTES
  repeat
    rows = redis.call('XRANGE', stream, '(' .. from, '+', 'COUNT', SCAN_STEP)
    for _, row in ipairs(rows) do
      from = row[1]
      bytes_left = bytes_left - #row[2][2]
      add_views(found, row[2][2])
    end
    entries_left = entries_left - #rows
    if entries_left < 0 or bytes_left < 0 then
      return false
    end
  until #rows < SCAN_STEP
  return true
end

-- Human views of an entity after `through` by its notes; nil: unknown.
local function noted_after(through, newer, older)
  local total = 0
  for _, note in ipairs({newer, older}) do
    if note then
      local first, views = read_note(note)
      if not is_after(first, through) then
        return nil
      end
      total = total + views
    end
  end
  return total
end

-- Human views after `through` of entities without a cached total. Those that are not noted are
-- searched; entities are missing if there are too many entries.
local function pending_views(stream, mark, through, ids)
  local base, found, sought = base_of(stream), {}, {}
  local from = redis.call('HGET', mark, 'noted_from')
  if from and not is_after(from, through) then
    local newer = redis.call('HMGET', base .. 'p', unpack(ids))
    local older = redis.call('HMGET', base .. 'po', unpack(ids))
    for i, id in ipairs(ids) do
      found[id] = noted_after(through, newer[i], older[i])
    end
  end
  for _, id in ipairs(ids) do
    if not found[id] then
      sought[id] = 0
    end
  end
  if next(sought) and search(stream, through, sought) then
    for id, views in pairs(sought) do
      found[id] = views
    end
  end
  return found
end

-- headrace_views_fill_v1: cache totals of entities.
-- KEYS[2]: m. ARGV: offset and corrections of the snapshot; then id and total, alternating.
-- Reply: ok or retry (the snapshot is too old); with ok the totals including pending hits,
-- separated by commas: x (deleted), - (not cached: too many entries are pending to search).
-- Cost: one MGET, two HMGET, MSET, HDEL. For entities without a valid note also a search of all
-- pending entries.
local function fill(keys, args)
  local stream, mark, through, corrections = keys[1], keys[2], args[1], args[2]
  local base = base_of(stream)
  if tonumber(corrections) < tonumber(redis.call('HGET', mark, 'corrections') or '0')
      or not redis.call('XRANGE', stream, through, through)[1] then
    return {'retry', ''}
  end
  local ids, names, missing = {}, {}, {}
  for i = 3, #args, 2 do
    ids[#ids + 1], names[#names + 1] = args[i], base .. 'c:' .. args[i]
  end
  local kept = redis.call('MGET', unpack(names))
  for i, id in ipairs(ids) do
    if not kept[i] then
      missing[#missing + 1] = id
    end
  end
  local pending = missing[1] and pending_views(stream, mark, through, missing)
  local cached, filled, totals = {}, {}, {}
  for i, id in ipairs(ids) do
    if not kept[i] and pending[id] then
      kept[i] = string.format('%.0f', tonumber(args[2 * i + 2]) + pending[id] + 1)
      filled[#filled + 1], cached[#cached + 1], cached[#cached + 2] = id, names[i], kept[i]
    end
    totals[i] = total_of(kept[i])
  end
  if filled[1] then
    redis.call('MSET', unpack(cached))
    redis.call('HDEL', base .. 'p', unpack(filled))
  end
  return {'ok', table.concat(totals, ',')}
end

-- headrace_views_unflushed_v1: find entities whose total in PostgreSQL may lack hits. Read-only.
-- KEYS[2]: m. ARGV: ids without a cached total. Reply: the ids with a note or, meanwhile, a total;
-- all ids if entries that are not noted wait for their flush; none if no entry waits.
local function unflushed(keys, args)
  local base, through = base_of(keys[1]), redis.call('HGET', keys[2], 'through') or START
  if not is_after(last_of(keys[1]), through) then
    return {}
  end
  local from = redis.call('HGET', keys[2], 'noted_from')
  if from and is_after(from, through) then
    return args
  end
  local newer = redis.call('HMGET', base .. 'p', unpack(args))
  local older = redis.call('HMGET', base .. 'po', unpack(args))
  local found = {}
  for i, id in ipairs(args) do
    if newer[i] or older[i] or redis.call('EXISTS', base .. 'c:' .. id) == 1 then
      found[#found + 1] = id
    end
  end
  return found
end

-- Refuse snapshots with fewer corrections from here on.
local function note_corrections(mark, corrections)
  if tonumber(corrections) > tonumber(redis.call('HGET', mark, 'corrections') or '-1') then
    redis.call('HSET', mark, 'corrections', corrections)
  end
end

-- Move the end of the stream to the offset. Return the state that `init` replies.
local function anchor(stream, through)
  if redis.call('XRANGE', stream, through, through)[1] then
    return 'ok'
  end
  if type(redis.pcall('XADD', stream, through, 'a', '')) == 'string' then
    return 'raised'
  end
  if not redis.call('XRANGE', stream, '(' .. through, '+', 'COUNT', 1)[1] then
    redis.call('XADD', stream, '*', 'a', '')
  end
  return 'gap'
end

-- What changes with each start and promotion of this server.
local function start_of(info)
  return run_id() .. ' ' .. promotion_in(info)
end

-- headrace_views_start_v1: the start or promotion since which this server is a primary. Read-only.
local function start()
  return start_of(read_info())
end

-- headrace_views_init_v1: set up a shard at PostgreSQL's offset.
-- KEYS[2]: m. ARGV: offset, corrections, shards; the reply of headrace_views_start_v1 that was read
-- before the offset.
-- Reply: restarted (nothing was done: the offset may be too old for this start), ok (the entry at
-- the offset exists), raised (the stream ended before the offset; new ids are higher now) or gap
-- (the entry is missing, but later entries exist). Raised and gap are also stored in the field
-- `broken` of m and returned until it is deleted. An empty server stores none: it has no totals to
-- repair, so the next reply is ok.
local function init(keys, args)
  local stream, mark, through, info = keys[1], keys[2], args[1], read_info()
  if start_of(info) ~= args[4] then
    return 'restarted'
  end
  -- An empty server has no cached totals to drop; those of hits since then are right.
  local was_empty = redis.call('EXISTS', mark) == 0
  redis.call('HSET', mark, 'through', through, 'shards', args[3])
  redis.call('HSETNX', mark, 'noted_from', last_of(stream))
  redis.call('HSETNX', mark, 'applied', args[2])
  note_corrections(mark, args[2])
  set_up_in[stream] = promotion_in(info)
  local state = anchor(stream, through)
  if state ~= 'ok' and through ~= START and not was_empty then
    redis.call('HSET', mark, 'broken', state)
  end
  return redis.call('HGET', mark, 'broken') or state
end

-- headrace_views_pending_v1: read entries to flush. Read-only.
-- ARGV: offset; highest id, or +; maximum number of entries.
-- Reply: 1 if the entry at the offset exists and no repair is due, else 0; id of the last entry of
-- the stream, or empty; 1 if more entries may follow (the reply is also limited in bytes); then id
-- and hits, alternating.
local function pending(keys, args)
  local last = redis.call('XREVRANGE', keys[1], '+', '-', 'COUNT', 1)[1]
  local is_sound = set_up_in[keys[1]] == promotion_in(read_info())
    and not redis.call('HGET', base_of(keys[1]) .. 'm', 'broken')
  local reply = {0, last and last[1] or '', 1}
  local from, entries_left, bytes_left = args[1], args[3] + 1, PENDING_BYTES
  while entries_left > 0 and bytes_left > 0 do
    local step = math.min(entries_left, PENDING_STEP)
    local rows = redis.call('XRANGE', keys[1], from, args[2], 'COUNT', step)
    for _, row in ipairs(rows) do
      if row[1] == args[1] then
        reply[1] = is_sound and 1 or 0
      else
        reply[#reply + 1] = row[1]
        reply[#reply + 1] = row[2][2]
        bytes_left = bytes_left - #row[2][2]
      end
    end
    if #rows < step then
      reply[3] = 0
      break
    end
    entries_left, from = entries_left - step, '(' .. rows[#rows][1]
  end
  return reply
end

-- headrace_views_lag_v1: count entries to flush. Read-only.
-- ARGV: offset. Reply: number of entries after it, counted to about 10,000; milliseconds of the
-- first one's id (0: none).
local function lag(keys, args)
  local first_ms, count, from = 0, 0, args[1]
  repeat
    local rows = redis.call('XRANGE', keys[1], '(' .. from, '+', 'COUNT', 1000)
    if #rows > 0 then
      first_ms = count == 0 and tonumber(string.match(rows[1][1], '^%d+')) or first_ms
      count, from = count + #rows, rows[#rows][1]
    end
  until #rows < 1000 or count >= 10000
  return {count, first_ms}
end

-- headrace_views_flushed_v1: record PostgreSQL's offset, delete flushed notes and trim the stream.
-- KEYS[2]: m. ARGV: offset; an offset below which entries may be trimmed, or empty.
local function flushed(keys, args)
  redis.call('HSET', keys[2], 'through', args[1])
  drop_flushed_notes(keys[1], keys[2], args[1])
  if args[2] ~= '' then
    return redis.call('XTRIM', keys[1], 'MINID', '~', args[2])
  end
  return 0
end

-- Stop counting a deleted entity for some seconds, and drop its viewers.
local function mark_one_deleted(base, id, seconds)
  local today = math.floor(redis.call('TIME')[1] / 86400)
  if is_cached(base, id) then
    drop_total(base, id)
  end
  redis.call('SET', base .. 'c:' .. id, 'x', 'EX', seconds)
  for day = today - 4, today + 1 do
    redis.call('DEL', base .. 'u:' .. day .. ':' .. id)
  end
end

-- headrace_views_mark_deleted_v1: stop counting deleted entities whose mark is missing.
-- ARGV: seconds, ids.
local function mark_deleted(keys, args)
  for i = 2, #args do
    mark_one_deleted(base_of(keys[1]), args[i], args[1])
  end
  return #args - 1
end

-- headrace_views_correct_v1: apply successive deletions and moves between classes.
-- KEYS[2]: m. ARGV: number of the correction before the first; number of the last; seconds; then
-- id and 1 (deleted) or 0 (moved), alternating.
local function correct(keys, args)
  local base, mark = base_of(keys[1]), keys[2]
  note_corrections(mark, args[2])
  for i = 4, #args, 2 do
    if args[i + 1] == '1' then
      mark_one_deleted(base, args[i], args[3])
    elseif is_cached(base, args[i]) then
      drop_total(base, args[i])
    end
  end
  local applied = tonumber(redis.call('HGET', mark, 'applied') or '0')
  if tonumber(args[1]) <= applied and applied < tonumber(args[2]) then
    redis.call('HSET', mark, 'applied', args[2])
  end
  return 1
end

-- headrace_views_reset_corrections_v1: take PostgreSQL's number of corrections after all cached
-- totals were dropped.
-- KEYS[2]: m. ARGV: the highest number found here; the number in PostgreSQL.
local function reset_corrections(keys, args)
  if (redis.call('HGET', keys[2], 'corrections') or '0') == args[1] then
    redis.call('HSET', keys[2], 'corrections', args[2], 'applied', args[2])
  end
  return 1
end

-- headrace_views_idle_v1: find unused cached totals. Read-only.
-- ARGV: idle seconds, ids. Reply: id of the last entry; then id and value of each, alternating.
local function idle(keys, args)
  local base, reply = base_of(keys[1]), {last_of(keys[1])}
  for i = 2, #args do
    local name = base .. 'c:' .. args[i]
    local idle_s = redis.pcall('OBJECT', 'IDLETIME', name)
    if type(idle_s) == 'number' and idle_s >= tonumber(args[1]) then
      local kept = redis.call('GET', name)
      if kept ~= 'x' then
        reply[#reply + 1] = args[i]
        reply[#reply + 1] = kept
      end
    end
  end
  return reply
end

-- headrace_views_sweep_v1: delete cached totals that still have the value that was found unused.
-- ARGV: id and value, alternating. Reply: number of deleted totals.
local function sweep(keys, args)
  local base, removed = base_of(keys[1]), 0
  for i = 1, #args, 2 do
    if redis.call('GET', base .. 'c:' .. args[i]) == args[i + 1] then
      removed = removed + drop_total(base, args[i])
    end
  end
  return removed
end

-- headrace_views_drop_v1: delete cached totals and marks of deleted entities.
-- KEYS[2]: m. ARGV: ids. Reply: number of deleted keys.
local function drop(keys, args)
  local removed = 0
  for _, id in ipairs(args) do
    removed = removed + redis.call('UNLINK', base_of(keys[1]) .. 'c:' .. id)
  end
  redis.call('HSET', keys[2], 'noted_from', last_of(keys[1]))
  return removed
end

-- headrace_views_uniques_v1: read changed viewer counts.
-- ARGV: maximum number, then the `day:id` stored since the last call.
-- Reply: `day:id`, viewers and the sketch of each.
local function uniques(keys, args)
  local base, reply = base_of(keys[1]), {}
  for i = 2, #args do
    redis.call('SREM', base .. 'tw', args[i])
  end
  if redis.call('EXISTS', base .. 'tw') == 0 and redis.call('EXISTS', base .. 't') == 1 then
    redis.call('RENAME', base .. 't', base .. 'tw')
  end
  for _, name in ipairs(redis.call('SRANDMEMBER', base .. 'tw', args[1])) do
    reply[#reply + 1] = name
    reply[#reply + 1] = redis.call('PFCOUNT', base .. 'u:' .. name)
    reply[#reply + 1] = redis.call('GET', base .. 'u:' .. name) or ''
  end
  return reply
end

-- headrace_views_viewers_v1: viewers of a day so far.
-- ARGV: day since 1970, ids. Reply: a number per id; -1: no viewers.
-- Not read-only, because PFCOUNT caches its result in the key.
local function viewers(keys, args)
  local reply = {}
  for i = 2, #args do
    local key = base_of(keys[1]) .. 'u:' .. args[1] .. ':' .. args[i]
    reply[i - 1] = redis.call('EXISTS', key) == 1 and redis.call('PFCOUNT', key) or -1
  end
  return reply
end

local function register(name, callback, flag)
  redis.register_function{function_name = name, callback = callback, flags = {flag}}
end

register('headrace_views_hit_v1', hit)
register('headrace_views_fill_v1', fill)
register('headrace_views_unflushed_v1', unflushed, 'no-writes')
register('headrace_views_start_v1', start, 'no-writes')
register('headrace_views_init_v1', init, 'allow-oom')
register('headrace_views_pending_v1', pending, 'no-writes')
register('headrace_views_lag_v1', lag, 'no-writes')
register('headrace_views_flushed_v1', flushed, 'allow-oom')
register('headrace_views_mark_deleted_v1', mark_deleted, 'allow-oom')
register('headrace_views_correct_v1', correct, 'allow-oom')
register('headrace_views_reset_corrections_v1', reset_corrections, 'allow-oom')
register('headrace_views_idle_v1', idle, 'no-writes')
register('headrace_views_sweep_v1', sweep, 'allow-oom')
register('headrace_views_drop_v1', drop, 'allow-oom')
register('headrace_views_uniques_v1', uniques)
register('headrace_views_viewers_v1', viewers)
