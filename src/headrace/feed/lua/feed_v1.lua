#!lua name=headrace_feed_v1

-- The index of one shard of the feed, and a page of it. The last of KEYS is always
-- `<prefix>:{f:<shard>}:m`. All keys of a shard share this prefix and therefore one hash slot:
--   m           hash: state (building, ready), token (of its build), newest and oldest score,
--               floor (lowest score kept), fine (levels 0 and 1 exist from this score on),
--               run (run id of the server on which it is known to be complete), recovering (run
--               id of the server on which its changes were marked for another sweep), swept (the
--               last swept change), epoch (of PostgreSQL, when the last build of it began)
--   o           set of authors with posts below the floor: a hint, like the buckets
--   p:<author>  sorted set: post ids with their scores, and the empty id, whose score is minus
--               the version. An id may be followed by the byte 31 and a kind, which sorts it like
--               the id alone
--   f:<viewer>  set of the visible followed authors; only in the shard of the viewer
--   w:<n>       hash: versions of follow sets
--   b:<L>:<n>   bucket n of level L, 8^L * 65.536 s wide: the set of authors that posted in it.
--               A hint: it lacks no author, but may have authors without a post there. The
--               author 0, which does not exist, marks a split bucket: its 8 buckets of the next
--               finer level lack no author
--   s           set of buckets to split, as `<L>:<n>`
-- Buckets of levels 3 to 6 always exist, levels 0 to 2 from `fine` on, others only below a split
-- bucket. A split bucket may be emptied: it holds only 0, and the buckets below it have its
-- authors. A score is milliseconds * 2048 + tick, exact in a double. Of equal scores the greater
-- id, by bytes, is newer.

local FINEST_LEVEL, FINE_LEVELS, TOP_LEVEL, FIRST_WIDTH = -9, 2, 6, 134217728
-- Number of authors at which a bucket is split; a power of two.
local SPLIT_AT = 256
-- If the posts of so many authors of a bucket have one time, splitting it is useless.
local SAMPLE = 1024
-- Words per command: enough that the first ZADD creates a large sorted set without a listpack.
local UNPACK_MAX, NOTED_BUCKETS_MAX = 7000, 512

-- The run id of this server. It is kept in memory only, so it never outlives the server.
local known_run

local function run_of_server()
  known_run = known_run or string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  return known_run
end

local WIDTHS = {}
for level = FINEST_LEVEL, TOP_LEVEL do
  WIDTHS[level] = FIRST_WIDTH * 8 ^ level
end

local function text_of(score)
  return string.format('%d', score)
end

local function base_of(meta)
  return string.sub(meta, 1, -2)
end

local function bucket_key(base, level, n)
  return base .. 'b:' .. level .. ':' .. text_of(n)
end

-- The finest level at which all buckets exist for a score.
local function base_level(score, fine)
  return score >= fine and 0 or FINE_LEVELS
end

local function is_split(key)
  return redis.call('SISMEMBER', key, '0') == 1
end

local function is_emptied(key)
  return redis.call('SCARD', key) == 1 and is_split(key)
end

-- Call a command with any number of words after its key.
local function call_many(command, key, words)
  for first = 1, #words, UNPACK_MAX do
    redis.call(command, key, unpack(words, first, math.min(#words, first + UNPACK_MAX - 1)))
  end
end

-- Mark a bucket as split. Empty it if that saves memory at little cost for pages: at level 2 before
-- `fine`, and below level 0 if one finer bucket has most of its authors.
local function mark_split(key, level, is_chain)
  if level == FINE_LEVELS or level < 0 and is_chain then
    redis.call('DEL', key)
  end
  redis.call('SADD', key, '0')
end

-- Call `visit` with the key of each bucket that must have the author of a post at a score, except
-- those in `seen`. An author in a bucket is also in the wider ones. Return the finest bucket as
-- `<L>:<n>` if it must be split.
local function each_bucket(base, score, fine, seen, visit)
  local level = base_level(score, fine)
  local n = math.floor(score / WIDTHS[level])
  local key = bucket_key(base, level, n)
  if not seen[key] then
    -- Before `fine` a split bucket of level 2 is empty.
    if level == FINE_LEVELS and is_split(key) then
      seen[key] = 'split'
    else
      seen[key] = visit(key) == 0 and 'old' or 'new'
    end
    for around = level + 1, TOP_LEVEL do
      local wide = bucket_key(base, around, math.floor(score / WIDTHS[around]))
      if seen[wide] then
        break
      end
      seen[wide] = 'visited'
      visit(wide)
    end
  end
  while level > FINEST_LEVEL do
    if seen[key] == 'new' or seen[key] == 'old' then
      local authors = redis.call('SCARD', key)
      local is_new = seen[key] == 'new'
      seen[key] = authors >= SPLIT_AT and is_split(key) and 'split' or 'whole'
      -- A bucket that could not be split is tried again at twice the size.
      local is_power_of_two = bit.band(authors, authors - 1) == 0
      if seen[key] == 'whole' and is_new and authors >= SPLIT_AT and is_power_of_two then
        return level .. ':' .. text_of(n)
      end
    end
    if seen[key] == 'whole' then
      return nil
    end
    level = level - 1
    n = math.floor(score / WIDTHS[level])
    key = bucket_key(base, level, n)
    if not seen[key] then
      if level < 0 and is_emptied(key) then
        seen[key] = 'split'
      else
        seen[key] = visit(key) == 0 and 'old' or 'new'
      end
    end
  end
end

local function version_of_posts(key)
  local score = redis.call('ZSCORE', key, '')
  return score and -tonumber(score) or 0
end

local function version_of_follows(base, slot, viewer)
  return tonumber(redis.call('HGET', base .. 'w:' .. slot, viewer) or '0')
end

-- Add and remove posts. `words` from `first` on: score and id, alternating; a negative score
-- removes. Posts below the floor are not added. Return 1 if buckets must be split, else 0.
local function change_posts(meta_key, key, author, version, words, first)
  local base = base_of(meta_key)
  local meta = redis.call('HMGET', meta_key, 'newest', 'oldest', 'floor', 'fine')
  local newest, oldest = tonumber(meta[1]), tonumber(meta[2])
  local floor, fine = tonumber(meta[3]), tonumber(meta[4])
  local added, removed, seen, crowded = {'-' .. version, ''}, {}, {}, {}
  local function mark(bucket)
    return redis.call('SADD', bucket, author)
  end
  for i = first, #words, 2 do
    local score = tonumber(words[i])
    if score < 0 then
      removed[#removed + 1] = words[i + 1]
    elseif score < floor then
      redis.call('SADD', base .. 'o', author)
    else
      added[#added + 1], added[#added + 2] = words[i], words[i + 1]
      newest, oldest = math.max(newest, score), math.min(oldest, score)
      crowded[#crowded + 1] = each_bucket(base, score, fine, seen, mark)
    end
  end
  call_many('ZREM', key, removed)
  call_many('ZADD', key, added)
  call_many('SADD', base .. 's', crowded)
  redis.call('HSET', meta_key, 'newest', text_of(newest), 'oldest', text_of(oldest))
  return #crowded > 0 and 1 or 0
end

-- headrace_feed_change_posts_v1: apply the next change of an author's posts.
-- KEYS: p, m. ARGV: author, version, then score and id, alternating.
-- Reply: unready, ok, old (already applied) or gap (an earlier change is missing); the previous
-- version; with ok also 1 if buckets must be split, else 0.
local function change_posts_next(keys, args)
  if redis.call('EXISTS', keys[2]) == 0 then
    return {'unready', 0}
  end
  local has, version = version_of_posts(keys[1]), tonumber(args[2])
  if version ~= has + 1 then
    return {version <= has and 'old' or 'gap', has}
  end
  return {'ok', has, change_posts(keys[2], keys[1], args[1], args[2], args, 3)}
end

-- headrace_feed_put_posts_v1: replace all posts of an author, in one part or several, oldest first.
-- Each part replaces one range of scores, so no page lacks a post meanwhile. Until the last part
-- the version is lower by 0.5, so that no change is the next one and its writer puts a snapshot.
-- KEYS: p, m. ARGV: author, version, both scores, 1 for the last part; then score and id,
-- alternating.
-- Reply as above; old: a later version is present, or an earlier part was lost.
local function put_posts(keys, args)
  if redis.call('EXISTS', keys[2]) == 0 then
    return {'unready', 0}
  end
  local has, version, is_first = version_of_posts(keys[1]), tonumber(args[2]), args[3] == '0'
  if version < has or not is_first and has < version - 0.5 then
    return {'old', has}
  end
  local noted = args[2]
  if args[5] ~= '1' and has < version then
    noted = string.format('%.1f', version - 0.5)
  end
  if is_first then
    redis.call('SREM', base_of(keys[2]) .. 'o', args[1])
  end
  redis.call('ZREMRANGEBYSCORE', keys[1], args[3], args[4])
  return {'ok', has, change_posts(keys[2], keys[1], args[1], noted, args, 6)}
end

-- headrace_feed_split_v1: split one crowded bucket: add its authors to the 8 finer ones.
-- A bucket whose posts all have one time is not split.
-- KEYS: m. Reply: number of buckets left to split.
local function split(keys)
  local base = base_of(keys[1])
  local name = redis.call('EXISTS', keys[1]) == 1 and redis.call('SRANDMEMBER', base .. 's')
  if not name then
    return 0
  end
  local level, n = string.match(name, '^(.+):(.+)$')
  level, n = tonumber(level), tonumber(n)
  local key, finer = bucket_key(base, level, n), WIDTHS[level - 1]
  local first = text_of(n * WIDTHS[level])
  local last = text_of((n + 1) * WIDTHS[level] - 1)
  local parts, oldest, newest = {}, math.huge, 0
  if not is_split(key) then
    for i, author in ipairs(redis.call('SMEMBERS', key)) do
      if i > SAMPLE and oldest == newest then
        break
      end
      local top, known = last, nil
      while top do
        local rows = redis.call('ZRANGE', base .. 'p:' .. author, top, first, 'BYSCORE', 'REV',
          'LIMIT', 0, 2, 'WITHSCORES')
        for at = 2, #rows, 2 do
          local score = tonumber(rows[at])
          local part = math.floor(score / finer)
          if part ~= known then
            known, parts[part] = part, parts[part] or {}
            table.insert(parts[part], author)
          end
          oldest, newest = math.min(oldest, score), math.max(newest, score)
        end
        top = #rows == 4 and text_of(known * finer - 1) or nil
      end
    end
  end
  if oldest < newest then
    local most = 0
    for part, authors in pairs(parts) do
      most = math.max(most, #authors)
      call_many('SADD', bucket_key(base, level - 1, part), authors)
      if #authors >= SPLIT_AT and level - 1 > FINEST_LEVEL then
        redis.call('SADD', base .. 's', level - 1 .. ':' .. text_of(part))
      end
    end
    mark_split(key, level, most > redis.call('SCARD', key) * 3 / 4)
  end
  redis.call('SREM', base .. 's', name)
  return redis.call('SCARD', base .. 's')
end

local function change_follows(base, key, viewer, slot, version, words, first)
  local added, removed = {}, {}
  for i = first, #words, 2 do
    local part = tonumber(words[i]) < 0 and removed or added
    part[#part + 1] = words[i + 1]
  end
  call_many('SREM', key, removed)
  call_many('SADD', key, added)
  redis.call('HSET', base .. 'w:' .. slot, viewer, version)
end

-- headrace_feed_change_follows_v1: apply the next change of a viewer's follows.
-- KEYS: f, m. ARGV: viewer, version, the n of its w, then score (negative removes) and author,
-- alternating. Reply: as for posts.
local function change_follows_next(keys, args)
  if redis.call('EXISTS', keys[2]) == 0 then
    return {'unready', 0}
  end
  local base = base_of(keys[2])
  local has, version = version_of_follows(base, args[3], args[1]), tonumber(args[2])
  if version ~= has + 1 then
    return {version <= has and 'old' or 'gap', has}
  end
  change_follows(base, keys[1], args[1], args[3], args[2], args, 4)
  return {'ok', has}
end

-- headrace_feed_put_follows_v1: replace all follows of a viewer.
-- KEYS, ARGV and reply as above; old: a later version is present.
local function put_follows(keys, args)
  if redis.call('EXISTS', keys[2]) == 0 then
    return {'unready', 0}
  end
  local base = base_of(keys[2])
  local has = version_of_follows(base, args[3], args[1])
  if tonumber(args[2]) < has then
    return {'old', has}
  end
  redis.call('DEL', keys[1])
  change_follows(base, keys[1], args[1], args[3], args[2], args, 4)
  return {'ok', has}
end

-- headrace_feed_begin_v1: start a build if there is no index, or an unfinished one of another run.
-- KEYS: m. ARGV: a token, floor, fine, the last purged change, the epoch. Reply: the current state
-- and token.
local function begin(keys, args)
  local meta = redis.call('HMGET', keys[1], 'state', 'run')
  if not meta[1] or meta[1] == 'building' and meta[2] ~= run_of_server() then
    redis.call('DEL', keys[1])
    redis.call('HSET', keys[1], 'state', 'building', 'token', args[1], 'newest', '0',
      'oldest', '9007199254740991', 'floor', args[2], 'fine', args[3],
      'run', run_of_server(), 'swept', args[4],
      'epoch', args[5])
  end
  return redis.call('HMGET', keys[1], 'state', 'token')
end

-- headrace_feed_finish_v1: mark the index as ready.
-- KEYS: m. ARGV: the token, the epoch. Reply: 1, or 0 if the index was lost since the start of the
-- build.
local function finish(keys, args)
  local meta = redis.call('HMGET', keys[1], 'token', 'state', 'run')
  if meta[1] ~= args[1] or meta[2] == 'building' and meta[3] ~= run_of_server() then
    return 0
  end
  redis.call('HSET', keys[1], 'state', 'ready', 'epoch', args[2])
  return 1
end

-- headrace_feed_status_v1: the state of the index. Read-only.
-- KEYS: m. Reply: its fields as named below, and the run id of this server.
local function status(keys)
  local reply = redis.call('HMGET', keys[1], 'state', 'floor', 'newest', 'run', 'recovering',
    'swept', 'epoch')
  reply[8] = run_of_server()
  return reply
end

-- headrace_feed_noted_v1: record a run id, if it is still this server's.
-- KEYS: m. ARGV: the field, run or recovering; the run id; the last swept change.
-- Reply: 1, or 0 if the server has another run id or no index.
local function noted(keys, args)
  if args[2] ~= run_of_server() or redis.call('EXISTS', keys[1]) == 0 then
    return 0
  end
  redis.call('HSET', keys[1], args[1], args[2], 'swept', args[3])
  return 1
end

-- headrace_feed_posts_v1: the indexed posts of an author, for verification. Read-only.
-- KEYS: p, m. ARGV: author, lowest score, maximum number.
-- Reply: version, number of buckets of these posts that lack the author, then id and score,
-- alternating.
local function posts(keys, args)
  local base = base_of(keys[2])
  local meta = redis.call('HMGET', keys[2], 'floor', 'fine')
  local floor, fine = tonumber(meta[1] or '0'), tonumber(meta[2] or '0')
  local reply, unhinted, seen = {version_of_posts(keys[1]), 0}, 0, {}
  local function check(bucket)
    unhinted = unhinted + 1 - redis.call('SISMEMBER', bucket, args[1])
  end
  local from = text_of(math.max(floor, tonumber(args[2])))
  local rows = redis.call('ZRANGE', keys[1], from, '+inf', 'BYSCORE',
    'LIMIT', 0, args[3], 'WITHSCORES')
  for i = 1, #rows, 2 do
    local score = tonumber(rows[i + 1])
    each_bucket(base, score, fine, seen, check)
    reply[#reply + 1], reply[#reply + 2] = rows[i], score
  end
  reply[2] = unhinted
  return reply
end

-- headrace_feed_follows_v1: the indexed follows of a viewer, for verification. Read-only.
-- KEYS: f, m. ARGV: viewer, the n of its w. Reply: version, then authors.
local function follows(keys, args)
  local reply = {version_of_follows(base_of(keys[2]), args[2], args[1])}
  for _, author in ipairs(redis.call('SMEMBERS', keys[1])) do
    reply[#reply + 1] = author
  end
  return reply
end

-- Record the authors of a bucket as having posts below the floor.
local function note_bucket(base, level, n)
  local key = bucket_key(base, level, n)
  if is_emptied(key) then
    for part = 8 * n, 8 * n + 7 do
      note_bucket(base, level - 1, part)
    end
  else
    call_many('SADD', base .. 'o', redis.call('SMEMBERS', key))
  end
end

-- Record the authors whose posts fall below a rising floor: those of the buckets in between, or of
-- coarser ones.
local function note_older(base, from, upto)
  local level = FINE_LEVELS
  while level < TOP_LEVEL and (upto - from) / WIDTHS[level] > NOTED_BUCKETS_MAX do
    level = level + 1
  end
  local width = WIDTHS[level]
  for n = math.floor(from / width), math.floor(upto / width) do
    note_bucket(base, level, n)
  end
end

-- Delete a bucket and all below it. Return how many.
local function remove_bucket(base, level, n)
  local key, removed = bucket_key(base, level, n), 1
  if level > FINEST_LEVEL and level <= FINE_LEVELS and is_split(key) then
    for part = 8 * n, 8 * n + 7 do
      removed = removed + remove_bucket(base, level - 1, part)
    end
  end
  redis.call('UNLINK', key)
  return removed
end

-- Handle a bucket above level 0 that `fine` passes: if it has many authors, split it and keep the
-- finer ones; otherwise delete them. Return how many were visited.
local function leave_behind(base, level, n)
  local key = bucket_key(base, level, n)
  local authors, looked = redis.call('SCARD', key), 1
  local is_kept = authors >= SPLIT_AT
  if is_kept then
    mark_split(key, level, false)
  elseif authors == 0 then
    return looked
  end
  for part = 8 * n, 8 * n + 7 do
    if level > 1 then
      looked = looked + leave_behind(base, level - 1, part)
    end
    if not is_kept then
      redis.call('UNLINK', bucket_key(base, level - 1, part))
    end
  end
  return looked
end

-- headrace_feed_trim_v1: raise floor and fine, and delete buckets before them.
-- KEYS: m. ARGV: floor, fine (both at the beginning of a level 2 bucket), maximum number of
-- buckets.
-- Reply: 1 if more remain, else 0.
local function trim(keys, args)
  local base, left = base_of(keys[1]), tonumber(args[3])
  local meta = redis.call('HMGET', keys[1], 'state', 'floor', 'fine', 'oldest', 'newest')
  if not meta[1] or tonumber(meta[5]) == 0 then
    return 0
  end
  local floor = math.max(tonumber(meta[2]), tonumber(args[1]))
  local fine, upto_fine = tonumber(meta[3]), math.max(floor, tonumber(args[2]))
  local width = WIDTHS[FINE_LEVELS]
  fine = math.max(fine, math.min(upto_fine, math.floor(tonumber(meta[4]) / width) * width))
  while fine < upto_fine and left > 0 do
    left = left - leave_behind(base, FINE_LEVELS, fine / width)
    fine = fine + width
  end
  redis.call('HSET', keys[1], 'floor', text_of(floor), 'fine', text_of(fine))
  local below = math.max(tonumber(meta[2]), tonumber(meta[4]))
  if floor > below then
    note_older(base, below, floor)
  end
  for level = FINE_LEVELS, TOP_LEVEL do
    local done = 'trimmed' .. level
    local from = tonumber(redis.call('HGET', keys[1], done)
      or text_of(math.floor(tonumber(meta[4]) / WIDTHS[level])))
    local upto = math.floor(math.min(floor, fine) / WIDTHS[level])
    while from < upto and left > 0 do
      left = left - remove_bucket(base, level, from)
      from = from + 1
    end
    redis.call('HSET', keys[1], done, text_of(from))
  end
  return left > 0 and 0 or 1
end

-- headrace_feed_trim_posts_v1: delete an author's posts below the floor.
-- KEYS: p, m. Reply: number of deleted posts.
local function trim_posts(keys)
  local floor = redis.call('HGET', keys[2], 'floor') or '0'
  return redis.call('ZREMRANGEBYSCORE', keys[1], '0', '(' .. floor)
end

-- Whether text a sorts before b by bytes. Lua's `<` depends on the server's locale.
local function is_before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return #a < #b
end

-- Posts are {score, id, author}.
local function is_newer(a, b)
  if a[1] ~= b[1] then
    return a[1] > b[1]
  end
  return is_before(b[2], a[2])
end

-- The rank, newest first, of an author's first post at score `top` below the id `tie`, or the rank
-- after all posts at that score.
local function rank_below(key, top_text, tie)
  local first = redis.call('ZCOUNT', key, '(' .. top_text, '+inf')
  local after = first + redis.call('ZCOUNT', key, top_text, top_text)
  while first < after do
    local middle = math.floor((first + after) / 2)
    if is_before(redis.call('ZRANGE', key, middle, middle, 'REV')[1], tie) then
      after = middle
    else
      first = middle + 1
    end
  end
  return first
end

-- Append to `found` up to `need` posts of an author, newest first: below (top, tie) with a tie,
-- else from top on, and not below low. Top and low are also passed as text, which many calls share.
local function add_older(found, key, author, top, tie, low, need, top_text, low_text)
  local limit, skipped = tie and need + 1 or need, 0
  local rows = redis.call('ZRANGE', key, top_text, low_text, 'BYSCORE', 'REV',
    'LIMIT', 0, limit, 'WITHSCORES')
  if tie then
    while rows[2 * skipped + 1] and tonumber(rows[2 * skipped + 2]) == top
        and not is_before(rows[2 * skipped + 1], tie) do
      skipped = skipped + 1
    end
    if skipped > 1 and #rows == 2 * limit then
      local first = rank_below(key, top_text, tie)
      rows, skipped = redis.call('ZRANGE', key, first, first + need - 1, 'REV', 'WITHSCORES'), 0
    end
  end
  for i = 2 * skipped + 1, math.min(#rows, 2 * (skipped + need)), 2 do
    local score = tonumber(rows[i + 1])
    if score < low then
      return
    end
    found[#found + 1] = {score, rows[i], author}
  end
end

-- The newest `need` posts of some authors in a span. First read a few of each. The last of the best
-- `need` is the limit, and authors whose few posts were all above it are read again down to it.
local function newest_of(base, authors, top, tie, low, need)
  local prefix, found, last = base .. 'p:', {}, {}
  local few = math.max(#authors > 3 * need and 1 or 2, math.floor(2 * need / #authors))
  local top_text, low_text = text_of(top), text_of(low)
  for i, author in ipairs(authors) do
    local before = #found
    add_older(found, prefix .. author, author, top, tie, low, few, top_text, low_text)
    last[i] = #found - before == few and few < need and found[#found]
  end
  table.sort(found, is_newer)
  local least, stop = found[need], low
  if least then
    stop = least[1]
    for i = #found, need + 1, -1 do
      found[i] = nil
    end
  end
  local first, stop_text = #found, text_of(stop)
  for i, author in ipairs(authors) do
    local post = last[i]
    if post and (not least or is_newer(post, least)) then
      add_older(found, prefix .. author, author, post[1], post[2], stop, need - few,
        text_of(post[1]), stop_text)
    end
  end
  if #found > first then
    table.sort(found, is_newer)
  end
  return found
end

-- Build a page: intersect the follows with one bucket after another, newest first. If a bucket has
-- many followed authors and is split, use a finer one, so that few authors are read per bucket.
local function page_of_buckets(base, follows, count, top, tie, low, fine, need)
  local found, cap = {}, need + 16
  local level = count >= 1000 and 2 or 3
  while top >= low and #found < need do
    local width = WIDTHS[level]
    local n, lowest = math.floor(top / width), base_level(top, fine)
    local key = bucket_key(base, level, n)
    local met = redis.call('SINTERCARD', 2, follows, key, 'LIMIT', cap + 1)
    local is_empty = met == 0 and level <= lowest and is_emptied(key)
    local is_crowded = met > cap and level > FINEST_LEVEL
    if is_empty or is_crowded and (level > lowest or is_split(key)) then
      level = level - 1
    else
      local start, part = math.max(n * width, low), {}
      if met > 0 then
        local authors = redis.call('SINTER', follows, key)
        part = newest_of(base, authors, top, tie, start, need - #found)
        for i = 1, math.min(#part, need - #found) do
          found[#found + 1] = part[i]
        end
      end
      top, tie = start - 1, nil
      if #part < need / 4 and level < TOP_LEVEL then
        level = level + 1
      end
      -- The next bucket may not be split as finely as this one.
      lowest = base_level(top, fine)
      while level < lowest and start % WIDTHS[level + 1] == 0 do
        level = level + 1
      end
    end
  end
  return found
end

-- The floor to return; 0: no followed author has older posts. Not checked for a full page.
local function floor_of_page(base, follows, floor, is_full)
  if floor == 0 or is_full
      or redis.call('SINTERCARD', 2, follows, base .. 'o', 'LIMIT', 1) > 0 then
    return text_of(floor)
  end
  return '0'
end

-- headrace_feed_page_v1: the newest posts of a viewer's authors. Read-only.
-- KEYS: f, m. ARGV: maximum number; score and id to start below (empty: from the newest); score
-- and id to end above (empty: no end).
-- Reply: nil if the index is not ready, or may lack changes after a restart; else its floor (0:
-- nothing is older), then id, score and author of each post, newest first.
-- Cost: a few calls per bucket, and one or two per author found in it; independent of the follows.
local function page(keys, args)
  local meta = redis.call('HMGET', keys[2], 'state', 'newest', 'oldest', 'floor', 'fine', 'run')
  if meta[1] ~= 'ready' or meta[6] ~= run_of_server() then
    return false
  end
  local base, need, top, tie = base_of(keys[2]), tonumber(args[1]), tonumber(args[2]), args[3]
  local end_score, end_id = tonumber(args[4]), args[5]
  local floor = tonumber(meta[4])
  if not top then
    top, tie = tonumber(meta[2]), nil
  end
  top = math.min(top, tonumber(meta[2]))
  if args[2] ~= '' and top < tonumber(args[2]) then
    tie = nil
  end
  local low, found = math.max(floor, tonumber(meta[3]), end_score or 0), {}
  local count = redis.call('SCARD', keys[1])
  if count > 0 and top >= low then
    found = page_of_buckets(base, keys[1], count, top, tie, low, tonumber(meta[5]), need)
  end
  local is_full = #found >= need or (end_score or 0) >= floor
  local reply = {floor_of_page(base, keys[1], floor, is_full)}
  for i = 1, math.min(need, #found) do
    local post = found[i]
    if post[1] == end_score and not is_before(end_id, string.match(post[2], '^[^\31]*')) then
      break
    end
    local at = #reply
    reply[at + 1], reply[at + 2], reply[at + 3] = post[2], post[1], post[3]
  end
  return reply
end

local function register(name, callback, flag)
  redis.register_function{function_name = name, callback = callback, flags = {flag}}
end

-- allow-oom: a change refused for lack of memory would leave deleted posts visible.
register('headrace_feed_change_posts_v1', change_posts_next, 'allow-oom')
register('headrace_feed_put_posts_v1', put_posts, 'allow-oom')
register('headrace_feed_split_v1', split, 'allow-oom')
register('headrace_feed_change_follows_v1', change_follows_next, 'allow-oom')
register('headrace_feed_put_follows_v1', put_follows, 'allow-oom')
register('headrace_feed_begin_v1', begin)
register('headrace_feed_finish_v1', finish)
register('headrace_feed_status_v1', status, 'no-writes')
register('headrace_feed_noted_v1', noted, 'allow-oom')
register('headrace_feed_posts_v1', posts, 'no-writes')
register('headrace_feed_follows_v1', follows, 'no-writes')
register('headrace_feed_trim_v1', trim, 'allow-oom')
register('headrace_feed_trim_posts_v1', trim_posts, 'allow-oom')
register('headrace_feed_page_v1', page, 'no-writes')
