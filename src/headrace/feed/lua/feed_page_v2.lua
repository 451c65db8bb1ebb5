#!lua name=headrace_feed_page_v2

-- A page of one shard of the feed; feed_index_v2.lua describes the keys and has all that writes them.

local FINEST_LEVEL, FINE_LEVELS, TOP_LEVEL, FIRST_WIDTH = -9, 2, 6, 134217728

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

-- The ranks, newest first, of an author's posts at score `top`: the first one below the id `tie`, or the one after all of them.
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

-- Append to `found` up to `need` posts of an author, newest first: before (top, tie), where a tie is given, else from top on,
-- and not below low. Top and low are given as text, too, since many authors are read with the same.
local function add_older(found, key, author, top, tie, low, need, top_text, low_text)
  local limit, skipped = tie and need + 1 or need, 0
  local rows = redis.call('ZRANGE', key, top_text, low_text, 'BYSCORE', 'REV', 'LIMIT', 0, limit, 'WITHSCORES')
  if tie then
    while rows[2 * skipped + 1] and tonumber(rows[2 * skipped + 2]) == top and not is_before(rows[2 * skipped + 1], tie) do
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

-- The newest `need` posts of some authors in a span: first a few of each; the last of the best of these is where to stop, and
-- authors whose few were all better are read again down to there.
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
      add_older(found, prefix .. author, author, post[1], post[2], stop, need - few, text_of(post[1]), stop_text)
    end
  end
  if #found > first then
    table.sort(found, is_newer)
  end
  return found
end

-- A page: the followed among the authors of one bucket after another, from the top down. Few followed authors are read in
-- each: where a bucket has more, a finer one is taken, as long as it is split.
local function page_of_buckets(base, follows, count, top, tie, low, fine, need)
  local found, cap = {}, need + 16
  local level = count >= 1000 and 2 or 3
  while top >= low and #found < need do
    local width = WIDTHS[level]
    local n, lowest = math.floor(top / width), base_level(top, fine)
    local key = bucket_key(base, level, n)
    local met = redis.call('SINTERCARD', 2, follows, key, 'LIMIT', cap + 1)
    local is_empty = met == 0 and level <= lowest and is_emptied(key)
    if is_empty or met > cap and level > FINEST_LEVEL and (level > lowest or is_split(key)) then
      level = level - 1
    else
      local start, part = math.max(n * width, low), {}
      if met > 0 then
        part = newest_of(base, redis.call('SINTER', follows, key), top, tie, start, need - #found)
        for i = 1, math.min(#part, need - #found) do
          found[#found + 1] = part[i]
        end
      end
      top, tie = start - 1, nil
      if #part < need / 4 and level < TOP_LEVEL then
        level = level + 1
      end
      -- Beyond the end of a bucket nothing is known of how the next one is split.
      lowest = base_level(top, fine)
      while level < lowest and start % WIDTHS[level + 1] == 0 do
        level = level + 1
      end
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

-- headrace_feed_page_v2: the newest posts of a viewer's authors. Read-only. KEYS f, m. ARGV: how many; score and id of the
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

redis.register_function{function_name = 'headrace_feed_page_v2', callback = page, flags = {'no-writes'}}
