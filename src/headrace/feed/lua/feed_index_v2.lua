#!lua name=headrace_feed_index_v2

-- The index of one shard of the feed. The last of KEYS is always `<prefix>:{f2:<shard>}:m`; all else of the shard has the
-- same beginning, and so the same hash slot:
--   m           hash: state (building, ready), token (of its rebuild), newest and oldest score, floor (no older score is
--               kept), fine (buckets of levels 0 and 1 are kept from it on), run (of the server on which it is known to have all),
--               returned (of the server on which it came back, once its lost changes are to be swept again), swept (the
--               last change that was swept)
--   o           set of authors with posts below the floor: a hint, as the buckets are
--   p:<author>  sorted set: ids of posts with their scores; besides, the empty id, whose score is minus the version
--   f:<viewer>  set of the followed authors of this shard that are to be seen
--   w:<n>       hash: versions of follow sets
--   b:<L>:<n>   set of authors that posted in bucket n of level L, where a bucket is 8^L * 65.536 s: a hint. It may hold
--               authors without a post there, and never lacks one. It holds the author 0, whom nobody is, where it is split:
--               the 8 buckets of the next finer level then lack no author either
--   s           set of buckets to be split, as `<L>:<n>`
-- Buckets of levels 3 to 6 exist always, those of levels 0 to 2 from `fine` on, all others below a split bucket alone. A split
-- bucket may be emptied: it holds 0 alone, and those below it have its authors.
-- A score is milliseconds * 2048 + tick, exact in a double. Where scores are equal the greater id, by bytes, is newer.

local FINEST_LEVEL, FINE_LEVELS, TOP_LEVEL, FIRST_WIDTH = -9, 2, 6, 134217728
-- A bucket of so many authors is split; a power of two.
local SPLIT_AT = 256
-- So many authors whose posts all have one moment show that splitting their bucket is of no use.
local SAMPLE = 1024
-- So many words that a sorted set too long for a listpack is seen to be so at its first ZADD: converted later, it takes 30 ms more.
local UNPACK_MAX, NOTED_BUCKETS_MAX = 7000, 512

-- The run of this server; kept where no data file is, so it is as old as the server.
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

-- The finest level of which all buckets exist at a score.
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

-- Mark a bucket as split. It is emptied where that saves memory and costs pages little: before `fine` at level 2, and below
-- level 0 where one of the finer buckets has most of its authors.
local function mark_split(key, level, is_chain)
  if level == FINE_LEVELS or level < 0 and is_chain then
    redis.call('DEL', key)
  end
  redis.call('SADD', key, '0')
end

-- Call `met` with the key of each bucket that is to have the author of a post at a score, but for those in `seen`: who posted
-- in a bucket posted in those around it. Return the finest of them, as `<L>:<n>`, where it is to be split.
local function each_bucket(base, score, fine, seen, met)
  local level = base_level(score, fine)
  local n = math.floor(score / WIDTHS[level])
  local key = bucket_key(base, level, n)
  if not seen[key] then
    -- Before `fine` a bucket of level 2 that is split is emptied.
    if level == FINE_LEVELS and is_split(key) then
      seen[key] = 'split'
    else
      seen[key] = met(key) == 0 and 'old' or 'new'
    end
    for around = level + 1, TOP_LEVEL do
      local wide = bucket_key(base, around, math.floor(score / WIDTHS[around]))
      if seen[wide] then
        break
      end
      seen[wide] = 'met'
      met(wide)
    end
  end
  while level > FINEST_LEVEL do
    if seen[key] == 'new' or seen[key] == 'old' then
      local authors = redis.call('SCARD', key)
      local is_new = seen[key] == 'new'
      seen[key] = authors >= SPLIT_AT and is_split(key) and 'split' or 'whole'
      -- One that could not be split is looked at again when it has twice as many.
      if seen[key] == 'whole' and is_new and authors >= SPLIT_AT and bit.band(authors, authors - 1) == 0 then
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
        seen[key] = met(key) == 0 and 'old' or 'new'
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

-- Add and remove posts: words from `first` on are score and id by turns; a score below 0 removes. Those below the floor are
-- left to PostgreSQL. Return 1 where buckets are to be split, else 0.
local function change_posts(meta_key, key, author, version, words, first)
  local base = base_of(meta_key)
  local meta = redis.call('HMGET', meta_key, 'newest', 'oldest', 'floor', 'fine')
  local newest, oldest, floor, fine = tonumber(meta[1]), tonumber(meta[2]), tonumber(meta[3]), tonumber(meta[4])
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

-- headrace_feed_change_posts_v2: the next change of an author's posts. KEYS p, m. ARGV: author, version, then score and id by
-- turns. Reply: unready; ok; old (was there already); gap (an earlier change is missing); the version there was; of ok also
-- whether buckets are to be split (1 or 0).
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

-- headrace_feed_put_posts_v2: an author's posts as a whole. KEYS, ARGV and reply as above; old: there is a later version.
local function put_posts(keys, args)
  if redis.call('EXISTS', keys[2]) == 0 then
    return {'unready', 0}
  end
  local has = version_of_posts(keys[1])
  if tonumber(args[2]) < has then
    return {'old', has}
  end
  redis.call('DEL', keys[1])
  redis.call('SREM', base_of(keys[2]) .. 'o', args[1])
  return {'ok', has, change_posts(keys[2], keys[1], args[1], args[2], args, 3)}
end

-- headrace_feed_put_posts_part_v2: the same for an author of many posts, in parts from the oldest on, each of which replaces all
-- from one score to another: no page lacks anything meanwhile. Until the last part the version is half a one less, so that
-- no change is the next one: whoever brings one then puts the whole. KEYS p, m. ARGV: author, version, both scores, 1 for the last
-- part; then score and id by turns. Reply as above; old: there is a later version, or an earlier part is gone.
local function put_posts_part(keys, args)
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

-- headrace_feed_split_v2: split one of the buckets that are to be: note its authors in the 8 finer ones. One whose authors all
-- posted at one moment stays whole. KEYS m. Reply: how many are left.
local function split(keys)
  local base = base_of(keys[1])
  local name = redis.call('EXISTS', keys[1]) == 1 and redis.call('SRANDMEMBER', base .. 's')
  if not name then
    return 0
  end
  local level, n = string.match(name, '^(.+):(.+)$')
  level, n = tonumber(level), tonumber(n)
  local key, first, finer = bucket_key(base, level, n), text_of(n * WIDTHS[level]), WIDTHS[level - 1]
  local last = text_of((n + 1) * WIDTHS[level] - 1)
  local parts, oldest, newest = {}, math.huge, 0
  if not is_split(key) then
    for i, author in ipairs(redis.call('SMEMBERS', key)) do
      if i > SAMPLE and oldest == newest then
        break
      end
      local top, known = last, nil
      while top do
        local rows = redis.call('ZRANGE', base .. 'p:' .. author, top, first, 'BYSCORE', 'REV', 'LIMIT', 0, 2, 'WITHSCORES')
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

-- headrace_feed_change_follows_v2: the next change of a viewer's follows, those of this shard. KEYS f, m. ARGV: viewer, version,
-- the n of its w, then score (below 0 removes) and author by turns. Reply: as for posts.
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

-- headrace_feed_put_follows_v2: a viewer's follows as a whole. KEYS, ARGV and reply as above; old: there is a later version.
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

-- headrace_feed_begin_v2: begin to build, where there is nothing, or what was begun on another run of the server and never
-- finished. KEYS m. ARGV: a token, floor, fine, the last change that was forgotten. Reply: state and token of what is there then.
local function begin(keys, args)
  local meta = redis.call('HMGET', keys[1], 'state', 'run')
  if not meta[1] or meta[1] == 'building' and meta[2] ~= run_of_server() then
    redis.call('DEL', keys[1])
    redis.call('HSET', keys[1], 'state', 'building', 'token', args[1], 'newest', '0', 'oldest', '9007199254740991',
      'floor', args[2], 'fine', args[3], 'run', run_of_server(), 'swept', args[4])
  end
  return redis.call('HMGET', keys[1], 'state', 'token')
end

-- headrace_feed_finish_v2: all was put. KEYS m. ARGV: the token. Reply: 1, or 0 where the index was lost since, in part or as
-- a whole.
local function finish(keys, args)
  local meta = redis.call('HMGET', keys[1], 'token', 'state', 'run')
  if meta[1] ~= args[1] or meta[2] == 'building' and meta[3] ~= run_of_server() then
    return 0
  end
  redis.call('HSET', keys[1], 'state', 'ready')
  return 1
end

-- headrace_feed_look_v2: how an index stands. Read-only. KEYS m. Reply: state, floor, fine, newest, oldest, run, returned and
-- swept as noted, the run of this server.
local function look(keys)
  local reply = redis.call('HMGET', keys[1], 'state', 'floor', 'fine', 'newest', 'oldest', 'run', 'returned', 'swept')
  reply[9] = run_of_server()
  return reply
end

-- headrace_feed_noted_v2: note something of a run, if it still is the server's. KEYS m. ARGV: the field, run or returned; the
-- run; the last change that was swept. Reply: 1, or 0 where it is another run, or there is no index.
local function noted(keys, args)
  if args[2] ~= run_of_server() or redis.call('EXISTS', keys[1]) == 0 then
    return 0
  end
  redis.call('HSET', keys[1], args[1], args[2], 'swept', args[3])
  return 1
end

-- headrace_feed_posts_v2: what the index has of an author, for the proof. Read-only. KEYS p, m. ARGV: author, from which score
-- on, so many at most. Reply: version, in how many buckets of these posts he is missing, then id and score of each by turns.
local function posts(keys, args)
  local base = base_of(keys[2])
  local meta = redis.call('HMGET', keys[2], 'floor', 'fine')
  local floor, fine = tonumber(meta[1] or '0'), tonumber(meta[2] or '0')
  local reply, unhinted, seen = {version_of_posts(keys[1]), 0}, 0, {}
  local function look(bucket)
    unhinted = unhinted + 1 - redis.call('SISMEMBER', bucket, args[1])
  end
  local from = text_of(math.max(floor, tonumber(args[2])))
  local rows = redis.call('ZRANGE', keys[1], from, '+inf', 'BYSCORE', 'LIMIT', 0, args[3], 'WITHSCORES')
  for i = 1, #rows, 2 do
    local score = tonumber(rows[i + 1])
    each_bucket(base, score, fine, seen, look)
    reply[#reply + 1], reply[#reply + 2] = rows[i], score
  end
  reply[2] = unhinted
  return reply
end

-- headrace_feed_follows_v2: what the index has of a viewer, for the proof. Read-only. KEYS f, m. ARGV: viewer, the n of its w.
-- Reply: version, then authors.
local function follows(keys, args)
  local reply = {version_of_follows(base_of(keys[2]), args[2], args[1])}
  for _, author in ipairs(redis.call('SMEMBERS', keys[1])) do
    reply[#reply + 1] = author
  end
  return reply
end

-- Note the authors of a bucket as having posts below the floor.
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

-- Note whose posts a floor that rises leaves below it: the authors of the buckets in between, or of coarser ones.
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

-- Remove a bucket and all below it; how many.
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

-- A bucket of a level above 0 that `fine` leaves behind: the finer ones are kept below one with many authors, which is split
-- then, and removed below others. Return how many were looked at.
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

-- headrace_feed_trim_v2: raise floor and fine, and remove buckets before them. KEYS m. ARGV: floor, fine (both where a bucket of
-- level 2 begins), buckets to remove at most. Reply: 1 if there is more to remove.
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
    local from = tonumber(redis.call('HGET', keys[1], done) or text_of(math.floor(tonumber(meta[4]) / WIDTHS[level])))
    local upto = math.floor(math.min(floor, fine) / WIDTHS[level])
    while from < upto and left > 0 do
      left = left - remove_bucket(base, level, from)
      from = from + 1
    end
    redis.call('HSET', keys[1], done, text_of(from))
  end
  return left > 0 and 0 or 1
end

-- headrace_feed_trim_posts_v2: remove an author's posts below the floor. KEYS p, m. Reply: how many.
local function trim_posts(keys)
  local floor = redis.call('HGET', keys[2], 'floor') or '0'
  return redis.call('ZREMRANGEBYSCORE', keys[1], '0', '(' .. floor)
end

-- Changes are made in a full memory, too: refused, what was deleted would go on being seen.
redis.register_function{function_name = 'headrace_feed_change_posts_v2', callback = change_posts_next, flags = {'allow-oom'}}
redis.register_function{function_name = 'headrace_feed_put_posts_v2', callback = put_posts, flags = {'allow-oom'}}
redis.register_function{function_name = 'headrace_feed_put_posts_part_v2', callback = put_posts_part, flags = {'allow-oom'}}
redis.register_function{function_name = 'headrace_feed_split_v2', callback = split, flags = {'allow-oom'}}
redis.register_function{function_name = 'headrace_feed_change_follows_v2', callback = change_follows_next, flags = {'allow-oom'}}
redis.register_function{function_name = 'headrace_feed_put_follows_v2', callback = put_follows, flags = {'allow-oom'}}
redis.register_function('headrace_feed_begin_v2', begin)
redis.register_function('headrace_feed_finish_v2', finish)
redis.register_function{function_name = 'headrace_feed_look_v2', callback = look, flags = {'no-writes'}}
redis.register_function{function_name = 'headrace_feed_noted_v2', callback = noted, flags = {'allow-oom'}}
redis.register_function{function_name = 'headrace_feed_posts_v2', callback = posts, flags = {'no-writes'}}
redis.register_function{function_name = 'headrace_feed_follows_v2', callback = follows, flags = {'no-writes'}}
redis.register_function{function_name = 'headrace_feed_trim_v2', callback = trim, flags = {'allow-oom'}}
redis.register_function{function_name = 'headrace_feed_trim_posts_v2', callback = trim_posts, flags = {'allow-oom'}}
