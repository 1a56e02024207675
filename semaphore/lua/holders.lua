-- Lists who holds permits of a semaphore; changes nothing. KEYS as in apply.lua: state, held, info.
-- returns for each holder three strings: id, when its lease expires (microseconds), and 'permits process fence since label'

local call, int = redis.call, function(n) return string.format('%.0f', n) end
local t = call('TIME')
local s = call('HMGET', KEYS[1], 'seen', 'quiet')
local quiet = s[2] and parse(s[2])
local seen = quiet and int(quiet.head[6]) or s[1] or '0'
if not seen:find('^%d+$') or s[2] and not quiet then return redis.error_reply('CORRUPT state') end
local now = math.max(t[1] * 1000000 + t[2], tonumber(seen) - 2000000)
local reply = {}
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
local all = call('ZRANGEBYSCORE', KEYS[2], '(' .. int(now), '+inf', 'WITHSCORES')
for i = 1, #all, 2 do
  local text = call('HGET', KEYS[3], all[i])
  if text then add(all[i], all[i + 1], text) end
end
return reply
