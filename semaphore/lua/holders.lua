-- Lists who holds permits of a semaphore; changes nothing. KEYS as in apply.lua: state, held, info.
-- returns for each holder three strings: id, when its lease expires (microseconds), and 'permits process fence since label'

local t = redis.call('TIME')
local seen = redis.call('HGET', KEYS[1], 'seen') or '0'
if not seen:find('^%d+$') then return redis.error_reply('CORRUPT state') end
local now = math.max(t[1] * 1000000 + t[2], tonumber(seen) - 2000000)
local all = redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%.0f', now), '+inf', 'WITHSCORES')
local reply = {}
for i = 1, #all, 2 do
  local text = redis.call('HGET', KEYS[3], all[i])
  if text then
    reply[#reply + 1] = all[i]
    reply[#reply + 1] = string.format('%.0f', all[i + 1])
    reply[#reply + 1] = text
  end
end
return reply
