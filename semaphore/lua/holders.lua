-- Lists the holders of a semaphore; changes nothing. If there are thousands it returns a part, so as not to occupy the server for long.
-- KEYS      as in apply.lua: state, held, info
-- ARGV      the cursor: 0 for the first part, then the cursor that it returned. A holder may be in two parts.
-- returns   the next cursor, 0 after the last part, and for each holder three strings: id, when its lease expires (microseconds), and
--           'permits process fence since label'

local call, int = redis.call, function(n) return string.format('%.0f', tonumber(n)) end
local t = call('TIME')
local s = call('HMGET', KEYS[1], 'seen', 'quiet')
local quiet = s[2] and parse(s[2])
local seen = quiet and int(quiet.head[6]) or s[1] or '0'
if not seen:find('^%d+$') or s[2] and not quiet then return redis.error_reply('CORRUPT state') end
local now = math.max(t[1] * 1000000 + t[2], tonumber(seen) - 2000000)
local reply = {'0'}
local function add(id, expires, about)
  reply[#reply + 1] = id
  reply[#reply + 1] = int(expires)
  reply[#reply + 1] = about
end
if quiet then
  for _, h in ipairs(quiet.holders) do
    local n, expires, fence, since = unpack(h.numbers)
    if expires > now then add(h[1], expires, string.format('%d - %s %s %s', n, int(fence), int(since), h[2])) end
  end
  return reply
end
local all
if ARGV[1] == '0' and call('ZCARD', KEYS[2]) <= 1000 then
  all = call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
else
  reply[1], all = unpack(call('ZSCAN', KEYS[2], ARGV[1], 'COUNT', 1000))
end
for from = 1, #all, 2000 do
  local ids = {}
  for i = from, math.min(from + 1998, #all), 2 do ids[#ids + 1] = all[i] end
  for j, text in ipairs(call('HMGET', KEYS[3], unpack(ids))) do
    local expires = all[from + 2 * j - 1]
    if text and tonumber(expires) > now then add(ids[j], expires, text) end
  end
end
return reply
