-- Reads a bucket and the clock for the holder of its lock.
--
-- KEYS[1]  the bucket; KEYS[2] its lock
-- ARGV[1]  the holder's token
-- ARGV[2]  now, in microseconds, or '' for the server's clock
-- returns 'held' or 'lost' (another process may hold the lock), the time, the state ('' if the bucket is missing)

local now = ARGV[2]
if now == '' then
  local t = redis.call('TIME')
  now = string.format('%.0f', t[1] * 1000000 + t[2])
end
local state = redis.call('GETRANGE', KEYS[1], '0', '4096')
if #state > 4096 then state = state:sub(1, 80) end -- not a state
return {redis.call('GET', KEYS[2]) == ARGV[1] and 'held' or 'lost', now, state}
