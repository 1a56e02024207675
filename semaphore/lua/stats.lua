-- Returns the use of a semaphore; changes nothing. KEYS as in apply.lua: state, held, info, queue.
-- returns   'limit version used waiting'

local call = redis.call
local t = call('TIME')
local s = call('HMGET', KEYS[1], 'permits', 'used', 'seen', 'quiet')
local limit, version = (s[1] or not s[3] and '3 0 0' or ''):match('^[23] (%d+) (%d+)$')
local used, seen, quiet = s[2] or '0', s[3] or '0', s[4] and parse(s[4])
if not (limit and used:find('^%d+$') and seen:find('^%d+$')) or s[4] and not quiet then return redis.error_reply('CORRUPT state') end
if quiet then seen, used = quiet.head[6], quiet.head[7] end
local now = math.max(t[1] * 1000000 + t[2], tonumber(seen) - 2000000)
if quiet then
  for _, h in ipairs(quiet.holders) do
    if h.numbers[2] <= now then used = used - h.numbers[1] end
  end
  return {string.format('%s %s %.0f 0', limit, version, math.max(0, used))}
end
local expired = call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now), 'LIMIT', 0, 1000) -- at most 1000: the next batch removes them
if #expired > 0 then
  for _, text in ipairs(call('HMGET', KEYS[3], unpack(expired))) do used = used - (text or '0'):match('^%d*') end
end
return {string.format('%s %s %.0f %d', limit, version, math.max(0, used), call('ZCARD', KEYS[4]))}
