-- Writes the state of an instance, and adds the increase of its counters to the history. A repeated call changes nothing.
--
-- The increase of a limit's counters is their value less the one stored in Redis for the instance. So a repeated write adds
-- nothing, and the next write makes up for a lost one.
--
-- KEYS[1]  the instances: a sorted set by the time in milliseconds of their last beat
-- KEYS[2]  this instance: a hash
-- KEYS[3]  the rows of its limits: a hash
-- KEYS[4]  the events: a sorted set by time in milliseconds, of time:text
-- KEYS[5]  the minutes of an hour in which any instance has published: a bitmap
-- KEYS[6…] for each limit of ARGV its history of that hour: the name of KEYS[5], a colon and the limit's name
-- ARGV     1 the instance; 2 the number of the beat; 3 the hour since 1970 of KEYS; 4 milliseconds since the instance
--          started; 5 '1': begin, if the instance is not known; 6 '1': the instance ends; then the lengths of four lists:
--          7 limits: record, base, rate; 8 fields of the instance and 9 rows: name, text or '' to remove it; 10 events:
--          milliseconds ago, text; and then these lists
-- returns  what was done, the time in milliseconds, and '1' if there are rows: 'done'; 'old': this beat was applied before; 'hour': KEYS are of another
--          hour, and nothing was done; 'unknown': the instance is not known, and nothing was done
-- clock    the server's

local KNOWN, DAY, HISTORY = 600000, 86400000, 90000
local MOST_EVENTS, SAME_EVENT = 1000, 30000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function text(n) return string.format('%.0f', n) end
local beat, hour, uptime = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local seen = redis.call('HMGET', KEYS[2], 'beat', 'started')
if seen[1] and tonumber(seen[1]) >= beat then return {'old', text(now)} end
if not seen[1] and ARGV[5] ~= '1' then return {'unknown', text(now)} end
if math.floor(now / 3600000) ~= hour then return {'hour', text(now)} end
local minute = math.floor(now / 60000) % 60

-- A foreign value in the place of the bitmap or of a history is left alone.
local function alien(reply) return type(reply) == 'table' and reply.err and string.find(reply.err, 'WRONGTYPE', 1, true) end

local bit = redis.pcall('SETBIT', KEYS[5], minute, 1)
if type(bit) == 'table' and not alien(bit) then return bit end
redis.call('EXPIRE', KEYS[5], HISTORY)

-- Clocks that differ in rate move the start, but not at every beat.
local started = tonumber(seen[2] or 0)
if math.abs(started - (now - uptime)) > 1000 then started = now - uptime end

redis.call('ZADD', KEYS[1], text(now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. text(now - KNOWN))
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. text(now + KNOWN), '+inf') -- before the clock was set back
redis.call('PEXPIRE', KEYS[1], KNOWN)
redis.call('HSET', KEYS[2], 'beat', ARGV[2], 'started', text(started), 'seen', text(now), 'ended', ARGV[6])

local at = 11

local function count(key, gained, rate)
  local point = redis.pcall('HGET', key, minute)
  if alien(point) then return end
  local sum, last = {}, 0
  for n in string.gmatch(point or '', '%d+') do sum[#sum + 1] = tonumber(n) end
  for i = 1, math.max(#sum, #gained) do
    sum[i] = (sum[i] or 0) + (gained[i] or 0)
    if sum[i] > 0 then last = i end
  end
  for i = 1, #sum do sum[i] = text(sum[i]) end
  redis.call('HSET', key, minute, table.concat(sum, ' ', 1, last))
  if rate ~= '' then redis.call('HSET', key, 'r' .. minute, rate) end
  if not point then redis.call('EXPIRE', key, HISTORY) end
end

local function counters(record)
  local all = {}
  for n in string.gmatch(string.match(record, '^[%d ]*'), '%d+') do all[#all + 1] = tonumber(n) end
  return all
end

for i = 1, tonumber(ARGV[7]) do
  local key, record, base, rate = KEYS[5 + i], ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local field = '=' .. string.sub(key, #KEYS[5] + 2)
  at = at + 3
  if base ~= '=' then
    local gained, said = counters(record), counters(redis.call('HGET', KEYS[2], field) or '')
    local some = false
    base = counters(base)
    for j = 1, #gained do
      gained[j] = math.max(0, gained[j] - math.max(said[j] or 0, base[j] or 0))
      some = some or gained[j] > 0
    end
    if some then count(key, gained, rate) end
  end
  redis.call('HSET', KEYS[2], field, record)
end

local rows
for list = 2, 3 do
  for _ = 1, tonumber(ARGV[6 + list]) do
    if ARGV[at + 1] == '' then
      redis.call('HDEL', KEYS[list], ARGV[at])
    else
      redis.call('HSET', KEYS[list], ARGV[at], ARGV[at + 1])
    end
    at = at + 2
  end
  rows = redis.call('PEXPIRE', KEYS[list], KNOWN)
end

local events = tonumber(ARGV[10])
if events > 0 then
  -- Another instance may have reported the same event.
  local known = {}
  for _, e in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], text(now - SAME_EVENT), '+inf')) do
    known[string.match(e, ':(.*)') or ''] = true
  end
  for _ = 1, events do
    if not known[ARGV[at + 1]] then
      local when = text(now - tonumber(ARGV[at]))
      redis.call('ZADD', KEYS[4], when, when .. ':' .. ARGV[at + 1])
    end
    at = at + 2
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', text(now - DAY))
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - MOST_EVENTS)
  redis.call('PEXPIRE', KEYS[4], DAY)
end
return {'done', text(now), tostring(rows)}
