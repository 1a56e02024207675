-- Reads a bucket and the clock for the holder of its lock.
--
-- KEYS[1]  the bucket; KEYS[2] its lock
-- ARGV[1]  now, in microseconds, or '' for the server's clock
-- ARGV[2]  the holder's token
-- returns {held, now, state}: held is 0 if the lock is somebody else's by now, state '' if the bucket is missing

local held = redis.call('GET', KEYS[2]) == ARGV[2] and 1 or 0
local now = ARGV[1]
if now == '' then
  local t = redis.call('TIME')
  now = string.format('%.0f', t[1] * 1000000 + t[2])
end
local state = redis.call('GET', KEYS[1]) or ''
if #state > 4096 then state = state:sub(1, 80) end -- not a state, whatever it is
return {held, now, state}
