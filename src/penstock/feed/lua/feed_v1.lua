#!lua name=penstock_feed_v1

-- The index of one shard of the feed. The last of KEYS is always `<prefix>:{f:<shard>}:m`; all else of the shard has the
-- same beginning, and so the same hash slot:
--   m           hash: state (building, ready), token (of its rebuild), newest and oldest score, floor (no older score is
--               kept), fine (no bucket of levels 0 and 1 before it), run (of the server on which it is known to have all),
--               returned (of the server on which it came back, once its lost changes are to be swept again), swept (the
--               last change that was swept)
--   o           set of authors with posts below the floor: a hint, as the buckets are
--   p:<author>  sorted set: ids of posts with their scores; besides, the empty id, whose score is minus the version
--   f:<viewer>  set of the followed authors of this shard that are to be seen
--   w:<n>       hash: versions of follow sets
--   b:<L>:<n>   set of authors that posted in bucket n of level L, where a bucket is 8^L * 65.536 s: a hint. It may hold
--               authors without a post there, and never lacks one
-- A score is milliseconds * 2048 + tick, exact in a double. Where scores are equal the greater id, by bytes, is newer.

local FINE_LEVELS, TOP_LEVEL, FIRST_WIDTH = 2, 6, 134217728
-- So many words that a sorted set too long for a listpack is seen to be so at its first ZADD: converted later, it takes 30 ms more.
local UNPACK_MAX, NOTED_BUCKETS_MAX = 7000, 512

-- The run of this server; kept where no data file is, so it is as old as the server.
local known_run

local function run_of_server()
  known_run = known_run or string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  return known_run
end

local WIDTHS = {}
for level = 0, TOP_LEVEL do
  WIDTHS[level] = FIRST_WIDTH * 8 ^ level
end

local function width_of(level)
  return WIDTHS[level]
end

local function text_of(score)
  return string.format('%d', score)
end

local function base_of(meta)
  return string.sub(meta, 1, -2)
end

-- Whether text a comes before b by bytes; Lua's own < asks the server's locale.
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

-- Call a command with any number of words after its key.
local function call_many(command, key, words)
  for first = 1, #words, UNPACK_MAX do
    redis.call(command, key, unpack(words, first, math.min(#words, first + UNPACK_MAX - 1)))
  end
end

-- Append to `found` up to `need` posts of an author, newest first: before (top, tie), where a tie is given, else from top on,
-- and not below low. Both as text, too, since many authors are asked with the same.
local function add_older(found, key, author, top, tie, need, top_text, low_text)
  local offset, left = 0, need
  while left > 0 do
    local rows = redis.call('ZRANGE', key, top_text, low_text, 'BYSCORE', 'REV', 'LIMIT', offset, left, 'WITHSCORES')
    offset = offset + left
    local asked = left
    for i = 1, #rows, 2 do
      local score = tonumber(rows[i + 1])
      if not tie or score < top or is_before(rows[i], tie) then
        found[#found + 1] = {score, rows[i], author}
        left = left - 1
      end
    end
    if #rows < 2 * asked or not tie then
      return
    end
  end
end

-- The newest `need` posts of some authors in a span: a few of each, two at least, since an author who has one there need then not
-- be asked again; the last of the best of these is where to stop, and those whose few were all better are asked for more.
local function newest_of(base, authors, top, tie, low, need)
  local prefix, found, asked, last = base .. 'p:', {}, math.max(2, math.floor(2 * need / #authors)), {}
  local top_text, low_text = text_of(top), text_of(low)
  for i, author in ipairs(authors) do
    local before = #found
    add_older(found, prefix .. author, author, top, tie, asked, top_text, low_text)
    last[i] = #found - before == asked and asked < need and found[#found]
  end
  table.sort(found, is_newer)
  local least, stop = found[need], low_text
  if least then
    stop = text_of(least[1])
    for i = #found, need + 1, -1 do
      found[i] = nil
    end
  end
  local first = #found
  for i, author in ipairs(authors) do
    local post = last[i]
    if post and (not least or is_newer(post, least)) then
      add_older(found, prefix .. author, author, post[1], post[2], need - asked, text_of(post[1]), stop)
    end
  end
  if #found > first then
    table.sort(found, is_newer)
  end
  return found
end

-- A page: the followed among the authors of one bucket after another, from the top down.
local function page_of_buckets(base, follows, count, top, tie, low, fine, need)
  local found, cap = {}, need + 16
  local level = count >= 1000 and 2 or 3
  while top >= low and #found < need do
    local lowest = top >= fine and 0 or FINE_LEVELS
    level = math.max(level, lowest)
    local width = width_of(level)
    local bucket = math.floor(top / width)
    local key = base .. 'b:' .. level .. ':' .. text_of(bucket)
    local met = redis.call('SINTERCARD', 2, follows, key, 'LIMIT', cap + 1)
    if met > cap and level > lowest then
      level = level - 1
    else
      local start, part = math.max(bucket * width, low), {}
      if met > 0 then
        part = newest_of(base, redis.call('SINTER', follows, key), top, tie, start, need - #found)
        for i = 1, math.min(#part, need - #found) do
          found[#found + 1] = part[i]
        end
      end
      if #part < need / 4 and level < TOP_LEVEL then
        level = level + 1
      end
      top, tie = start - 1, nil
    end
  end
  return found
end

-- Up to where a page is to go on in PostgreSQL; 0: no followed author has a post below the floor. A full page needs not know.
local function floor_to_tell(base, follows, floor, is_full)
  if floor == 0 or is_full or redis.call('SINTERCARD', 2, follows, base .. 'o', 'LIMIT', 1) > 0 then
    return text_of(floor)
  end
  return '0'
end

-- penstock_feed_page_v1: the newest posts of a viewer's authors. Read-only. KEYS f, m. ARGV: how many; score and id of the
-- post after which to go on (empty: from the newest); score and id of the post that ends it (empty: none). Reply: nil where the
-- index is not ready, or came back with its server and may lack what was changed last; else its floor (0: nothing is older),
-- then id, score and author of each, newest first. Costs a few calls a bucket, and one or two for each author found in it: a page
-- has about so many, however many are followed.
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
  local reply = {floor_to_tell(base, keys[1], floor, #found >= need or (end_score or 0) >= floor)}
  for i = 1, math.min(need, #found) do
    local post = found[i]
    if post[1] == end_score and not is_before(end_id, post[2]) then
      break
    end
    local at = #reply
    reply[at + 1], reply[at + 2], reply[at + 3] = post[2], post[1], post[3]
  end
  return reply
end

-- Call `met` with the key of each bucket of a score that is not in `seen` yet. Who posted in a bucket posted in those around it.
local function each_bucket(base, score, fine, seen, met)
  for level = score >= fine and 0 or FINE_LEVELS, TOP_LEVEL do
    local n, known = math.floor(score / WIDTHS[level]), seen[level]
    if known[n] then
      return
    end
    known[n] = true
    met(base .. 'b:' .. level .. ':' .. text_of(n))
  end
end

local function none_seen()
  local seen = {}
  for level = 0, TOP_LEVEL do
    seen[level] = {}
  end
  return seen
end

local function version_of_posts(key)
  local score = redis.call('ZSCORE', key, '')
  return score and -tonumber(score) or 0
end

local function version_of_follows(base, slot, viewer)
  return tonumber(redis.call('HGET', base .. 'w:' .. slot, viewer) or '0')
end

-- Add and remove posts: words from `first` on are score and id by turns; a score below 0 removes. Those below the floor are
-- left to PostgreSQL.
local function change_posts(meta_key, key, author, version, words, first)
  local base = base_of(meta_key)
  local meta = redis.call('HMGET', meta_key, 'newest', 'oldest', 'floor', 'fine')
  local newest, oldest, floor, fine = tonumber(meta[1]), tonumber(meta[2]), tonumber(meta[3]), tonumber(meta[4])
  local added, removed, seen = {'-' .. version, ''}, {}, none_seen()
  local function mark(bucket)
    redis.call('SADD', bucket, author)
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
      each_bucket(base, score, fine, seen, mark)
    end
  end
  call_many('ZREM', key, removed)
  call_many('ZADD', key, added)
  redis.call('HSET', meta_key, 'newest', text_of(newest), 'oldest', text_of(oldest))
end

-- penstock_feed_change_posts_v1: the next change of an author's posts. KEYS p, m. ARGV: author, version, then score and id by
-- turns. Reply: unready; ok; old (was there already); gap (an earlier change is missing); and the version there was.
local function change_posts_next(keys, args)
  if redis.call('EXISTS', keys[2]) == 0 then
    return {'unready', 0}
  end
  local has, version = version_of_posts(keys[1]), tonumber(args[2])
  if version ~= has + 1 then
    return {version <= has and 'old' or 'gap', has}
  end
  change_posts(keys[2], keys[1], args[1], args[2], args, 3)
  return {'ok', has}
end

-- penstock_feed_put_posts_v1: an author's posts as a whole. KEYS, ARGV and reply as above; old: there is a later version.
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
  change_posts(keys[2], keys[1], args[1], args[2], args, 3)
  return {'ok', has}
end

-- penstock_feed_put_posts_part_v1: the same for an author of many posts, in parts from the oldest on, each of which replaces all
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
  change_posts(keys[2], keys[1], args[1], noted, args, 6)
  return {'ok', has}
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

-- penstock_feed_change_follows_v1: the next change of a viewer's follows, those of this shard. KEYS f, m. ARGV: viewer, version,
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

-- penstock_feed_put_follows_v1: a viewer's follows as a whole. KEYS, ARGV and reply as above; old: there is a later version.
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

-- penstock_feed_begin_v1: begin to build, where there is nothing, or what was begun on another run of the server and never
-- finished. KEYS m. ARGV: a token, floor, fine, the last change that was forgotten. Reply: state and token of what is there then.
local function begin(keys, args)
  local meta = redis.call('HMGET', keys[1], 'state', 'run')
  if not meta[1] or meta[1] == 'building' and meta[2] ~= run_of_server() then
    redis.call('DEL', keys[1])
    redis.call('HSET', keys[1], 'state', 'building', 'token', args[1], 'newest', '0', 'oldest', '9007199254740991',
      'floor', args[2], 'fine', args[3], 'run', run_of_server(), 'swept', args[4])
    for level = 0, FINE_LEVELS - 1 do
      redis.call('HSET', keys[1], 'trimmed' .. level, text_of(math.floor(tonumber(args[3]) / width_of(level))))
    end
  end
  return redis.call('HMGET', keys[1], 'state', 'token')
end

-- penstock_feed_finish_v1: all was put. KEYS m. ARGV: the token. Reply: 1, or 0 where the index was lost since, in part or as
-- a whole.
local function finish(keys, args)
  local meta = redis.call('HMGET', keys[1], 'token', 'state', 'run')
  if meta[1] ~= args[1] or meta[2] == 'building' and meta[3] ~= run_of_server() then
    return 0
  end
  redis.call('HSET', keys[1], 'state', 'ready')
  return 1
end

-- penstock_feed_look_v1: how an index stands. Read-only. KEYS m. Reply: state, floor, fine, newest, oldest, run, returned and
-- swept as noted, the run of this server.
local function look(keys)
  local reply = redis.call('HMGET', keys[1], 'state', 'floor', 'fine', 'newest', 'oldest', 'run', 'returned', 'swept')
  reply[9] = run_of_server()
  return reply
end

-- penstock_feed_noted_v1: note something of a run, if it still is the server's. KEYS m. ARGV: the field, run or returned; the
-- run; the last change that was swept. Reply: 1, or 0 where it is another run, or there is no index.
local function noted(keys, args)
  if args[2] ~= run_of_server() or redis.call('EXISTS', keys[1]) == 0 then
    return 0
  end
  redis.call('HSET', keys[1], args[1], args[2], 'swept', args[3])
  return 1
end

-- penstock_feed_posts_v1: what the index has of an author, for the proof. Read-only. KEYS p, m. ARGV: author, from which score
-- on, so many at most. Reply: version, in how many buckets of these posts he is missing, then id and score of each by turns.
local function posts(keys, args)
  local base = base_of(keys[2])
  local meta = redis.call('HMGET', keys[2], 'floor', 'fine')
  local floor, fine = tonumber(meta[1] or '0'), tonumber(meta[2] or '0')
  local reply, unhinted, seen = {version_of_posts(keys[1]), 0}, 0, none_seen()
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

-- penstock_feed_follows_v1: what the index has of a viewer, for the proof. Read-only. KEYS f, m. ARGV: viewer, the n of its w.
-- Reply: version, then authors.
local function follows(keys, args)
  local reply = {version_of_follows(base_of(keys[2]), args[2], args[1])}
  for _, author in ipairs(redis.call('SMEMBERS', keys[1])) do
    reply[#reply + 1] = author
  end
  return reply
end

-- Note whose posts a floor that rises leaves below it: the authors of the buckets in between, or of coarser ones.
local function note_older(base, from, upto)
  local level = FINE_LEVELS
  while level < TOP_LEVEL and (upto - from) / width_of(level) > NOTED_BUCKETS_MAX do
    level = level + 1
  end
  local width = width_of(level)
  for n = math.floor(from / width), math.floor(upto / width) do
    call_many('SADD', base .. 'o', redis.call('SMEMBERS', base .. 'b:' .. level .. ':' .. text_of(n)))
  end
end

-- penstock_feed_trim_v1: raise floor and fine, and remove buckets before them. KEYS m. ARGV: floor, fine (both where a bucket of
-- level 1 begins), buckets to remove at most. Reply: 1 if there is more to remove.
local function trim(keys, args)
  local base, left = base_of(keys[1]), tonumber(args[3])
  local meta = redis.call('HMGET', keys[1], 'state', 'floor', 'fine', 'oldest', 'newest')
  if not meta[1] or tonumber(meta[5]) == 0 then
    return 0
  end
  local floor, fine = math.max(tonumber(meta[2]), tonumber(args[1])), math.max(tonumber(meta[3]), tonumber(args[2]))
  redis.call('HSET', keys[1], 'floor', text_of(floor), 'fine', text_of(fine))
  local below = math.max(tonumber(meta[2]), tonumber(meta[4]))
  if floor > below then
    note_older(base, below, floor)
  end
  for level = 0, TOP_LEVEL do
    local width, done = width_of(level), 'trimmed' .. level
    local from = tonumber(redis.call('HGET', keys[1], done) or text_of(math.floor(tonumber(meta[4]) / width)))
    local upto = math.floor((level < FINE_LEVELS and math.max(floor, fine) or floor) / width)
    while from < upto and left > 0 do
      redis.call('UNLINK', base .. 'b:' .. level .. ':' .. text_of(from))
      from, left = from + 1, left - 1
    end
    redis.call('HSET', keys[1], done, text_of(from))
  end
  return left > 0 and 0 or 1
end

-- penstock_feed_trim_posts_v1: remove an author's posts below the floor. KEYS p, m. Reply: how many.
local function trim_posts(keys)
  local floor = redis.call('HGET', keys[2], 'floor') or '0'
  return redis.call('ZREMRANGEBYSCORE', keys[1], '0', '(' .. floor)
end

-- Changes are made in a full memory, too: refused, what was deleted would go on being seen.
redis.register_function{function_name = 'penstock_feed_page_v1', callback = page, flags = {'no-writes'}}
redis.register_function{function_name = 'penstock_feed_change_posts_v1', callback = change_posts_next, flags = {'allow-oom'}}
redis.register_function{function_name = 'penstock_feed_put_posts_v1', callback = put_posts, flags = {'allow-oom'}}
redis.register_function{function_name = 'penstock_feed_put_posts_part_v1', callback = put_posts_part, flags = {'allow-oom'}}
redis.register_function{function_name = 'penstock_feed_change_follows_v1', callback = change_follows_next, flags = {'allow-oom'}}
redis.register_function{function_name = 'penstock_feed_put_follows_v1', callback = put_follows, flags = {'allow-oom'}}
redis.register_function('penstock_feed_begin_v1', begin)
redis.register_function('penstock_feed_finish_v1', finish)
redis.register_function{function_name = 'penstock_feed_look_v1', callback = look, flags = {'no-writes'}}
redis.register_function{function_name = 'penstock_feed_noted_v1', callback = noted, flags = {'allow-oom'}}
redis.register_function{function_name = 'penstock_feed_posts_v1', callback = posts, flags = {'no-writes'}}
redis.register_function{function_name = 'penstock_feed_follows_v1', callback = follows, flags = {'no-writes'}}
redis.register_function{function_name = 'penstock_feed_trim_v1', callback = trim, flags = {'allow-oom'}}
redis.register_function{function_name = 'penstock_feed_trim_posts_v1', callback = trim_posts, flags = {'allow-oom'}}
